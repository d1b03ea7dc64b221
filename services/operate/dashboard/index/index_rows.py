"""The rows of the dashboard's index: numbers, short names and positions, but no texts."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from sys import intern
from typing import ClassVar, NamedTuple

from headrace.schemas.events import EpisodeEnded
from headrace.services.kafka.broker import Partition, Position

SHORT = 200
"""Most characters of a name that is kept. Longer ones are cut."""
OFFSET_BITS = 47
MOST_PARTITIONS = 1 << (62 - OFFSET_BITS)
ANY_SAMPLE = -1
"""The sample of a position that belongs to the whole task, or whose sample is unknown."""


def short(text: str) -> str:
    """Returns a name that is kept once, however many rows have it. A long one is cut."""
    return intern(text[:SHORT])


class Seen(NamedTuple):
    """Where and when a record was read."""

    partition: Partition
    offset: int
    at: float
    """When it was recorded, in seconds since the epoch."""
    size: int = 0
    """Bytes of its value."""


class PackedPositions:
    """Packs positions into one integer each."""

    def __init__(self) -> None:
        self._numbers: dict[Partition, int] = {}
        self._partitions: list[Partition] = []

    def pack(self, partition: Partition, offset: int) -> int:
        """Returns the position as an integer below 2**62.

        Raises ValueError if there are more partitions or records than fit.
        """
        number = self._numbers.get(partition)
        if number is None:
            number = self._numbers[partition] = len(self._partitions)
            self._partitions.append(partition)
        if number >= MOST_PARTITIONS or offset >> OFFSET_BITS:
            raise ValueError(f"{partition.topic}/{partition.number}@{offset} can't be packed")
        return number << OFFSET_BITS | offset

    def unpack(self, packed: int) -> Position:
        """Returns the position that `pack` has packed."""
        partition = self._partitions[packed >> OFFSET_BITS]
        return Position(partition, packed & ((1 << OFFSET_BITS) - 1))


@dataclass(slots=True)
class AttemptRow:
    """The trajectory of an attempt."""

    position: int
    turns: int
    tokens: int
    """Sampled and demonstrated tokens."""
    newest: int
    """Newest version among its tokens, or -1."""
    tools: tuple[str, ...]
    """The tools that its sampled texts call, each once."""


@dataclass(slots=True)
class EpisodeRow:
    """One sample of a task."""

    started_at: float = 0.0
    ended_at: float = 0.0
    """0 while it runs."""
    ending: str = ""
    reward: float | None = None
    seconds: float = 0.0
    attempts: int = 0
    oldest: int = -1
    """Oldest version among the sampled tokens of its policies, or -1."""
    policies: tuple[str, ...] = ()
    origin: str = ""
    """Who caused its failure; empty if it did not fail."""
    code: str = ""
    trajectory: int = -1
    """The position of the trajectory that counts, or -1."""
    by_attempt: dict[int, AttemptRow] = field(default_factory=dict)
    trained: dict[str, int] | None = None
    """By policy: the first version that was trained on it."""
    tool_failures: int = 0
    masked: bool = False
    """Whether no policy learns from what it sampled, because a limit cut it."""

    @property
    def state(self) -> str:
        """`waiting`, `running` or `ended`."""
        return "ended" if self.ended_at else "running" if self.started_at else "waiting"

    @property
    def attempt(self) -> AttemptRow | None:
        """The attempt that counts, or the newest one before the episode has ended."""
        if self.trajectory >= 0:
            found = (one for one in self.by_attempt.values() if one.position == self.trajectory)
            return next(found, None)
        return self.by_attempt[max(self.by_attempt)] if self.by_attempt else None

    def on_ended(self, event: EpisodeEnded, at: float, trajectory: int) -> None:
        """Takes the outcome that counts."""
        self.ended_at, self.ending = at, event.ending
        self.reward, self.seconds, self.attempts = event.reward, event.seconds, event.attempts
        versions = [one.oldest_version for one in event.policies if one.oldest_version >= 0]
        self.oldest = min(versions, default=-1)
        self.policies = tuple(dict.fromkeys(short(one.policy) for one in event.policies))
        self.trajectory, self.masked = trajectory, event.masked
        if event.failure is not None:
            self.origin, self.code = short(event.failure.origin), short(event.failure.code)


@dataclass(slots=True)
class GroupRow:
    """A task from the view of one policy."""

    dropped: bool
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step of which both the action and the observation were read, or a request of another kind.

    Steps share rows that are equal."""

    tools: tuple[str, ...] = ()
    failed: bool = False


@dataclass(slots=True)
class TaskRow:
    """One task, with the positions of all its records."""

    WIDTH: ClassVar[int] = 3

    task: int
    item: str = ""
    purpose: str = "train"
    submitted_at: float = 0.0
    ended_at: float = 0.0
    samples: dict[int, EpisodeRow] = field(default_factory=dict)
    groups: dict[str, GroupRow] = field(default_factory=dict)
    positions: array[int] = field(default_factory=lambda: array("q"))
    """WIDTH integers for each record: its position, the sample that it belongs to, its bytes."""
    calls: dict[tuple[int, int, str], tuple[str, ...] | tuple[bool, float] | StepRow] = field(
        default_factory=dict
    )
    """Steps by sample, attempt and call. If only the action was read so far: the names of its
    tools. If only the observation was read: whether it failed, and seconds."""

    def episode(self, sample: int) -> EpisodeRow:
        """Returns the row of a sample; makes it if there is none."""
        return self.samples.setdefault(sample, EpisodeRow())

    def note(self, position: int, sample: int, size: int) -> None:
        """Notes where a record of the task is."""
        self.positions.extend((position, sample, size))

    def positions_of(self, sample: int | None) -> Iterator[tuple[int, int]]:
        """Yields position and bytes of the task's records, or of those that concern a sample."""
        for index in range(0, len(self.positions), self.WIDTH):
            if sample is None or self.positions[index + 1] in (ANY_SAMPLE, sample):
                yield self.positions[index], self.positions[index + 2]


@dataclass(frozen=True, slots=True)
class DiscardedRow:
    """Something that was not trained on."""

    policy: str
    reason: str
    kind: str
    """`group`: the whole group was dropped; `sample`: a sample was left out of its group; `batch`:
    a batch dropped it."""
    task: int
    sample: int
    version: int | None
    at: float


@dataclass(slots=True)
class ToolRow:
    """What is known of a tool's calls, over all attempts."""

    calls: int = 0
    failed: int = 0
    seconds: float = 0.0
    example: tuple[int, int] | None = None
    """Task and sample of a call that failed."""


def rewards_of(rows: Iterable[EpisodeRow]) -> list[float]:
    """Returns the rewards of episodes that have one."""
    return [row.reward for row in rows if row.reward is not None and row.reward == row.reward]
