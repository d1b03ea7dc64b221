"""`python -m tests.scale [NAME...]`: simulates whole deployments, and reports them.

The product's own classes decide, in virtual time. It needs no Kafka. docs/scale.md explains what is
a model. The scenarios are in `tests/scale/catalogue.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from tests.bench.report import machine
from tests.scale.catalogue import SCENARIOS, ScaleScenario
from tests.scale.deployment_world import simulate
from tests.scale.measured import Measured
from tests.scale.plots import draw


def main() -> None:
    """Simulates, prints a table for each scenario, and draws a plot."""
    parser = argparse.ArgumentParser(prog="python -m tests.scale", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SCENARIOS))
    parser.add_argument("--small", action="store_true", help="as in the tests, in seconds")
    parser.add_argument("--seed", type=int, default=0, help="of what is random; default 0")
    parser.add_argument("--jobs", type=int, default=1, help="processes; default 1")
    parser.add_argument("--plots", type=Path, help="the folder for plots; default: no plots")
    options = parser.parse_args()
    if unknown := set(options.names) - SCENARIOS.keys():
        parser.error(f"no scenario {', '.join(sorted(unknown))}: {', '.join(SCENARIOS)}")
    with ProcessPoolExecutor(options.jobs) as processes:
        for name in options.names or SCENARIOS:
            scenario = SCENARIOS[name]
            arms = scenario.arms(options.small)
            # The largest first: it takes the longest.
            order = sorted(arms, key=lambda arm: -arms[arm].live)
            fleets = [replace(arms[arm], seed=options.seed) for arm in order]
            found = dict(zip(order, processes.map(simulate, fleets), strict=True))
            results = {arm: found[arm] for arm in arms}
            print("\n".join(["", scenario.question, "", *table(scenario, results)]), flush=True)
            if options.plots:
                draw(name, scenario, results, options.plots / f"scale-{name}.svg")
    print(f"\n{machine()}")


def table(scenario: ScaleScenario, results: Mapping[str, Measured]) -> list[str]:
    """Returns the lines of a table in Markdown, with an arm in each row."""
    names = [name for name, _ in scenario.columns]
    lines = [f"| {scenario.across} | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for arm, result in results.items():
        lines.append(f"| {arm} | " + " | ".join(of(result) for _, of in scenario.columns) + " |")
    return lines


if __name__ == "__main__":
    main()
