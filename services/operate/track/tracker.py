"""What a place that shows curves must do, and the points that go there."""

from __future__ import annotations

import fcntl
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from headrace.errors import UsageError
from headrace.schemas.events import PolicyPublished


@dataclass(frozen=True, slots=True)
class Point:
    """What the curves of a policy have at one version."""

    version: int
    recorded_at: float
    """When the version was published, in seconds since the epoch, by the log's clock."""
    values: dict[str, float]


class Tracker(Protocol):
    """The curves of one policy in one place.

    A tracker keeps no state of its own: `last` is read from the output when it is made. So a
    tracker that is made after a kill continues with the next version.
    """

    @property
    def last(self) -> int:
        """The newest version that was written, -1 if there is none."""

    async def write(self, point: Point) -> None:
        """Writes the next version, or keeps it back for `finish`."""

    async def finish(self) -> None:
        """Writes what was kept back. The run has ended."""

    async def aclose(self) -> None:
        """Ends the writing. What was written stays."""


def lock_output(file: BinaryIO, path: Path) -> None:
    """Locks a file for as long as it is open. Raises UsageError if another process has locked it.

    `path` names the output in the error.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UsageError(f"another process writes {path}: end it, or choose another --to") from None


def point_of(published: PolicyPublished, recorded_at: float) -> Point:
    """Returns the point of a version.

    Besides the version's metrics it has `wait_s`, `step_s` and `updates`, and `skipped`, which is 1
    if the version's batch was not trained on.
    """
    own = {
        "wait_s": published.wait_s,
        "step_s": published.step_s,
        "updates": float(published.updates),
        "skipped": float(published.status == "skipped"),
    }
    return Point(published.version, recorded_at, {**published.metrics, **own})
