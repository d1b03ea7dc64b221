"""The picture of a run: its panels, intervals and figures."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from headrace.schemas.events import PolicyPublished
from headrace.services.operate.evaluation import Estimate
from headrace.services.operate.plot.figure_file import empty_figure
from headrace.services.operate.plot.run_curves import RunCurves
from headrace.services.operate.plot.run_plot import draw_run


def curves(**evaluations: Estimate) -> RunCurves:
    published = {
        version: (
            100.0 + 2 * version,
            PolicyPublished(
                policy="default",
                version=version,
                status="trained" if version else "initial",
                digest=bytes(32),
                full_version=0,
                wait_s=3.0 * bool(version),
                step_s=1.0 * bool(version),
                metrics={"reward_mean": version / 4, "staleness_mean": 0.5} if version else {},
            ),
        )
        for version in range(5)
    }
    tokens = dict.fromkeys(range(1, 5), 64)
    found = {int(name[1:]): one for name, one in evaluations.items()}
    return RunCurves("exp", "default", published, tokens, found)


def text_of(path: Path) -> str:
    return "".join(ElementTree.parse(path).getroot().itertext())


def test_the_figures_of_a_run() -> None:
    found = curves()
    assert found.metric("reward_mean") == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert found.waiting() == [(version, 0.75) for version in range(1, 5)]
    assert found.throughput() == [(version, 32.0) for version in range(1, 5)]


def test_a_run_is_drawn_in_the_same_way_each_time(tmp_path: Path) -> None:
    whole = curves(v2=Estimate(0.5, 0.4, 0.6), v4=Estimate(0.7, -math.inf, math.inf))
    files = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for file in files:
        draw_run(whole, empty_figure(file, "FILE"), file)
    assert files[0].read_bytes() == files[1].read_bytes()
    text = text_of(files[0])
    assert "evaluation: avg@k, 95 %" in text
    assert "exp: policy default, 4 versions" in text


def test_a_run_without_evaluations_shows_what_the_trainer_waits(tmp_path: Path) -> None:
    file = tmp_path / "run.svg"
    draw_run(curves(), empty_figure(file, "FILE"), file)
    assert "share of time the trainer waits" in text_of(file)


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_run_of_one_version_is_drawn(suffix: str, tmp_path: Path) -> None:
    one = curves()
    one.published = {0: one.published[0]}
    file = tmp_path / f"run{suffix}"
    draw_run(one, empty_figure(file, "FILE"), file)
    assert file.stat().st_size > 1_000
