"""Draws the curves of a run."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.services.operate.plot.figure_file import add_panels, save_figure
from headrace.services.operate.plot.run_curves import RunCurves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STALENESS = ("staleness_mean", "staleness_oldest", "staleness_max")


def draw_run(curves: RunCurves, figure: Figure, path: Path) -> None:
    """Draws reward, evaluation, staleness and throughput over the versions into a file.

    Without evaluations there is a panel of what the trainer waits instead. Raises DependencyError
    if the disk can't take the file.
    """
    second = "evaluation: avg@k, 95 %" if curves.evaluations else "share of time the trainer waits"
    titles = ["mean reward of the batch", second, "staleness in versions", "tokens per second"]
    reward, evaluation, staleness, throughput = add_panels(figure, titles)
    _draw_line(reward, curves.metric("reward_mean"))
    if curves.evaluations:
        _draw_evaluations(evaluation, curves)
    else:
        _draw_line(evaluation, curves.waiting())
        evaluation.set_ylim(0, 1)
    for name in STALENESS:
        points = curves.metric(name)
        _draw_line(staleness, points, name.removeprefix("staleness_"))
    if staleness.get_lines():
        staleness.legend(fontsize="small")
    _draw_line(throughput, curves.throughput())
    throughput.set_ylim(bottom=0)
    newest = max(curves.published)
    figure.suptitle(f"{curves.namespace}: policy {curves.policy}, {newest} versions")
    save_figure(figure, path)


def _draw_line(axes: Axes, points: list[tuple[int, float]], label: str | None = None) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), label=label)


def _draw_evaluations(axes: Axes, curves: RunCurves) -> None:
    versions = sorted(curves.evaluations)
    estimates = [curves.evaluations[version] for version in versions]
    # An interval is infinite if its width is not known. Then only the point is drawn.
    bounds = [
        [one.value - one.low if isfinite(one.low) else 0.0 for one in estimates],
        [one.high - one.value if isfinite(one.high) else 0.0 for one in estimates],
    ]
    values = [one.value for one in estimates]
    axes.errorbar(versions, values, bounds, marker="o", markersize=3, capsize=2)
