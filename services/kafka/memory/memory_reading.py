"""Reading from the in-memory log: partitions that one is told, or shares with a group's members."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TypeVar

from headrace.errors import DependencyError
from headrace.services.kafka.broker import Committed, End, OnAssigned, OnRevoked, Partition, Record
from headrace.services.kafka.memory.memory_faults import Faults
from headrace.services.kafka.memory.memory_group import Member
from headrace.services.kafka.memory.memory_process import MemoryProcess
from headrace.services.kafka.memory.memory_state import State

ASSIGN_S = 30.0
REVOKE_S = 6.5
"""Seconds that the callbacks have, as with Kafka."""
POLL_S = 60.0
"""Seconds until a member that no longer reads (its callback failed) is expelled."""

R = TypeVar("R")


class Cursor:
    """Partitions, each with the offset that is read next."""

    def __init__(self, state: State, wake: asyncio.Event, faults: Faults) -> None:
        """`wake` is set whenever there may be more to take."""
        self._state = state
        self._faults = faults
        self._wake = wake
        self._positions: dict[Partition, int] = {}
        self._paused: dict[Partition, None] = {}
        self._ended: dict[Partition, int] = {}

    def add(self, positions: Mapping[Partition, int]) -> None:
        """Adds all partitions, or none: DependencyError where an offset is not there."""
        logs = [self._state.log(partition) for partition in positions]
        for log in logs:
            log.check(positions[log.partition])
        for log in logs:
            log.watchers[self._wake] = None
            self._positions[log.partition] = positions[log.partition]
            self._ended.pop(log.partition, None)
        self._wake.set()

    def drop(self, partitions: Iterable[Partition]) -> None:
        """Forgets partitions."""
        for partition in partitions:
            self._paused.pop(partition, None)
            self._ended.pop(partition, None)
            if self._positions.pop(partition, None) is None:
                continue
            logs = self._state.topics.get(partition.topic)
            if logs is not None:
                logs[partition.number].watchers.pop(self._wake, None)

    def clear(self) -> None:
        """Forgets all partitions."""
        self.drop(list(self._positions))

    def pause(self, partitions: Sequence[Partition]) -> None:
        """Holds partitions back."""
        self._paused |= dict.fromkeys(partitions)

    def resume(self, partitions: Sequence[Partition]) -> None:
        """Lets paused partitions flow again."""
        for partition in partitions:
            self._paused.pop(partition, None)
        self._wake.set()

    def take(self) -> list[Record | End]:
        """What can be read now, bounded; partitions take turns at coming first."""
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


class MemoryReader:
    """Reads partitions that it is told to, without a consumer group."""

    def __init__(self, process: MemoryProcess, state: State) -> None:
        self._process = process
        self._wake = asyncio.Event()
        self._cursor = Cursor(state, self._wake, process.faults)
        self._closed = False
        process.watch(self._wake)

    async def assign(self, positions: Mapping[Partition, int]) -> None:
        """Adds partitions, each from its offset. DependencyError where the offset is gone."""
        self._check()
        await self._process.call(lambda: self._cursor.add(positions))

    async def unassign(self, partitions: Sequence[Partition]) -> None:
        """Drops partitions: `read` yields nothing of them any more."""
        self._cursor.drop(partitions)

    async def pause(self, partitions: Sequence[Partition]) -> None:
        """Holds partitions back until `resume`."""
        self._cursor.pause(partitions)

    async def resume(self, partitions: Sequence[Partition]) -> None:
        """Lets paused partitions flow again."""
        self._cursor.resume(partitions)

    async def read(self) -> list[Record | End]:
        """Waits until there is at least one, and returns what has arrived, bounded."""
        while True:
            await self._process.turn()
            self._check()
            self._wake.clear()
            if items := self._cursor.take():
                return items
            await self._wake.wait()

    async def close(self) -> None:
        """Ends the reading."""
        self._closed = True
        self._cursor.clear()
        self._wake.set()

    def _check(self) -> None:
        if self._closed:
            raise DependencyError("this reader is closed: nothing more is read")


class MemorySubscription:
    """A member of a consumer group. A task of its own joins, and heeds what the group decides.

    As with Kafka, that task waits for the callbacks, and what they raise ends the reading.
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
        self._told_assigned = on_assigned
        self._told_revoked = on_revoked
        self._wake = asyncio.Event()
        self._cursor = Cursor(state, self._wake, process.faults)
        self._held: dict[Partition, None] = {}
        """The partitions that the callbacks were told of."""
        self._member = Member(self._topics)
        self._failure: Exception | None = None
        self._closing = False
        process.watch(self._wake)
        self._heeding = process.spawn(self._heed())

    async def read(self) -> list[Record | End]:
        """Waits until there is at least one, and returns what has arrived, bounded."""
        while True:
            await self._process.turn()
            self._wake.clear()
            if self._failure is not None:
                raise self._failure
            if items := self._cursor.take():
                return items
            await self._wake.wait()

    async def pause(self, partitions: Sequence[Partition]) -> None:
        """Holds partitions back until `resume`."""
        self._cursor.pause(partitions)

    async def resume(self, partitions: Sequence[Partition]) -> None:
        """Lets paused partitions flow again."""
        self._cursor.resume(partitions)

    async def commit(self, commits: Mapping[Partition, Committed]) -> None:
        """Commits for partitions that are held. One that is lost in between is left out."""
        held = {place: commits[place] for place in commits if place in self._held}
        if held:
            await self._commit(held)

    async def close(self) -> None:
        """Revokes all (with `on_revoked`) and leaves the group."""
        if self._closing or self._process.gone:
            return
        self._closing = True
        self._member.news.set()
        await asyncio.wait([self._heeding])
        try:
            if not self._process.gone:
                await self._give_up(list(self._held), lost=self._member.expelled)
        finally:
            self._cursor.clear()
            self._fail(DependencyError("this subscription is closed: nothing more is read"))
            if not self._process.gone:
                group, member = self._state.group(self._consumer_group), self._member
                await self._process.call(lambda: group.leave(member), group)
                self._process.end_session(member)

    async def _heed(self) -> None:
        """Joins the group, then does what it decides, until closed."""
        try:
            await self._join()
            while not self._closing:
                await self._member.news.wait()
                await self._process.turn()
                self._member.news.clear()
                if not self._closing:
                    await self._heed_news()
        except Exception as error:  # Whatever a callback raised: the reader must hear of it.
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

    async def _heed_news(self) -> None:
        member = self._member
        if member.expelled:
            self._process.end_session(member)
            await self._give_up(list(self._held), lost=True)
            await self._join()
            return
        if revoking := self._some(member.revoking):
            group = self._state.group(self._consumer_group)
            try:
                await self._give_up([at for at in revoking if at in self._held], lost=False)
            finally:
                await self._process.call(lambda: group.release(member, revoking), group)
        if granted := self._some(member.granted):
            await self._take_over(member, granted)
        if member.revoking or member.granted:
            member.news.set()

    def _some(self, partitions: Iterable[Partition]) -> list[Partition]:
        """All at once, or one of them."""
        faults, some = self._process.faults, list(partitions)
        return [faults.random.choice(some)] if some and faults.piecemeal else some

    async def _take_over(self, member: Member, granted: Sequence[Partition]) -> None:
        group = self._state.group(self._consumer_group)
        places = await self._process.call(
            lambda: self._state.committed(self._consumer_group, granted), group
        )
        for partition in granted:
            member.granted.pop(partition, None)
            if partition not in places:
                raise DependencyError(
                    f"the consumer group {self._consumer_group} has no place in "
                    f"{partition.topic}/{partition.number}: apply the recipe first"
                )
        await self._bounded(self._told_assigned(places), ASSIGN_S, "taking partitions over")
        self._held |= dict.fromkeys(places)
        self._cursor.add({partition: place.offset for partition, place in places.items()})

    async def _give_up(self, partitions: Sequence[Partition], *, lost: bool) -> None:
        """Lets the owner finish, and commits its last word. Nothing of them is read any more."""
        if not partitions:
            return
        self._cursor.drop(partitions)
        for partition in partitions:
            del self._held[partition]
        told = self._told_revoked(partitions, lost)
        last = await self._bounded(told, REVOKE_S, "giving partitions up")
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
                f"{what} in {self._consumer_group} took more than {limit_s:g} s: given up"
            ) from None

    def _fail(self, error: Exception) -> None:
        """Ends the reading. The first error counts."""
        if self._failure is None:
            self._failure = error
        self._wake.set()
