"""Many seeds in several processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.pool import processes
from tests.simulation.judge import Result
from tests.simulation.simulate import simulate

CHUNK = 5
"""Seeds that a process is given at once."""


@dataclass
class Summary:
    """What many seeds showed."""

    seeds: int = 0
    failed: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    records: int = 0
    virtual_s: float = 0.0

    def add(self, result: Result) -> None:
        """Takes one more in."""
        self.seeds += 1
        self.failed += bool(result.violations)
        self.faults += result.faults
        self.endings += result.endings
        self.records += result.records
        self.virtual_s += result.virtual_s

    def __str__(self) -> str:
        faults = "\n".join(f"  {count:8,} {kind}" for kind, count in self.faults.most_common())
        return (
            f"{self.seeds:,} seeds, {self.failed:,} with violations; {self.records:,} records, "
            f"{self.virtual_s / 3600:,.1f} virtual hours\n"
            f"{self.faults.total():,} faults:\n{faults}\n"
            f"episodes ended: {dict(self.endings.most_common())}"
        )


def run_seeds(seeds: Sequence[int], jobs: int) -> Iterator[Result]:
    """The results, in the order of the seeds."""
    with processes(jobs) as pool:
        yield from pool.map(_simulate, seeds, chunksize=CHUNK)


def _simulate(seed: int) -> Result:
    """In a process of the pool: what it shows, without the whole log."""
    result = simulate(seed)
    result.facts = None
    return result
