"""The plots of docs/scale.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.scale.catalogue import ScaleScenario
from tests.scale.measured import Measured, spread

Results = Mapping[str, Measured]


def draw(name: str, scenario: ScaleScenario, results: Results, path: Path) -> None:
    """Draws the panels of a scenario."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = PANELS[name]
    figure = Figure(figsize=(4.6 * len(panels), 3.2), layout="constrained")
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), number)
        axes.set_xlabel(scenario.across, fontsize="small")
        panel(axes, results)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "headrace"}):
        figure.savefig(path, metadata={"Date": None})


def _lines(axes: Any, results: Results, lines: Mapping[str, list[float]], title: str) -> None:
    counts = [int(arm.replace(",", "")) for arm in results]
    for label, values in lines.items():
        axes.plot(counts, values, marker="o", markersize=3, label=label)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize="medium")
    axes.legend(fontsize="small")


def _ramp_minutes(axes: Any, results: Results) -> None:
    middles = [spread(one.episodes)[0] / 60 for one in results.values()]
    _lines(
        axes,
        results,
        {
            "all, simulated": [one.last_end_s / 60 for one in results.values()],
            "an episode, median, simulated": middles,
            "all, MegaFlow (published)": [100.0] * len(results),
        },
        "minutes",
    )


def _ramp_added(axes: Any, results: Results) -> None:
    pairs = [spread(one.added) for one in results.values()]
    lines = {"median": [one for one, _ in pairs], "p99": [one for _, one in pairs]}
    _lines(axes, results, lines, "seconds added to a turn")


def _bars(axes: Any, values: Mapping[str, float], title: str) -> None:
    axes.bar(list(values), list(values.values()), color="C0")
    axes.set_title(title, fontsize="medium")
    axes.tick_params(axis="x", labelsize="small")


def _rates(axes: Any, results: Results) -> None:
    _bars(axes, {arm: one.rate / 1000 for arm, one in results.items()}, "1,000 tokens/s")


def _shares(axes: Any, results: Results) -> None:
    result = results["together"]
    total, speeds = sum(result.tokens.values()), sum(result.speeds.values())
    for name, tokens in result.tokens.items():
        axes.plot(result.speeds[name] / speeds, tokens / total, "o", color="C0")
    most = max(result.speeds.values()) / speeds
    axes.plot([0, most], [0, most], color="grey", linewidth=0.8)
    axes.set_title("a worker's share of the tokens", fontsize="medium")
    axes.set_xlabel("its share of the speed", fontsize="small")


def _waits(axes: Any, results: Results) -> None:
    _bars(axes, {arm: one.wait_fraction() for arm, one in results.items()}, "wait fraction")


def _versions(axes: Any, results: Results) -> None:
    for arm, one in results.items():
        hours = [moment / 3600 for moment in one.published_s]
        axes.plot(hours, range(1, len(hours) + 1), label=arm, linewidth=1)
    axes.set_xlabel("hours", fontsize="small")
    axes.set_title("versions", fontsize="medium")
    axes.legend(fontsize="small")


def _speeds(axes: Any, results: Results) -> None:
    found = {arm: 3600 / one.iteration_s() for arm, one in results.items()}
    _bars(axes, found, "versions in an hour")


def _turns(axes: Any, results: Results) -> None:
    _bars(axes, {arm: spread(one.waits)[1] for arm, one in results.items()}, "a turn, p99, seconds")


PANELS = {
    "ramp": (_ramp_minutes, _ramp_added),
    "heterogeneous": (_rates, _shares),
    "regions": (_waits, _versions),
    "spot": (_speeds, _turns),
}
