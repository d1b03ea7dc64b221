"""What each thread of some processes costs: CPU, waiting for a core, and how often it ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ThreadCost:
    """The cost of all threads of one name in one process."""

    cpu_ns: int = 0
    """On a core."""
    waited_ns: int = 0
    """Ready to run, while others had the cores."""
    runs: int = 0
    """How often it got a core: about once for each time that it was woken."""

    def plus(self, other: ThreadCost, sign: int = 1) -> ThreadCost:
        """The sum, or with -1 the difference."""
        return ThreadCost(
            self.cpu_ns + sign * other.cpu_ns,
            self.waited_ns + sign * other.waited_ns,
            self.runs + sign * other.runs,
        )


Costs = Mapping[tuple[str, str], ThreadCost]
"""By process and name of the thread."""


def thread_costs(processes: Mapping[str, int]) -> Costs:
    """The cost of the threads of processes since their start. `processes` are pids by name."""
    costs: dict[tuple[str, str], ThreadCost] = {}
    for process, pid in processes.items():
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # the thread has ended meanwhile
                numbers = map(int, (task / "schedstat").read_text().split())
                name = "main" if task.name == str(pid) else (task / "comm").read_text().strip()
                cost = costs.get((process, name), ThreadCost())
                costs[process, name] = cost.plus(ThreadCost(*numbers))
    return costs


def since(before: Costs, after: Costs) -> dict[tuple[str, str], ThreadCost]:
    """The costs between two readings, the dearest first. Threads that did nothing are left out."""
    spent = {key: cost.plus(before.get(key, ThreadCost()), -1) for key, cost in after.items()}
    ordered = sorted(spent.items(), key=lambda item: -item[1].cpu_ns)
    return {key: cost for key, cost in ordered if cost.cpu_ns > 0}


def total(costs: Iterable[ThreadCost]) -> ThreadCost:
    """The sum of costs."""
    summed = ThreadCost()
    for cost in costs:
        summed = summed.plus(cost)
    return summed
