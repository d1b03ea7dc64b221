"""Reads from the in-memory log: given partitions, or those that a consumer group assigns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TypeVar

from headrace.errors import DependencyError
from headrace.services.kafka.broker import (
    Committed,
    End,
    OnAssigned,
    OnRevoked,
    Partition,
    Reader,
    Record,
    Subscription,
)
from tests.memory.memory_faults import Faults
from tests.memory.memory_group import Member
from tests.memory.memory_process import MemoryProcess
from tests.memory.memory_state import State

ASSIGN_S = 30.0
REVOKE_S = 6.5
"""Time limits of the callbacks, as with Kafka."""
POLL_S = 60.0
"""Seconds until a member whose callback failed is expelled."""

R = TypeVar("R")


class Cursor:
    """Partitions, each with the next offset to read."""

    def __init__(self, state: State, wake: asyncio.Event, faults: Faults) -> None:
        """Sets `wake` whenever there may be more to take."""
        self._state = state
        self._faults = faults
        self._wake = wake
        self._positions: dict[Partition, int] = {}
        self._paused: dict[Partition, None] = {}
        self._ended: dict[Partition, int] = {}

    def add(self, positions: Mapping[Partition, int]) -> None:
        """Adds all partitions, or raises RecordsLost if an offset can't be read."""
        logs = [self._state.log(partition) for partition in positions]
        for log in logs:
            log.check(positions[log.partition])
        for log in logs:
            log.watchers[self._wake] = None
            self._positions[log.partition] = positions[log.partition]
            self._ended.pop(log.partition, None)
        self._wake.set()

    def drop(self, partitions: Iterable[Partition]) -> None:
        """Removes partitions."""
        for partition in partitions:
            self._paused.pop(partition, None)
            self._ended.pop(partition, None)
            if self._positions.pop(partition, None) is None:
                continue
            logs = self._state.topics.get(partition.topic)
            if logs is not None:
                logs[partition.number].watchers.pop(self._wake, None)

    def clear(self) -> None:
        """Removes all partitions."""
        self.drop(list(self._positions))

    def pause(self, partitions: Sequence[Partition]) -> None:
        """Takes nothing from partitions until `resume`."""
        self._paused |= dict.fromkeys(partitions)

    def resume(self, partitions: Sequence[Partition]) -> None:
        """Takes from paused partitions again."""
        for partition in partitions:
            self._paused.pop(partition, None)
        self._wake.set()

    def take(self) -> list[Record | End]:
        """Takes what can be read now, bounded. Partitions take turns at being first."""
        items: list[Record | End] = []
        most = self._faults.fetch
        turns = list(self._positions)
        if self._faults.disorder:
            self._faults.random.shuffle(turns)
        for partition in turns:
            if partition in self._paused or len(items) >= most:
                continue
            log = self._state.log(partition)
            records, position = log.read(self._positions[partition], most - len(items))
            items += records
            if records:
                del self._positions[partition]
            self._positions[partition] = position
            if position >= log.stable_end and self._ended.get(partition) != position:
                self._ended[partition] = position
                items.append(End(partition, position))
        return items


class MemoryReader(Reader):
    """Reads given partitions, without a consumer group."""

    def __init__(self, process: MemoryProcess, state: State) -> None:
        self._process = process
        self._wake = asyncio.Event()
        self._cursor = Cursor(state, self._wake, process.faults)
        self._closed = False
        process.watch(self._wake)

    async def assign(self, positions: Mapping[Partition, int]) -> None:
        """See Reader."""
        self._check()
        await self._process.call(lambda: self._cursor.add(positions))

    async def unassign(self, partitions: Sequence[Partition]) -> None:
        """See Reader."""
        self._cursor.drop(partitions)

    async def read(self) -> list[Record | End]:
        """See Reader."""
        while True:
            await self._process.turn()
            self._check()
            self._wake.clear()
            if items := self._cursor.take():
                return items
            await self._wake.wait()

    async def close(self) -> None:
        """See Reader."""
        self._closed = True
        self._cursor.clear()
        self._wake.set()

    def _check(self) -> None:
        if self._closed:
            raise DependencyError("this reader is closed and reads no more")


class MemorySubscription(Subscription):
    """A member of a consumer group. A background task joins the group and follows its decisions.

    As with Kafka, that task waits for the callbacks, and an error that they raise ends the reading.
    """

    def __init__(
        self,
        process: MemoryProcess,
        state: State,
        topics: Sequence[str],
        consumer_group: str,
        on_assigned: OnAssigned,
        on_revoked: OnRevoked,
    ) -> None:
        self._process = process
        self._state = state
        self._topics = tuple(topics)
        self._consumer_group = consumer_group
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._wake = asyncio.Event()
        self._cursor = Cursor(state, self._wake, process.faults)
        self._held: dict[Partition, None] = {}
        """The partitions that `on_assigned` has been called for."""
        self._member = Member(self._topics)
        self._failure: Exception | None = None
        self._closing = False
        process.watch(self._wake)
        self._following = process.spawn(self._follow_group())

    async def read(self) -> list[Record | End]:
        """See Subscription."""
        while True:
            await self._process.turn()
            self._wake.clear()
            if self._failure is not None:
                raise self._failure
            if items := self._cursor.take():
                return items
            await self._wake.wait()

    async def pause(self, partitions: Sequence[Partition]) -> None:
        """See Subscription."""
        self._cursor.pause(partitions)

    async def resume(self, partitions: Sequence[Partition]) -> None:
        """See Subscription."""
        self._cursor.resume(partitions)

    async def commit(self, commits: Mapping[Partition, Committed]) -> None:
        """See Subscription."""
        held = {partition: commits[partition] for partition in commits if partition in self._held}
        if held:
            await self._commit(held)

    async def close(self) -> None:
        """See Subscription."""
        if self._closing or self._process.gone:
            return
        self._closing = True
        self._member.news.set()
        await asyncio.wait([self._following])
        try:
            if not self._process.gone:
                await self._revoke(list(self._held), lost=self._member.expelled)
        finally:
            self._cursor.clear()
            self._fail(DependencyError("this subscription is closed and reads no more"))
            if not self._process.gone:
                group, member = self._state.group(self._consumer_group), self._member
                await self._process.call(lambda: group.leave(member), group)
                self._process.end_session(member)

    async def _follow_group(self) -> None:
        """Joins the group, and follows its decisions until closed."""
        try:
            await self._join()
            while not self._closing:
                await self._member.news.wait()
                await self._process.turn()
                self._member.news.clear()
                if not self._closing:
                    await self._follow_decision()
        except Exception as error:  # Whatever a callback raised, `read` must raise it.
            self._fail(error)
            group = self._state.group(self._consumer_group)
            asyncio.get_running_loop().call_later(POLL_S, group.expel, self._member)

    async def _join(self) -> None:
        group, member = self._state.group(self._consumer_group), Member(self._topics)

        def join() -> None:
            for topic in self._topics:
                self._state.log(Partition(topic, 0))
            group.join(member)
            self._process.keep_session(group, member)

        self._member = member
        await self._process.call(join, group)

    async def _follow_decision(self) -> None:
        member = self._member
        if member.expelled:
            self._process.end_session(member)
            await self._revoke(list(self._held), lost=True)
            await self._join()
            return
        if revoking := self._some(member.revoking):
            group = self._state.group(self._consumer_group)
            try:
                await self._revoke([at for at in revoking if at in self._held], lost=False)
            finally:
                await self._process.call(lambda: group.release(member, revoking), group)
        if granted := self._some(member.granted):
            await self._assign(member, granted)
        if member.revoking or member.granted:
            member.news.set()

    def _some(self, partitions: Iterable[Partition]) -> list[Partition]:
        """All of them, or one if they change piecemeal."""
        faults, some = self._process.faults, list(partitions)
        return [faults.random.choice(some)] if some and faults.piecemeal else some

    async def _assign(self, member: Member, granted: Sequence[Partition]) -> None:
        group = self._state.group(self._consumer_group)
        commits = await self._process.call(
            lambda: self._state.committed(self._consumer_group, granted), group
        )
        for partition in granted:
            member.granted.pop(partition, None)
            if partition not in commits:
                raise DependencyError(
                    f"the consumer group {self._consumer_group} has no commit for "
                    f"{partition.topic}/{partition.number}: apply the recipe first"
                )
        await self._bounded(self._on_assigned(commits), ASSIGN_S, "the assignment of partitions")
        self._held |= dict.fromkeys(commits)
        self._cursor.add({partition: at.offset for partition, at in commits.items()})

    async def _revoke(self, partitions: Sequence[Partition], *, lost: bool) -> None:
        """Stops reading partitions, lets the owner finish, and makes its last commits."""
        if not partitions:
            return
        self._cursor.drop(partitions)
        for partition in partitions:
            del self._held[partition]
        revoked = self._on_revoked(partitions, lost)
        last = await self._bounded(revoked, REVOKE_S, "the revocation of partitions")
        faults = self._process.faults
        if last and not lost and not faults.hit(faults.lost_commits):
            await self._commit(last)

    async def _commit(self, commits: Mapping[Partition, Committed]) -> None:
        group, member = self._state.group(self._consumer_group), self._member
        await self._process.call(lambda: group.commit(member, commits), group)

    async def _bounded(self, work: Awaitable[R], limit_s: float, what: str) -> R:
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
            raise DependencyError(
                f"{what} of {self._consumer_group} took more than {limit_s:g} s"
            ) from None

    def _fail(self, error: Exception) -> None:
        """Ends the reading: `read` raises the first error."""
        if self._failure is None:
            self._failure = error
        self._wake.set()
