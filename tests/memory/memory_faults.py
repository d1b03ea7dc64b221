"""Faults between the in-memory log and its processes, drawn from one random generator."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

BATCH = 500
"""Most records that one `read` returns."""


@dataclass(eq=False)
class Faults:
    """How often each fault occurs, as a share of 1. May be changed while it is in use.

    A send that is *reported as failed* raises DependencyError after `fail_s`, as after Kafka's
    delivery time-out. Its record may be in the log or not.
    """

    random: Random = field(default_factory=lambda: Random(0))
    latency_s: float = 0.0
    """Mean seconds that each message to or from the log takes; 0 is the next turn of the loop."""
    fetch: int = BATCH
    """Most records that one `read` returns."""
    fail_s: float = 3.0
    """Seconds until a writer reports a failure."""
    late: float = 0.0
    """Share of the requests in flight that still arrive after their sender died or froze."""
    lost_answers: float = 0.0
    """Share of sends that are written, and reported as failed."""
    lost_sends: float = 0.0
    """Share of sends that are not written, and reported as failed."""
    aborts: float = 0.0
    """Share of transactions that the writer must abort and write again."""
    unknown_commits: float = 0.0
    """Share of transactions whose outcome the writer never learns. It is random."""
    lost_commits: float = 0.0
    """Share of the last commits for revoked partitions that do not arrive."""
    piecemeal: bool = False
    """Partitions are assigned and revoked one by one, in random order."""
    disorder: bool = False
    """A reader reads its partitions in random order, not in turn."""

    def hit(self, share: float) -> bool:
        """Whether a fault with this share occurs now."""
        return share > 0 and self.random.random() < share

    def delay(self) -> float:
        """Seconds that the next message takes."""
        return self.random.expovariate(1 / self.latency_s) if self.latency_s else 0.0

    def heal(self) -> None:
        """Ends all faults but the latency."""
        self.late = self.lost_answers = self.lost_sends = 0.0
        self.aborts = self.unknown_commits = self.lost_commits = 0.0
        self.piecemeal = self.disorder = False
