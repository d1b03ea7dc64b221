"""Faults of many kinds on a real broker: nothing is lost, nothing doubled, everything drains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def chaos(tmp_path: Path, bound_s: float, *arguments: str) -> dict[str, Any]:
    """A chaos run as a process of its own: it makes namespaces and disks that end with it."""
    path = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--json", str(path), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=bound_s,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def assert_whole(found: dict[str, Any]) -> None:
    assert found["lost"] == found["doubled"] == found["violations"] == found["not_drained"] == []
    assert found["trained"] > 0
    assert sum(found["injections"].values()) > 0


@pytest.mark.long
def test_a_short_run_of_every_kind_loses_and_doubles_nothing(tmp_path: Path) -> None:
    assert_whole(chaos(tmp_path, 420.0, "--seconds", "20", "--seed", "3"))


@pytest.mark.long
def test_a_long_run_loses_and_doubles_nothing(tmp_path: Path) -> None:
    found = chaos(tmp_path, 5_400.0, "--seconds", "3600", "--injections", "500", "--seed", "1")
    assert_whole(found)
    assert sum(found["injections"].values()) >= 500
    assert len(found["injections"]) >= 8


@pytest.mark.long
def test_two_policies_wait_for_a_dead_trainer_and_go_on(tmp_path: Path) -> None:
    kinds = "kill-service,stop-service,twin,scale,kill-broker,net-delay,net-cut,infrastructure"
    arguments = ("--policies", "2", "--seconds", "200", "--seed", "3", "--kinds", kinds)
    found = chaos(tmp_path, 900.0, *arguments)
    assert_whole(found)
    assert found["injections"]["dead-trainer"] > 0


@pytest.mark.long
def test_three_brokers_lose_their_leaders_and_nothing_else(tmp_path: Path) -> None:
    found = chaos(tmp_path, 900.0, "--seconds", "300", "--brokers", "3", "--seed", "2")
    assert_whole(found)
    assert found["injections"]["kill-broker"] > 0
