"""Draws a comparison with matplotlib, which the extra `plot` installs."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.services.operate.compare.comparison import ComparedRun, Comparison
from headrace.services.operate.plot.figure_file import add_panels, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(comparison: Comparison, figure: Figure, path: Path) -> None:
    """Draws one panel for each metric over the versions, and one for the evaluation.

    A dotted line marks the first version whose weights differ from those of the first run. Raises
    DependencyError if the disk can't take the file.
    """
    metrics = comparison.metrics()
    replays = any(run.replay_of is not None for run in comparison.runs)
    recorded = {"reward_mean": "reward_mean of recorded episodes"} if replays else {}
    titles = [recorded.get(metric, metric) for metric in metrics]
    if comparison.evaluations:
        titles.append(f"evaluation of version {comparison.newest_common()}: avg@k")
    panels = add_panels(figure, titles)
    for axes, metric in zip(panels, metrics, strict=False):
        _draw_metric(axes, comparison, metric)
    if metrics:
        panels[0].legend(fontsize="small")
    if comparison.evaluations:
        _draw_evaluations(panels[-1], comparison)
    figure.suptitle(f"policy {comparison.policy}")
    save_figure(figure, path)


def _draw_metric(axes: Axes, comparison: Comparison, metric: str) -> None:
    for number, run in enumerate(comparison.runs):
        points = [
            (version, one.metrics[metric])
            for version, one in run.versions.items()
            if metric in one.metrics
        ]
        # Equal curves must both be visible, so the later ones are dashed.
        style = "-" if number == 0 else "--"
        axes.plot(*zip(*points, strict=True) if points else ((), ()), style, label=_label(run))
        first = comparison.first_other_weights(run)
        if first is not None:
            axes.axvline(first, linestyle=":", linewidth=0.8, color=f"C{number}")


def _draw_evaluations(axes: Axes, comparison: Comparison) -> None:
    axes.set_xlabel("")
    labels = []
    for number, (namespace, evaluation) in enumerate(comparison.evaluations.items()):
        average = evaluation.average
        labels.append(namespace)
        if average is not None:
            error = average.high - average.value  # Infinite if it is not known.
            axes.errorbar(number, average.value, error if isfinite(error) else None, fmt="o")
    axes.set_xticks(range(len(labels)), labels, fontsize="small")


def _label(run: ComparedRun) -> str:
    return run.namespace if run.replay_of is None else f"{run.namespace} (replay)"
