"""What the kit saw of one run of a trainer: what was published, and how its process behaved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.schemas.events import PolicyPublished, Ref


@dataclass(frozen=True, slots=True)
class Publication:
    """A record of `policies` that counts."""

    event: PolicyPublished
    digest: bytes | None
    """The digest of the weights that the record names. None if they can't be read."""
    problem: str = ""
    """Why they can't be read."""

    @property
    def version(self) -> int:
        """The version that it publishes."""
        return self.event.version


@dataclass
class ObservedRun:
    """One run: its batches, what the trainer published, and what happened to its process."""

    publications: list[Publication] = field(default_factory=list)
    """In the order of the log."""
    batches: dict[int, Ref] = field(default_factory=dict)
    """Where each batch is, by its version."""
    failures: list[str] = field(default_factory=list)
    """Versions that did not come in time, and processes that ended by themselves."""
    stopped_after_s: float | None = None
    """Seconds from SIGTERM to the end of the process. None if it had to be killed."""
    left_behind: Sequence[str] = ()
    """The commands of processes that were left after SIGTERM."""
    fenced: str | None = None
    """What the trainer did after another one had fenced it; empty if that was right. None if it was
    not fenced."""

    def effective(self) -> dict[int, Publication]:
        """Returns the publication of each version that counts: the last one."""
        return {one.version: one for one in self.publications}
