"""Tables and plots of experiments, with intervals of 95 % (Student's t) over the seeds."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from tests.bench.learning import interval
from tests.experiments.experiment import Experiment, Measurement, Run
from tests.experiments.timeline import Point

Runs = Mapping[str, Sequence[Run]]
"""Arm to its runs, in the order of the seeds."""


def table(experiment: Experiment, runs: Runs) -> list[str]:
    """Returns the lines of a table in Markdown: an arm in each row, a measurement in each column.

    If the arms are compared, the last column has the ratio of the first measurement to that of the
    first arm: the geometric mean over the seeds, with the interval of its logarithm. One seed has
    no interval.
    """
    first, names = experiment.arms[0].name, [one.name for one in experiment.measurements]
    compared = [f"{names[0]}, against {first}"] if experiment.compared else []
    columns = ["arm", *names, *compared]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for arm in experiment.arms:
        cells = [_cell(one, runs[arm.name]) for one in experiment.measurements]
        if experiment.compared:
            cells.append(_ratio(experiment.measurements[0], runs[arm.name], runs[first]))
        lines.append("| " + " | ".join([arm.name, *cells]) + " |")
    return lines


def _cell(measurement: Measurement, runs: Sequence[Run]) -> str:
    known = [value for run in runs if (value := measurement.of(run)) is not None]
    missing = f" ({len(runs) - len(known)} of {len(runs)} never)" if len(known) < len(runs) else ""
    if not known:
        return measurement.absent or f"never, in {len(runs)} runs"
    digits = measurement.digits
    error = f" ± {interval(known):,.{digits}f}" if len(known) > 1 else ""
    return f"{fmean(known):,.{digits}f}{error}{missing}"


def _ratio(measurement: Measurement, runs: Sequence[Run], others: Sequence[Run]) -> str:
    pairs = [(measurement.of(a), measurement.of(b)) for a, b in zip(runs, others, strict=True)]
    logs = [math.log(a / b) for a, b in pairs if a and b]
    if runs is others or len(logs) < len(pairs):
        return "1" if runs is others else "-"
    middle, error = fmean(logs), interval(logs)
    if len(logs) == 1:
        return f"{math.exp(middle):.2f}"
    low, high = math.exp(middle - error), math.exp(middle + error)
    return f"{math.exp(middle):.2f} ({low:.2f} to {high:.2f})"


def draw(experiment: Experiment, runs: Runs, path: Path) -> None:
    """Draws each policy's mean reward of five versions in a panel: a thin line for each seed."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    count = len(experiment.policies)
    figure = Figure(figsize=(6.0 * count, 3.4), layout="constrained")
    for number, policy in enumerate(experiment.policies, 1):
        axes = figure.add_subplot(1, count, number)
        axes.set_title(f"{experiment.name}: {policy}", fontsize="medium")
        axes.set_xlabel(experiment.across, fontsize="small")
        axes.set_ylabel("mean reward", fontsize="small")
        for index, (arm, made) in enumerate(runs.items()):
            for run in made:
                points = run.points[policy]
                xs = [point[experiment.across] for point in points]
                axes.plot(xs, _smooth(points), color=f"C{index}", alpha=0.35, linewidth=0.8)
            axes.plot(*_mean(experiment, policy, made), color=f"C{index}", label=arm)
        axes.legend(fontsize="small")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "headrace"}):
        figure.savefig(path, metadata={"Date": None})


def _mean(experiment: Experiment, policy: str, runs: Sequence[Run]) -> tuple[list[float], ...]:
    """The mean of the seeds, as far as all runs went."""
    series = [run.points[policy] for run in runs]
    axis = [[point[experiment.across] for point in points] for points in series]
    smooth = [_smooth(points) for points in series]
    first, last = max(xs[0] for xs in axis), min(xs[-1] for xs in axis)
    xs = [first + (last - first) * step / 100 for step in range(101)]
    means = [
        fmean(
            values[bisect_right(known, x) - 1] for known, values in zip(axis, smooth, strict=True)
        )
        for x in xs
    ]
    return xs, means


def _smooth(points: Sequence[Point], width: int = 5) -> list[float]:
    rewards = [point["reward"] for point in points]
    return [fmean(rewards[max(0, end - width) : end]) for end in range(1, len(rewards) + 1)]
