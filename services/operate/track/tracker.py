"""What a place that shows curves must do, and the points that go there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.schemas.events import PolicyPublished


@dataclass(frozen=True, slots=True)
class Point:
    """What the curves of a policy have at one version."""

    version: int
    recorded_at: float
    """When the version was published, in seconds since the epoch, by the log's clock."""
    values: dict[str, float]


class Tracker(Protocol):
    """The curves of one policy in one place. All methods block.

    A tracker keeps no state of its own: `last` is read from the output when it is made. So a
    tracker that is made after a kill continues with the next version.
    """

    @property
    def last(self) -> int:
        """The newest version that the output has, -1 if it has none."""

    def write(self, point: Point) -> None:
        """Writes the next version."""

    def close(self) -> None:
        """Ends the writing. What was written stays."""


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
