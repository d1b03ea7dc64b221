"""What goes wrong between the in-memory log and its processes, drawn from one source of chance."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

BATCH = 500
"""Most records that one `read` returns."""


@dataclass(eq=False)
class Faults:
    """How the way to the log fails, each as a share of 1. May be changed while it is in use.

    A send that is *reported as failed* raises DependencyError after `fail_s`, as when Kafka's
    delivery time-out has passed; its record may be in the log or not.
    """

    random: Random = field(default_factory=lambda: Random(0))
    latency_s: float = 0.0
    """Mean seconds that each way to the log takes; 0 is the next turn of the loop."""
    fetch: int = BATCH
    """Most records that one `read` returns."""
    fail_s: float = 3.0
    """Seconds until a writer gives up."""
    late: float = 0.0
    """Of requests under way when their sender dies or falls silent: they land all the same."""
    lost_answers: float = 0.0
    """Of sends: written, and reported as failed."""
    lost_sends: float = 0.0
    """Of sends: not written, and reported as failed."""
    aborts: float = 0.0
    """Of transactions: the log has the writer take them back and write them again."""
    unknown_commits: float = 0.0
    """Of transactions: the writer never learns whether they count. By chance they do."""
    lost_commits: float = 0.0
    """Of a group's last commits for partitions that are given up: they don't get through."""
    piecemeal: bool = False
    """Partitions change hands one by one, in an order of chance."""
    disorder: bool = False
    """A reader is given its partitions in an order of chance, and not in turn."""

    def hit(self, share: float) -> bool:
        """Whether a fault of this share strikes now."""
        return share > 0 and self.random.random() < share

    def delay(self) -> float:
        """Seconds that one way to the log takes now."""
        return self.random.expovariate(1 / self.latency_s) if self.latency_s else 0.0

    def heal(self) -> None:
        """From now on nothing fails. What is on its way stays as slow."""
        self.late = self.lost_answers = self.lost_sends = 0.0
        self.aborts = self.unknown_commits = self.lost_commits = 0.0
        self.piecemeal = self.disorder = False
