"""Simulates a seed, with a mutant in the code or without, and tells what complained."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.simulation.mutants.mutant import FORGERIES, ROOT, SCHEDULES, Mutant

RECORDED = Path(__file__).parent / "recorded.json"
_WRITING = threading.Lock()
CPU_S = 20
"""A run that takes longer goes round in circles."""
DEAR_S = 4.0
"""A seed that takes as much CPU is passed over in a hunt."""
TOLD = 20
"""Most violations that a trial tells of."""


class Endless(KeyboardInterrupt):
    """A run goes round in circles. (asyncio lets nothing else through that stops a loop.)"""


@dataclass(frozen=True)
class Trial:
    """One run of one seed."""

    mutant: str
    """Empty: the sound code."""
    faults: tuple[str, ...]
    """The only kinds that strike."""
    seed: int
    complaint: str = ""
    """The first of what was found; empty where nothing was."""
    cpu_s: float = 0.0

    @property
    def repeat(self) -> str:
        """The command that does it again."""
        faults = f"--faults {' '.join(map(repr, self.faults))}" if self.faults else ""
        return f"python -m tests.simulation.mutants {self.mutant} --seeds {self.seed} {faults}"

    def caught(self, mutant: Mutant) -> Trial | None:
        """The trial with the first complaint that is what the mutant is to be caught by."""
        for line in self.complaint.splitlines():
            if any(text in line for text in mutant.caught_by):
                return replace(self, complaint=line)
        return None


def try_here(mutant: Mutant | None, faults: Sequence[str], seeds: Sequence[int]) -> Trial:
    """Runs seeds until one catches, the last one if none does. (Without a mutant: one that finds.)

    In this process, which is good for nothing else then where there is a mutant.
    """
    if mutant is not None:
        mutant.install()
    signal.signal(signal.SIGXCPU, _give_up)
    name = "" if mutant is None else mutant.name
    for seed in seeds:
        began = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (int(began) + CPU_S, -1))
        try:
            found = simulated(seed, faults)
        except Endless as endless:
            found = [str(endless)]
        took = round(time.process_time() - began, 2)
        trial = Trial(name, tuple(faults), seed, "\n".join(found[:TOLD]), took)
        if trial.complaint if mutant is None else trial.caught(mutant) and took < DEAR_S:
            break
    return trial


def simulated(seed: int, faults: Sequence[str]) -> list[str]:
    """Simulates a seed. Returns what broke a rule."""
    # The product, maybe with a mutant in it:
    from tests.simulation import forgeries
    from tests.simulation.barrier_schedules import violations_of
    from tests.simulation.scenario import draw_only
    from tests.simulation.simulate import simulate

    if tuple(faults) == FORGERIES:
        return forgeries.violations_of(seed)
    if tuple(faults) == SCHEDULES:
        return violations_of(seed)
    return simulate(seed, scenario=draw_only(seed, faults)).violations


def _give_up(number: int, frame: object) -> None:
    raise Endless(f"I8: no end within {CPU_S} s of CPU")


def try_apart(mutant: Mutant | None, faults: Sequence[str], seeds: Sequence[int]) -> Trial:
    """As `try_here`, in a process of its own."""
    command = [sys.executable, "-m", "tests.simulation.mutants", "--json"]
    command += [] if mutant is None else [mutant.name]
    command += ["--seeds", *map(str, seeds), "--faults", *faults]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if not done.stdout:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    return _trial(json.loads(done.stdout.splitlines()[-1]))


def _trial(fields: dict[str, Any]) -> Trial:
    return Trial(**fields | {"faults": tuple(fields["faults"])})


def workers() -> ThreadPoolExecutor:
    """Waits for as many processes at once as there are cores."""
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="mutants")


def hunt(mutant: Mutant, seeds: int) -> Trial | None:
    """The first seed that catches a mutant: its own, then those of others. None where none does.

    A seed that complains of the sound code, too, catches nothing.
    """
    recorded = read_recorded()
    used = [trial.seed for trial in recorded.values() if trial.faults == mutant.faults]
    shared = sorted(set(used), key=lambda seed: (-used.count(seed), seed))
    own = [recorded[mutant.name].seed] if mutant.name in recorded else []
    queue = list(dict.fromkeys([*own, *shared, *range(seeds)]))
    while queue:
        found = try_apart(mutant, mutant.faults, queue).caught(mutant)
        if found is None or not try_apart(None, mutant.faults, [found.seed]).complaint:
            return found
        queue = queue[queue.index(found.seed) + 1 :]
    return None


def read_recorded() -> dict[str, Trial]:
    """The trial that catches each mutant, by its name."""
    if not RECORDED.exists():
        return {}
    return {name: _trial(fields) for name, fields in json.loads(RECORDED.read_text()).items()}


def write_recorded(trials: Iterable[Trial]) -> None:
    """Notes trials that catch their mutants, over those noted before."""
    with _WRITING:
        recorded = read_recorded() | {trial.mutant: trial for trial in trials}
        tree = {name: asdict(recorded[name]) for name in sorted(recorded)}
        partial = RECORDED.with_suffix(".partial")
        partial.write_text(json.dumps(tree, indent=1, ensure_ascii=False) + "\n")
        partial.rename(RECORDED)
