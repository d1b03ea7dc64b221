"""`python -m tests.experiments [NAME...]`: makes the runs of experiments, and reports them.

Each run is a whole `headrace run` on a Kafka of its own. The runs come one after the other, and
each is kept as a file, so a command that was interrupted goes on. Times count only on a quiet
machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.bench.deployment import a_stack
from tests.bench.report import machine
from tests.experiments.catalogue import EXPERIMENTS
from tests.experiments.experiment import Experiment, make_run, read_run, trials_of
from tests.experiments.report import draw, table

RESULTS = Path(".headrace/experiments")


def main() -> None:
    """Makes what is missing, and reports."""
    parser = argparse.ArgumentParser(prog="python -m tests.experiments", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(EXPERIMENTS))
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm; default 3")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"default {RESULTS}")
    parser.add_argument("--plots", type=Path, default=Path("docs"), help="default docs")
    options = parser.parse_args()
    if unknown := set(options.names) - EXPERIMENTS.keys():
        names = ", ".join(EXPERIMENTS)
        parser.error(f"no experiment {', '.join(sorted(unknown))}: choose from {names}")
    options.results.mkdir(parents=True, exist_ok=True)
    experiments = [EXPERIMENTS[name] for name in options.names or EXPERIMENTS]
    for experiment in experiments:
        make_runs(experiment, options.seeds, options.results)
    for experiment in experiments:
        report(experiment, options.seeds, options.results, options.plots)


def make_runs(experiment: Experiment, seeds: int, results: Path) -> None:
    """Makes the runs that are not there yet."""
    missing = [one for one in trials_of(experiment, range(seeds)) if read_run(one, results) is None]
    if not missing:
        return
    with a_stack() as cluster:
        for trial in missing:
            run = make_run(trial, results, cluster)
            found = {one.name: one.of(run) for one in experiment.measurements}
            print(f"{trial.name}: {found}", flush=True)


def report(experiment: Experiment, seeds: int, results: Path, plots: Path) -> None:
    """Prints a table, and draws a plot."""
    runs = {
        arm.name: [
            run
            for trial in trials_of(experiment, range(seeds))
            if trial.arm is arm and (run := read_run(trial, results)) is not None
        ]
        for arm in experiment.arms
    }
    lines = [experiment.question, "", *table(experiment, runs), "", machine()]
    if experiment.compared:
        plot = plots / f"experiment-{experiment.name}.svg"
        draw(experiment, runs, plot)
        lines.append(str(plot))
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
