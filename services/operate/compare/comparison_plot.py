"""Draws a comparison with matplotlib, which the extra `plot` installs."""

from __future__ import annotations

from math import ceil, isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import UsageError
from headrace.services.models.blobs import disk_errors
from headrace.services.operate.compare.comparison import ComparedRun, Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png")
COLUMNS = 2
PANEL_INCHES = (5.0, 2.6)
"""Width and height of the panel of one metric."""


def plotter(path: Path) -> Figure:
    """Returns an empty figure for `draw`. Raises UsageError if it could not be drawn into `path`.

    Call it before the work whose result is drawn.
    """
    if path.suffix not in FORMATS:
        raise UsageError(f"--plot {path}: give a file whose name ends in {' or '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.absolute().parent}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(f"--plot: {error}. Run pip install 'headrace[plot]'") from None
    return Figure(layout="constrained")


def draw(comparison: Comparison, figure: Figure, path: Path) -> None:
    """Draws one panel for each metric over the versions, and one for the evaluation.

    A dotted line marks the first version whose weights differ from those of the first run. Raises
    DependencyError if the disk can't take the file.
    """
    from matplotlib import rc_context

    metrics = comparison.metrics()
    panels = len(metrics) + bool(comparison.evaluations)
    rows = max(1, ceil(panels / COLUMNS))
    figure.set_size_inches(COLUMNS * PANEL_INCHES[0], rows * PANEL_INCHES[1])
    for position, metric in enumerate(metrics, 1):
        axes = figure.add_subplot(rows, COLUMNS, position)
        _draw_metric(axes, comparison, metric)
        if position == 1:
            axes.legend(fontsize="small")
    if comparison.evaluations:
        _draw_evaluations(figure.add_subplot(rows, COLUMNS, panels), comparison)
    figure.suptitle(f"policy {comparison.policy}")
    # Text stays text, and the same comparison gives the same file.
    with (
        rc_context({"svg.fonttype": "none", "svg.hashsalt": "headrace"}),
        disk_errors(f"write {path}"),
    ):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_metric(axes: Axes, comparison: Comparison, metric: str) -> None:
    replays = any(run.replay_of is not None for run in comparison.runs)
    title = f"{metric} of recorded episodes" if metric == "reward_mean" and replays else metric
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel("version", fontsize="small")
    axes.locator_params(axis="x", integer=True)
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
    axes.set_title(f"evaluation of version {comparison.newest_common()}: avg@k", fontsize="medium")
    labels = []
    for number, (namespace, evaluation) in enumerate(comparison.evaluations.items()):
        average = evaluation.average
        labels.append(namespace)
        if average is not None:
            error = average.high - average.value  # Infinite if there is only one task.
            axes.errorbar(number, average.value, error if isfinite(error) else None, fmt="o")
    axes.set_xticks(range(len(labels)), labels, fontsize="small")


def _label(run: ComparedRun) -> str:
    return run.namespace if run.replay_of is None else f"{run.namespace} (replay)"
