"""Follows a namespace's log from outside: what is open, who wrote last, and how long a gap was.

A *gap* is measured for each kill -9 of a service's process, by the timestamps of the records: from
the kill to the first record that a successor writes in each partition which the killed process
was writing (within the last two seconds), the longest of them. For services that aren't shared by
partitions it is the first record of any successor.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.schemas.events import BatchAssembled, Event, PolicyPublished, TaskEnded
from headrace.schemas.topics import BATCHES, POLICIES, RESULTS, TASKS
from headrace.services.kafka.broker import Record
from headrace.services.log.event_log import EventLog
from tests.following import Follower

RECENT_S = 2.0
SHARED = ("agent", "env", "inference")
"""Services whose processes share partitions, and write where they read."""
ANY = -1
"""Stands for all partitions of the other services."""


@dataclass
class Gap:
    """One kill -9, and when its partitions moved again."""

    service: str
    pid: int
    at: float
    """Epoch seconds."""
    alone: bool
    """Nothing else was wrong from the kill until it was mended."""
    moved: dict[int | str, float | None]
    """Partition, or policy, to seconds after the kill."""

    @property
    def seconds(self) -> float | None:
        """None while it lasts, and where the killed process had written nothing of late."""
        times = [after for after in self.moved.values() if after is not None]
        return max(times) if times and len(times) == len(self.moved) else None

    @property
    def lasts(self) -> bool:
        """Whether a partition still waits."""
        return bool(self.moved) and self.seconds is None


@dataclass
class Watch(Follower):
    """What has been read so far."""

    log: EventLog
    records: int = 0
    by_topic: Counter[str] = field(default_factory=Counter)
    open_tasks: set[int] = field(default_factory=set)
    tasks: int = 0
    """Submitted."""
    low_marks: Counter[str] = field(default_factory=Counter)
    """Policy to the number of the first task that its batches have not decided."""
    batches: Counter[str] = field(default_factory=Counter)
    versions: dict[str, int] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    _lasting: list[Gap] = field(default_factory=list)
    _ended: set[int] = field(default_factory=set)
    _last: dict[tuple[str, int | str], tuple[int, float]] = field(default_factory=dict)
    """Service and partition, or policy, to the last writer, and when."""

    @property
    def version(self) -> int:
        """The newest version of the slowest policy; -1 before version 0."""
        return min(self.versions.get(one, -1) for one in self.log.topics.policies)

    @property
    def low_mark(self) -> int:
        """All policies have decided the tasks below it."""
        return min(self.low_marks[one] for one in self.log.topics.policies)

    @property
    def untrained(self) -> list[str]:
        """The policies that have a batch which is not published."""
        return [one for one, batch in self.batches.items() if self.versions.get(one, -1) < batch]

    def killed(self, service: str, pid: int, at: float, *, alone: bool) -> Gap:
        """Notes a kill, from which a gap is measured."""
        mine: dict[int | str, float | None] = {
            partition: None
            for (name, partition), (writer, when) in self._last.items()
            if name == service and writer == pid and at - when < RECENT_S
        }
        gap = Gap(service, pid, at, alone, dict(mine))
        self.gaps.append(gap)
        if gap.lasts:
            self._lasting.append(gap)
        return gap

    async def flows(self, services: Iterable[str], bound_s: float) -> bool:
        """Waits until each of these services has written of late: all are at work."""

        def holds() -> bool:
            since = time.time() - RECENT_S / 2
            return {name for (name, _), (_, at) in self._last.items() if at > since} >= wanted

        wanted = set(services)
        return await self.comes_true(holds, bound_s)

    async def mended(self, gap: Gap, bound_s: float) -> bool:
        """Waits until a gap has ended. False where it doesn't within the bound."""
        return await self.comes_true(lambda: not gap.lasts, bound_s)

    def disturb(self) -> None:
        """Something else goes wrong now: the gaps that last are not its kill's alone."""
        for gap in self._lasting:
            gap.alone = False

    async def on_record(self, record: Record) -> None:
        """Takes what it tells of tasks, batches, versions, and of who wrote it."""
        topic = self.log.topics.by_name(record.partition.topic).topic
        self.records += 1
        self.by_topic[topic.name] += 1
        if topic is TASKS:
            self.tasks += 1
            if record.offset not in self._ended:
                self.open_tasks.add(record.offset)
        elif topic in (RESULTS, BATCHES, POLICIES):
            self._on_event((await self.log.decode(record)).event)
        source = next((text for name, text in record.headers if name == "ce_source"), b"")
        service, _, pid = source.decode().rpartition(f"-{socket.gethostname()}-")
        if service:
            place = _place(record, service)
            self._on_progress(service, place, int(pid), record.timestamp)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, TaskEnded):
            self._ended.add(event.task)
            self.open_tasks.discard(event.task)
        elif isinstance(event, BatchAssembled):
            self.batches[event.policy] = max(self.batches[event.policy], event.version)
            self.low_marks[event.policy] = max(self.low_marks[event.policy], event.low_mark)
        elif isinstance(event, PolicyPublished):
            newest = max(self.versions.get(event.policy, -1), event.version)
            self.versions[event.policy] = newest

    def _on_progress(self, service: str, place: int | str, pid: int, at: float) -> None:
        self._last[service, place] = pid, at
        for gap in self._lasting:
            waits = gap.service == service and gap.moved.get(place, 0.0) is None
            if waits and gap.pid != pid and at >= gap.at:
                gap.moved[place] = at - gap.at
        self._lasting = [gap for gap in self._lasting if gap.lasts]


def _place(record: Record, service: str) -> int | str:
    """What a process writes alone: a partition, what is of one policy, or all."""
    if service in SHARED:
        return record.partition.number
    if service in ("assemble-batches", "trainer"):
        return (record.key or b"").decode()
    return record.partition.topic if service == "item-statistics" else ANY
