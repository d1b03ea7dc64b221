"""Runs seeds by hand: `python -m tests.simulation --seed 7 --history`, or `--seeds 0-999`."""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.simulation.pool import Summary, run_seeds
from tests.simulation.simulate import simulate


def main() -> int:
    """Exit code 1 where a seed shows a violation."""
    options = _parse()
    if options.seed is not None:
        return _one(options)
    first, _, last = options.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    started = time.monotonic()
    summary = Summary()
    for result in run_seeds(seeds, options.jobs):
        summary.add(result)
        if result.violations:
            print(f"seed {result.seed} breaks a promise: {result.command}")
            print("\n".join(f"  {line}" for line in result.violations[:8]), flush=True)
        if summary.seeds % 100 == 0:
            seconds = f"{time.monotonic() - started:.0f} s"
            print(f"{summary.seeds} seeds, {summary.failed} with violations, {seconds}", flush=True)
    print(summary)
    print(f"{time.monotonic() - started:.0f} s in {options.jobs} processes")
    return 1 if summary.failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="run one seed")
    which.add_argument("--seeds", metavar="A-B", help="run many")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--history", action="store_true", help="print all that happened")
    parser.add_argument("--task", type=int, help="of the history, what names this task")
    parser.add_argument("--process", help="of the history, what this process did")
    return parser.parse_args()


def _one(options: argparse.Namespace) -> int:
    result = simulate(options.seed, history=options.history)
    if options.history:
        for line in result.lines:
            if options.process and not line.process.startswith(options.process):
                continue
            if options.task is not None and line.task not in (options.task, None):
                continue
            print(line)
    print(f"seed {result.seed}: {result.records} records in {result.virtual_s:.0f} virtual s")
    print(f"faults {dict(result.faults)}; endings {dict(result.endings)}")
    print(f"fingerprint {result.fingerprint}")
    for violation in result.violations:
        print(f"violation: {violation}")
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
