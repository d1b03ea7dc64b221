"""Which hosts of containers answer, said before anything starts."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.errors import DependencyError, UsageError
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.operate.check import host_contact
from headrace.services.operate.check.host_contact import require_hosts
from headrace.services.operate.cli import cli
from tests.unit.operate.check.test_check import tree
from tests.unit.processes.docker_fake import FakeEngine, fake, says
from tests.unit.processes.test_engine_checks import info

INFO = "GET /info"
FILTER = "name=seccomp,profile=builtin"
BOUND_S = 3.0


def recipe(*urls: str) -> Recipe:
    """Its containers may run on these hosts; without any, where the command `docker` would."""
    hosts = [{"url": url, "slots": 1} for url in urls]
    options: dict[str, Any] = {"image": "python:3.12"} | ({"hosts": hosts} if hosts else {})
    return parse_recipe(tree(environments__default={"use": "docker", "options": options}), "test")


def asked(made: Mapping[str, Any], tmp_path: Path, *others: str) -> tuple[FakeEngine, list[str]]:
    """Asks an engine that answers so, and other hosts. Returns also what was announced."""
    announced: list[str] = []

    async def main() -> FakeEngine:
        async with fake(tmp_path, made) as (engine, ours):
            await require_hosts(recipe(ours.host, *others), announced.append)
        return engine

    return asyncio.run(main()), announced


def test_an_engine_that_answers_is_asked_for_its_description_alone(tmp_path: Path) -> None:
    engine, announced = asked({INFO: says(info(FILTER))}, tmp_path)
    assert engine.asked == ["GET /version", INFO]
    assert announced == [f"trying environments.default: does unix://{tmp_path}/engine.sock answer?"]


def test_all_hosts_that_do_not_answer_are_named_with_the_reason_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket that nobody serves, an engine that is silent, and an ssh that is refused."""
    monkeypatch.setattr(host_contact, "CONTACT_S", BOUND_S)
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'Permission denied (publickey).' >&2\nexit 255\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    gone = f"unix://{tmp_path}/gone.sock"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        quiet = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(DependencyError) as caught:
            asked({INFO: says(info(FILTER))}, tmp_path, gone, quiet, "ssh://far")
        assert time.monotonic() - began < 10 * BOUND_S
    text = str(caught.value)
    assert caught.value.exit_code == 75
    assert f"environments.default: {gone} can't be used (" in text
    assert "FileNotFoundError" in text
    assert f"{quiet} can't be used (no answer in 3 s)" in text
    assert "Permission denied (publickey)" in text
    assert "`ssh -- far` must work without a question" in text
    assert "DOCKER_HOST" in text
    assert "engine.sock can't" not in text


def test_an_engine_that_isolates_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't enforce: PidsLimit"):
        asked({INFO: says(info(FILTER, PidsLimit=False))}, tmp_path)


def test_the_engine_of_docker_host_is_asked_unless_the_check_is_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/gone.sock")
    path = tmp_path / "recipe.json"
    path.write_text(recipe().model_dump_json())
    done = CliRunner().invoke(cli, ["check", "--here", str(path)])
    assert isinstance(done.exception, DependencyError)
    assert f"unix://{tmp_path}/gone.sock can't be used" in str(done.exception)
    assert "every part" not in done.output
    done = CliRunner().invoke(cli, ["check", "--here", str(path), "--offline"])
    assert done.exit_code == 0, done.output
    assert "every part of the recipe can be used" in done.output


def test_a_password_in_an_address_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("tcp://me:hunter2@127.0.0.1:1", "ssh://me:hunter2@host"):
        monkeypatch.setenv("DOCKER_HOST", address)
        announced: list[str] = []
        with pytest.raises(UsageError, match="DOCKER_HOST") as caught:
            asyncio.run(require_hosts(recipe(), announced.append))
        assert "hunter2" not in f"{caught.value} {announced}"
