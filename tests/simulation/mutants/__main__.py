"""Lists the mutants, runs some, or hunts for seeds that catch them.

    python -m tests.simulation.mutants                           what there is, and what catches it
    python -m tests.simulation.mutants NAME                      on the recorded seed
    python -m tests.simulation.mutants NAME --seeds N            on another; without NAME: no mutant
    python -m tests.simulation.mutants [NAME] --hunt N           the first of N seeds that catches
    python -m tests.simulation.mutants --record [--hunt N]       hunts for all that slip through now

Exit code 0: all were caught (without a mutant: nothing was found), 1: not so.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from tests.simulation.mutants.catalogue import MUTANTS
from tests.simulation.mutants.mutant import Mutant
from tests.simulation.mutants.trial import (
    Trial,
    hunt,
    read_recorded,
    try_apart,
    try_here,
    workers,
    write_recorded,
)

SEEDS = 40
"""How many seeds a hunt tries."""


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a mutant; several may be given")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="N", help="of the simulation")
    parser.add_argument("--faults", nargs="*", metavar="KIND", help="others than the mutant names")
    parser.add_argument("--hunt", type=int, nargs="?", const=SEEDS, metavar="N")
    parser.add_argument("--record", action="store_true", help="note what catches in recorded.json")
    parser.add_argument("--json", action="store_true", help="print trials as JSON")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - MUTANTS.keys()):
        parser.error(f"no mutant {', '.join(unknown)}: call it without a name for a list")
    mutants = [MUTANTS[name] for name in options.names]
    if options.seeds:
        mutant = mutants[0] if mutants else None
        faults = options.faults
        if faults is None:
            faults = mutant.faults if mutant else ()
        return _show(mutant, try_here(mutant, faults, options.seeds), options.json)
    if options.hunt or options.record:
        wanted = mutants or list(MUTANTS.values())
        return _hunt(wanted, options.hunt or SEEDS, record=options.record)
    if not mutants:
        return _list()
    recorded = read_recorded()
    trials = [(one, recorded[one.name]) for one in mutants]
    return max(_show(one, try_apart(one, was.faults, [was.seed]), False) for one, was in trials)


def _list() -> int:
    recorded = read_recorded()
    for mutant in MUTANTS.values():
        trial = recorded.get(mutant.name)
        caught = f"seed {trial.seed}: {trial.complaint}" if trial else "nothing yet"
        print(f"{mutant.name}\n    {mutant.sentence}\n    caught by {caught}")
    return 0


def _show(mutant: Mutant | None, trial: Trial, as_json: bool) -> int:
    right = not trial.complaint if mutant is None else trial.caught(mutant)
    if as_json:
        print(json.dumps(asdict(trial)))
    else:
        print(f"{trial.mutant or 'the sound code'}, seed {trial.seed}, {trial.cpu_s} s:")
        print(trial.complaint or "nothing was found")
    return 0 if right else 1


def _hunt(mutants: list[Mutant], seeds: int, *, record: bool) -> int:
    """Keeps the recorded seeds that still catch, and looks for new ones for the others."""
    with workers() as pool:
        hunts = [pool.submit(_find, mutant, seeds, record) for mutant in mutants]
        return 0 if all([one.result() for one in hunts]) else 1


def _find(mutant: Mutant, seeds: int, record: bool) -> bool:
    found = hunt(mutant, seeds)
    told = f"seed {found.seed}, {found.cpu_s} s: {found.complaint}" if found else "NOT CAUGHT"
    print(f"{mutant.name}: {told}", flush=True)
    if record and found is not None:
        write_recorded([found])
    return found is not None


if __name__ == "__main__":
    sys.exit(main())
