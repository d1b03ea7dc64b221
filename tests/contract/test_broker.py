"""What `services/kafka/broker.py` promises, held against the in-memory log and a real Kafka."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from headrace.errors import DependencyError, Fenced, HeadraceError, RecordsLost, UsageError
from headrace.services.kafka import admin, fetcher
from headrace.services.kafka.broker import (
    METADATA_LIMIT,
    Broker,
    Committed,
    End,
    Outgoing,
    Partition,
    Position,
    Reader,
    Record,
    Subscription,
)
from headrace.services.kafka.convert import partition_of
from tests.contract.broker_logs import SESSION_S, Log

GROUP = "group"
QUIET_S = 0.4
"""How long a test waits for what must not come."""


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


@dataclass
class Bench:
    """A log with a client or several, and a topic of the test's own."""

    log: Log
    brokers: list[Broker]
    topic: str
    group: str

    @property
    def broker(self) -> Broker:
        return self.brokers[0]

    def at(self, number: int = 0) -> Partition:
        return Partition(self.topic, number)

    def outgoing(self, value: str, number: int = 0) -> Outgoing:
        return Outgoing(self.topic, b"key", value.encode(), partition=number)

    async def send(self, *values: str, number: int = 0) -> None:
        for value in values:
            await self.broker.send(self.outgoing(value, number))

    def subscribe(self, broker: Broker | None = None, **callbacks: Any) -> Member:
        return Member(broker or self.broker, self.topic, self.group, **callbacks)


@asynccontextmanager
async def a_bench(
    log: Log,
    namespace: str,
    *,
    partitions: int = 1,
    clients: int = 1,
    session_s: float = SESSION_S,
) -> AsyncIterator[Bench]:
    brokers = [log.client(f"client-{number}", session_s) for number in range(clients)]
    bench = Bench(log, brokers, f"{namespace}.topic", f"{namespace}.{GROUP}")
    try:
        await bench.broker.create_topics({bench.topic: (partitions, {})})
        every = [bench.at(number) for number in range(partitions)]
        await bench.broker.commit_first(bench.group, every)
        yield bench
    finally:
        for broker in brokers:
            await broker.close()


@dataclass
class Member:
    """A member of a consumer group that keeps a list of all that happened to it."""

    broker: Broker
    topic: str
    group: str
    last_words: Mapping[Partition, Committed] = field(default_factory=dict)
    before_assigned: Callable[[], Coroutine[Any, Any, None]] | None = None
    before_revoked: Callable[[], Coroutine[Any, Any, None]] | None = None
    story: list[Any] = field(default_factory=list)
    commits: dict[Partition, Committed] = field(default_factory=dict)
    held: set[Partition] = field(default_factory=set)
    records: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.happened = asyncio.Event()
        self.subscription: Subscription = self.broker.subscribe(
            [self.topic], self.group, self._on_assigned, self._on_revoked
        )
        self.reading = asyncio.create_task(self._read())

    async def until(self, holds: Callable[[], bool], limit_s: float = 20) -> None:
        async with asyncio.timeout(limit_s):
            while not holds():
                if self.reading.done():
                    self.reading.result()
                self.happened.clear()
                await self.happened.wait()

    def told(self, what: str) -> list[tuple[Any, ...]]:
        """What the callbacks heard of one kind."""
        return [item for item in self.story if isinstance(item, tuple) and item[0] == what]

    async def close(self) -> None:
        await self.subscription.close()
        await asyncio.wait([self.reading])
        assert isinstance(self.reading.exception(), DependencyError)  # It ends what waits in it.

    async def _read(self) -> None:
        try:
            while True:
                items = await self.subscription.read()
                assert items
                self.story += items
                self.records += [item for item in items if isinstance(item, Record)]
                self.happened.set()
        finally:
            self.happened.set()

    async def _on_assigned(self, commits: Mapping[Partition, Committed]) -> None:
        if self.before_assigned is not None:
            await self.before_assigned()
        self.commits |= commits
        self.held |= set(commits)
        self.story.append(("assigned", sorted(commits)))
        self.happened.set()

    async def _on_revoked(
        self, partitions: Sequence[Partition], lost: bool
    ) -> Mapping[Partition, Committed]:
        self.story.append(("revoking", sorted(partitions), lost))
        self.happened.set()
        if self.before_revoked is not None:
            await self.before_revoked()
        self.held -= set(partitions)
        self.story.append(("revoked", sorted(partitions)))
        self.happened.set()
        return {at: self.last_words[at] for at in partitions if at in self.last_words}


async def read_to(reader: Reader, *ends: End) -> list[Record | End]:
    """Reads until all these ends have come."""
    items: list[Record | End] = []
    async with asyncio.timeout(20):
        while not set(ends) <= set(item for item in items if isinstance(item, End)):
            items += await reader.read()
    return items


async def what_comes(reader: Reader, limit_s: float = QUIET_S) -> list[Record | End]:
    """All that comes in a while."""
    items: list[Record | End] = []
    try:
        async with asyncio.timeout(limit_s):
            while True:
                items += await reader.read()
    except TimeoutError:
        return items


def values(items: Sequence[Record | End]) -> list[str]:
    return [item.value.decode() for item in items if isinstance(item, Record) and item.value]


# Sending


def test_patient_sends_become_durable_without_a_reader_and_keep_their_order(
    log: Log, namespace: str
) -> None:
    async def main() -> None:
        async with a_bench(log, namespace) as bench:
            outgoing = [replace(bench.outgoing(str(n)), patient=n % 3 > 0) for n in range(60)]
            positions = await asyncio.gather(*map(bench.broker.send, outgoing))
            assert [position.offset for position in positions] == list(range(60))

            alone = await bench.broker.send(replace(bench.outgoing("alone"), patient=True))

            assert alone == Position(bench.at(), 60)
            fetched = await bench.broker.fetch([*positions, alone])
            assert values(fetched) == [*map(str, range(60)), "alone"]

    run(main)


def test_a_patient_send_ends_with_its_broker_object(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace) as bench:
            sending = asyncio.create_task(
                bench.broker.send(replace(bench.outgoing("last"), patient=True))
            )
            await asyncio.sleep(0)
            await bench.broker.close()

            assert await asyncio.wait_for(sending, 5) == Position(bench.at(), 0)

    run(main)


def test_sends_in_flight_keep_their_order_in_each_partition(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace, partitions=2) as bench:
            outgoing = [bench.outgoing(str(n), n % 2) for n in range(600)]
            positions = await asyncio.gather(*map(bench.broker.send, outgoing))
            assert positions == [Position(bench.at(n % 2), n // 2) for n in range(600)]
            reader = bench.broker.reader()
            await reader.assign({bench.at(0): 0, bench.at(1): 0})
            items = await read_to(reader, End(bench.at(0), 300), End(bench.at(1), 300))
            for number in (0, 1):
                of_it = [item for item in items if item.partition.number == number]
                assert values(of_it) == [str(n) for n in range(number, 600, 2)]
                assert [item.offset for item in of_it] == list(range(301))

    run(main)


def test_a_record_comes_as_it_was_sent(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace) as bench:
            headers = [("name", b"\x00\xff"), ("name", b""), ("other", "ü".encode())]
            before = time.time()
            position = await bench.broker.send(
                Outgoing(bench.topic, b"\x01key", b"\x00value", headers, partition=0)
            )
            (record,) = await bench.broker.fetch([position])
            assert record.partition == bench.at()
            assert (record.offset, record.key, record.value) == (0, b"\x01key", b"\x00value")
            assert record.headers == headers
            assert before - 1 <= record.timestamp <= time.time() + 1

    run(main)


def test_the_key_decides_as_in_java(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace, partitions=7) as bench:
            keys = [str(task).encode() for task in range(200)] + [bytes(range(n)) for n in range(9)]
            keys += ["schlüssel".encode(), b"\xff\x80\x81", b"x" * 1_001]
            positions = await asyncio.gather(
                *(bench.broker.send(Outgoing(bench.topic, key, b"")) for key in keys if key)
            )
            numbers = [position.partition.number for position in positions]
            assert numbers == [partition_of(key, 7) for key in keys if key]
            assert set(numbers) == set(range(7))

    run(main)


def test_close_waits_for_what_is_in_flight(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace, clients=2) as bench:
            sends = [
                asyncio.create_task(bench.broker.send(bench.outgoing(str(n)))) for n in range(50)
            ]
            await asyncio.sleep(0)
            await bench.broker.close()
            assert [position.offset for position in await asyncio.gather(*sends)] == list(range(50))
            assert (await bench.brokers[1].ends([bench.at()]))[bench.at()] == (0, 50)
            with pytest.raises(DependencyError):
                await bench.broker.send(bench.outgoing("late"))

    run(main)


# Reading


def test_an_end_comes_whenever_all_has_been_read(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace, partitions=2) as bench:
            await bench.send("a", "b")
            reader = bench.broker.reader()
            await reader.assign({bench.at(0): 0, bench.at(1): 0})
            items = await read_to(reader, End(bench.at(0), 2), End(bench.at(1), 0))
            assert values(items) == ["a", "b"]
            await bench.send("c")
            items = await read_to(reader, End(bench.at(0), 3))
            assert values(items) == ["c"]

    run(main)


def test_ends_count_the_gaps_that_transactions_leave(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace) as bench:
            writer = await bench.broker.fenced(f"{namespace}.writer")
            await writer.write([bench.outgoing("a"), bench.outgoing("b")])
            reader = bench.broker.reader()
            await reader.assign({bench.at(): 0})
            assert values(await read_to(reader, End(bench.at(), 3))) == ["a", "b"]
            assert (await bench.broker.ends([bench.at()]))[bench.at()] == (0, 3)
            assert (await bench.broker.send(bench.outgoing("c"))).offset == 3
            assert values(await read_to(reader, End(bench.at(), 4))) == ["c"]

    run(main)


def test_an_open_transaction_holds_readers_back(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace) as bench:
            await bench.send("before")
            await log.leave_open(f"{namespace}.writer", bench.outgoing("never decided"))
            await bench.send("after")
            reader = bench.broker.reader()
            await reader.assign({bench.at(): 0})
            items = await read_to(reader, End(bench.at(), 1))
            items += await what_comes(reader)
            assert values(items) == ["before"]
            assert (await bench.broker.ends([bench.at()]))[bench.at()] == (0, 1)
            await bench.broker.fenced(f"{namespace}.writer")  # Aborts what its predecessor left.
            assert values(await read_to(reader, End(bench.at(), 4))) == ["after"]
            assert (await bench.broker.ends([bench.at()]))[bench.at()] == (0, 4)

    run(main)


def test_the_undecided_end_counts_what_an_open_transaction_hides(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace) as bench:
            await log.leave_open(f"{namespace}.other", bench.outgoing("never decided"))
            writer = await bench.broker.fenced(f"{namespace}.writer")
            await writer.write([bench.outgoing("one's own")])
            assert (await bench.broker.ends([bench.at()]))[bench.at()] == (0, 0)
            reader = bench.broker.reader()
            await reader.assign({bench.at(): 0})
            assert values(await what_comes(reader)) == []
            _, end = (await bench.broker.ends([bench.at()], include_uncommitted=True))[bench.at()]
            assert end == 3
            await bench.broker.fenced(f"{namespace}.other")  # Aborts: a mark more.
            assert values(await read_to(reader, End(bench.at(), end + 1))) == ["one's own"]

    run(main)


def test_reading_begins_at_the_offset_asked(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace, partitions=2) as bench:
            await bench.send("a", "b", "c")
            reader = bench.broker.reader()
            await reader.assign({bench.at(0): 1})
            assert values(await read_to(reader, End(bench.at(0), 3))) == ["b", "c"]
            await bench.send("x", number=1)
            await reader.assign({bench.at(1): 0})  # Adds; the other stays.
            assert values(await read_to(reader, End(bench.at(1), 1))) == ["x"]
            await bench.send("d")
            assert values(await read_to(reader, End(bench.at(0), 4))) == ["d"]

    run(main)


def test_what_is_gone_can_not_be_read(
    log: Log, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "UNKNOWN_S", 0.5)

    async def main() -> None:
        async with a_bench(log, namespace) as bench:
            await bench.send("a", "b", "c")
            await log.expire(bench.at(), 2)
            assert (await bench.broker.ends([bench.at()]))[bench.at()] == (2, 3)
            reader = bench.broker.reader()
            where = f"{bench.topic}/0"
            with pytest.raises(RecordsLost, match=f"{where}: 1 record is lost, offsets 1 to 1: "):
                await reader.assign({bench.at(): 1})
            with pytest.raises(RecordsLost, match=f"{where}: .* offsets 3 to 3: .* created again"):
                await reader.assign({bench.at(): 4})
            with pytest.raises(DependencyError):
                await reader.assign({Partition(f"{namespace}.absent", 0): 0})
            await reader.assign({bench.at(): 2})
            assert values(await read_to(reader, End(bench.at(), 3))) == ["c"]
            with pytest.raises(RecordsLost, match=f"{where}: 1 record is lost"):
                await bench.broker.fetch([Position(bench.at(), 1)])

    run(main)


def test_nothing_of_an_unassigned_partition_comes(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace, partitions=2) as bench:
            await asyncio.gather(
                *(bench.broker.send(bench.outgoing(str(n), n % 2)) for n in range(3_000))
            )
            reader = bench.broker.reader()
            await reader.assign({bench.at(0): 0, bench.at(1): 0})
            first = await reader.read()
            assert first
            await reader.unassign([bench.at(0)])  # With some of it fetched already, maybe.
            items = await read_to(reader, End(bench.at(1), 1_500))
            assert {item.partition for item in items} == {bench.at(1)}
            await bench.send("more", number=0)
            assert await what_comes(reader) == []
            await reader.assign({bench.at(0): 1_498})
            items = await read_to(reader, End(bench.at(0), 1_501))
            assert [item.offset for item in items] == [1_498, 1_499, 1_500, 1_501]

    run(main)


def test_closing_a_reader_ends_what_waits_in_it(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace) as bench:
            reader = bench.broker.reader()
            await reader.assign({bench.at(): 0})
            await read_to(reader, End(bench.at(), 0))
            reading = asyncio.create_task(reader.read())
            await asyncio.sleep(0)
            await reader.close()
            with pytest.raises(DependencyError):
                await reading

    run(main)


# Fetching


def test_fetch_answers_in_the_order_asked(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace, partitions=2) as bench:
            for number in (0, 1):
                await asyncio.gather(
                    *(bench.broker.send(bench.outgoing(f"{number}-{n}", number)) for n in range(50))
                )
            wanted = [(1, 40), (0, 49), (1, 3), (0, 0), (1, 40), (1, 4)]
            positions = [Position(bench.at(number), offset) for number, offset in wanted]
            records = await bench.broker.fetch(positions)
            assert values(records) == [f"{number}-{offset}" for number, offset in wanted]
            assert [Position(record.partition, record.offset) for record in records] == positions
            assert await bench.broker.fetch([]) == []

    run(main)


def test_fetch_does_not_wait_for_a_record_that_was_never_written(
    log: Log, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference may name the next offset. It is lost: the process must not retry for ever."""
    monkeypatch.setattr(fetcher, "SILENCE_S", 1.0)

    async def main() -> None:
        async with a_bench(log, namespace) as bench:
            await bench.send("a")
            for offset in (1, 2, 2**40):
                with pytest.raises(RecordsLost, match="the log ends at 1"):
                    await bench.broker.fetch(
                        [Position(bench.at(), 0), Position(bench.at(), offset)]
                    )
            assert values(await bench.broker.fetch([Position(bench.at(), 0)])) == ["a"]

    run(main)


def test_fetch_finds_no_record_where_a_marker_lies(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace) as bench:
            writer = await bench.broker.fenced(f"{namespace}.writer")
            await writer.write([bench.outgoing("a")])
            reader = bench.broker.reader()
            await reader.assign({bench.at(): 0})
            await read_to(reader, End(bench.at(), 2))
            await bench.send("b")
            with pytest.raises(RecordsLost, match=r"offsets 1 to 1.* a gap"):
                await bench.broker.fetch([Position(bench.at(), 0), Position(bench.at(), 1)])
            records = await bench.broker.fetch([Position(bench.at(), 2), Position(bench.at(), 0)])
            assert values(records) == ["b", "a"]

    run(main)


# Consumer groups


def test_a_member_reads_from_the_groups_places(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace, partitions=2) as bench:
            await bench.send("a", "b")
            await bench.send("x", number=1)
            member = bench.subscribe()
            await member.until(lambda: len(member.records) == 3)
            assert member.story[0] == ("assigned", [bench.at(0), bench.at(1)])
            await member.subscription.commit({bench.at(0): Committed(1, "noted")})
            assert await bench.broker.committed(bench.group, [bench.at(0), bench.at(1)]) == {
                bench.at(0): Committed(1, "noted"),
                bench.at(1): Committed(0),
            }
            await member.close()
            later = bench.subscribe()
            await later.until(lambda: len(later.records) == 2)
            assert later.commits[bench.at(0)] == Committed(1, "noted")
            assert sorted(values(later.records)) == ["b", "x"]
            await later.close()

    run(main)


def test_no_record_comes_before_on_assigned_has_returned(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace) as bench:
            await bench.send("a")
            asked, answer = asyncio.Event(), asyncio.Event()

            async def wait() -> None:
                asked.set()
                await answer.wait()

            member = bench.subscribe(before_assigned=wait)
            await asked.wait()
            await asyncio.sleep(QUIET_S)
            assert member.story == []
            answer.set()
            await member.until(lambda: bool(member.records))
            assert member.story[0] == ("assigned", [bench.at()])
            await member.close()

    run(main)


def test_a_group_without_a_commit_is_an_error(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace) as bench:
            bench.group += ".new"
            assert await bench.broker.committed(bench.group, [bench.at()]) == {}
            member = bench.subscribe()
            with pytest.raises(DependencyError, match="no commit"):
                await member.until(lambda: bool(member.story))
            await member.close()

    run(main)


def test_members_share_the_partitions(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace, partitions=5, clients=2) as bench:
            one, other = bench.subscribe(), bench.subscribe(bench.brokers[1])
            every = {bench.at(number) for number in range(5)}

            def shared() -> bool:
                return one.held | other.held == every and len(one.held) in (2, 3)

            while not shared():
                await asyncio.wait(
                    [asyncio.create_task(member.happened.wait()) for member in (one, other)],
                    return_when=asyncio.FIRST_COMPLETED,
                )
                one.happened.clear()
                other.happened.clear()
            assert not one.held & other.held
            for number in range(5):
                await bench.send(str(number), number=number)
            await one.until(lambda: len(one.records) == len(one.held))
            await other.until(lambda: len(other.records) == len(other.held))
            assert {record.partition for record in one.records} == one.held
            assert {record.partition for record in other.records} == other.held
            await one.close()
            await other.close()

    run(main)


def test_a_hand_over_waits_for_the_last_words_and_keeps_them(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace, partitions=4, clients=2) as bench:
            for number in range(4):
                await bench.send("a", "b", "c", number=number)
            every = [bench.at(number) for number in range(4)]
            finish = asyncio.Event()
            one = bench.subscribe(
                last_words=dict.fromkeys(every, Committed(2, "last words")),
                before_revoked=finish.wait,
            )
            await one.until(lambda: len(one.records) == 12)
            other = bench.subscribe(bench.brokers[1])
            await one.until(lambda: bool(one.told("revoking")))
            ((_, moved, lost),) = one.told("revoking")
            assert not lost
            assert len(moved) == 2  # Balanced, and no more than that moves.
            for number in range(4):
                await bench.send("d", number=number)
            await asyncio.sleep(QUIET_S)
            assert other.story == []  # What is not let go of is not handed over.
            finish.set()
            await other.until(lambda: len(other.records) == 4)
            assert other.commits == dict.fromkeys(moved, Committed(2, "last words"))
            assert sorted(values(other.records)) == ["c", "c", "d", "d"]
            await one.until(lambda: len(one.records) == 14)
            after = one.story[one.story.index(("revoking", moved, False)) :]
            read = {item.partition for item in after if isinstance(item, Record | End)}
            assert read == set(every) - set(moved)
            await one.close()
            await other.close()

    run(main)


def test_closing_a_subscription_hands_over_at_once(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace, partitions=2, clients=2, session_s=60) as bench:
            every = [bench.at(0), bench.at(1)]
            one = bench.subscribe(last_words=dict.fromkeys(every, Committed(0, "bye")))
            await one.until(lambda: len(one.held) == 2)
            await one.close()
            assert one.story[-1] == ("revoked", every)
            assert ("revoking", every, False) in one.story
            assert await bench.broker.committed(bench.group, every) == dict.fromkeys(
                every, Committed(0, "bye")
            )
            other = bench.subscribe(bench.brokers[1])
            await other.until(lambda: len(other.held) == 2)  # It left: none is waited for.
            with pytest.raises(DependencyError):
                await one.subscription.read()
            await other.close()

    run(main)


def test_closing_the_broker_leaves_the_group(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace, clients=2) as bench:
            member = bench.subscribe(last_words={bench.at(): Committed(0, "bye")})
            await member.until(lambda: bool(member.held))
            await bench.broker.close()
            assert member.held == set()
            committed = await bench.brokers[1].committed(bench.group, [bench.at()])
            assert committed == {bench.at(): Committed(0, "bye")}
            await member.close()

    run(main)


def test_the_members_of_a_group_are_counted(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace, partitions=2, clients=2) as bench:
            watcher = bench.brokers[1]
            assert await watcher.members(bench.group) == 0
            first, second = bench.subscribe(), bench.subscribe()
            await first.until(lambda: len(first.held) == len(second.held) == 1)
            assert await watcher.members(bench.group) == 2
            await first.close()
            assert await watcher.members(bench.group) == 1
            await second.close()
            assert await watcher.members(bench.group) == 0
            assert await watcher.members(f"{bench.group}.unknown") == 0

    run(main)


def test_a_silent_member_loses_its_partitions_and_its_commits(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with (
            a_bench(log, namespace, partitions=2) as bench,
            log.member(bench.topic, bench.group) as silent,
        ):
            assert await silent.hear() == "assigned 0,1"
            silent.freeze()
            heir = bench.subscribe()
            await heir.until(lambda: len(heir.held) == 2)
            assert set(heir.commits.values()) == {Committed(0)}
            await heir.subscription.commit(dict.fromkeys(heir.held, Committed(0, "heir")))
            silent.tell("commit 0")  # As a zombie, which may not know that it is one.
            silent.thaw()
            heard = {await silent.hear(), await silent.hear()}
            assert heard == {"lost 0,1", "committed"}
            every = [bench.at(0), bench.at(1)]
            await heir.until(lambda: len(heir.held) == 1)  # The zombie joined again.
            committed = await bench.broker.committed(bench.group, every)
            assert committed == dict.fromkeys(every, Committed(0, "heir"))
            await heir.close()

    run(main)


def test_a_killed_members_partitions_are_handed_over(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with (
            a_bench(log, namespace, partitions=2) as bench,
            log.member(bench.topic, bench.group) as member,
        ):
            assert await member.hear() == "assigned 0,1"
            await bench.send("a")
            assert await member.hear() == "read 0 0"
            member.tell("commit 0")
            assert await member.hear() == "committed"
            member.kill()
            heir = bench.subscribe()
            await heir.until(lambda: len(heir.records) == 1)
            assert heir.commits == {bench.at(number): Committed(0, "zombie") for number in (0, 1)}
            await heir.close()

    run(main)


def test_pausing_a_member_keeps_it_in_the_group(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace, partitions=2) as bench:
            member = bench.subscribe()
            await member.until(lambda: End(bench.at(0), 0) in member.story)
            await member.subscription.pause([bench.at(0)])
            await bench.send("held back")
            await bench.send("flows", number=1)
            await member.until(lambda: bool(member.records))
            await asyncio.sleep(SESSION_S * 1.5)
            assert values(member.records) == ["flows"]
            await member.subscription.resume([bench.at(0)])
            await member.until(lambda: len(member.records) == 2)
            assert values(member.records) == ["flows", "held back"]
            assert len(member.held) == 2
            await member.close()

    run(main)


def test_commits_of_partitions_not_held_are_left_out(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace, partitions=2) as bench:
            outside = f"{namespace}.outside"
            await bench.broker.create_topics({outside: (1, {})})
            await bench.broker.commit_first(bench.group, [Partition(outside, 0)])
            member = bench.subscribe()
            await member.until(lambda: len(member.held) == 2)
            await member.subscription.commit(
                {bench.at(1): Committed(0, "mine"), Partition(outside, 0): Committed(7, "not mine")}
            )
            assert await bench.broker.committed(
                bench.group, [bench.at(1), Partition(outside, 0)]
            ) == {bench.at(1): Committed(0, "mine"), Partition(outside, 0): Committed(0)}
            await member.close()

    run(main)


def test_metadata_has_a_limit(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace) as bench:
            member = bench.subscribe()
            await member.until(lambda: bool(member.held))
            longest = Committed(0, "x" * METADATA_LIMIT)
            await member.subscription.commit({bench.at(): longest})
            too_long = Committed(0, "x" * (METADATA_LIMIT + 1_000))
            with pytest.raises(HeadraceError):
                await member.subscription.commit({bench.at(): too_long})
            assert (await bench.broker.committed(bench.group, [bench.at()]))[bench.at()] == longest
            await member.close()

    run(main)


def test_first_commits_do_not_overwrite(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace, partitions=2) as bench:
            both = [bench.at(0), bench.at(1)]
            member = bench.subscribe()
            await member.until(lambda: len(member.held) == 2)
            await member.subscription.commit({bench.at(0): Committed(5, "there")})
            await member.close()
            await bench.broker.commit_first(bench.group, both)
            assert await bench.broker.committed(bench.group, both) == {
                bench.at(0): Committed(5, "there"),
                bench.at(1): Committed(0),
            }
            group = f"{bench.group}.new"
            await bench.broker.commit_first(group, [bench.at(0)])
            await bench.broker.commit_first(group, both)
            assert await bench.broker.committed(group, both) == dict.fromkeys(both, Committed(0))

    run(main)


# Sole writers


def test_a_sole_writer_writes_all_records_at_once(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace, partitions=3) as bench:
            writer = await bench.broker.fenced(f"{namespace}.writer")
            records = [bench.outgoing(str(n), n % 2) for n in range(10)]
            positions = await writer.write(records)
            assert positions == [Position(bench.at(n % 2), n // 2) for n in range(10)]
            assert values(await bench.broker.fetch(positions)) == [str(n) for n in range(10)]
            (following,) = await writer.write([bench.outgoing("next")])
            assert following == Position(bench.at(0), 6)  # A marker lies between.
            await writer.close()

    run(main)


def test_a_write_that_fails_leaves_nothing(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace) as bench:
            writer = await bench.broker.fenced(f"{namespace}.writer")
            with pytest.raises(DependencyError):
                await writer.write([bench.outgoing("never"), bench.outgoing("nowhere", 99)])
            await bench.send("after")
            reader = bench.broker.reader()
            await reader.assign({bench.at(): 0})
            items: list[Record | End] = []
            async with asyncio.timeout(20):
                while not values(items):
                    items += await reader.read()
            assert values(items) == ["after"]

    run(main)


def test_a_successor_cuts_the_predecessor_off(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace, clients=2) as bench:
            name = f"{namespace}.writer"
            old = await bench.broker.fenced(name)
            await old.write([bench.outgoing("old")])
            new = await bench.brokers[1].fenced(name)
            for _ in range(2):
                with pytest.raises(Fenced):
                    await old.write([bench.outgoing("zombie")])
            (position,) = await new.write([bench.outgoing("new")])
            reader = bench.brokers[1].reader()
            await reader.assign({bench.at(): 0})
            items = await read_to(reader, End(bench.at(), position.offset + 2))
            assert values(items) == ["old", "new"]
            other = await bench.broker.fenced(f"{name}.other")  # Another name, another writer.
            await other.write([bench.outgoing("other")])
            await new.write([bench.outgoing("new")])

    run(main)


def test_a_successor_sees_all_that_was_written(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace, partitions=2) as bench:
            for end in range(2, 12, 2):
                writer = await bench.broker.fenced(f"{namespace}.writer")
                ends = await bench.broker.ends([bench.at(0), bench.at(1)])
                assert set(ends.values()) == {(0, end - 2)}
                await writer.write([bench.outgoing("a", 0), bench.outgoing("b", 1)])

    run(main)


# Topics


def test_topics_are_made_once_and_their_partitions_stay(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace, partitions=3) as bench:
            other = f"{namespace}.other"
            await bench.send("kept")
            await bench.broker.create_topics({bench.topic: (3, {}), other: (1, {})})
            topics = await bench.broker.list_topics()
            assert (topics[bench.topic], topics[other]) == (3, 1)
            assert (await bench.broker.ends([bench.at()]))[bench.at()] == (0, 1)
            with pytest.raises(UsageError, match="3 partitions"):
                await bench.broker.create_topics({bench.topic: (4, {})})
            await bench.broker.delete_topics([other, f"{namespace}.absent"])
            assert other not in await bench.broker.list_topics()
            await bench.broker.create_topics({other: (2, {})})
            assert (await bench.broker.list_topics())[other] == 2

    run(main)


def test_all_clients_of_a_cluster_see_the_same_id_and_all_topics(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace, clients=2) as bench:
            one, other = bench.brokers
            assert await one.cluster_id() == await other.cluster_id() != ""
            assert await one.sees_all_topics()

    run(main)


def test_a_group_whose_records_were_deleted_hears_which(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace) as bench:
            await bench.send("a", "b", "c")
            await log.expire(bench.at(), 2)
            member = bench.subscribe()
            with pytest.raises(RecordsLost, match=r"2 records are lost, offsets 0 to 1: .*docs/"):
                await member.until(lambda: bool(member.records))
            await member.subscription.close()

    run(main)


def test_a_topics_settings_are_told(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace) as bench:
            made = {"retention.ms": "3600000", "cleanup.policy": "delete"}
            other = f"{namespace}.other"
            await bench.broker.create_topics({other: (1, made)})
            told = await bench.broker.topic_settings([other])
            assert told[other].items() >= made.items()
            assert await bench.broker.topic_settings([]) == {}
            with pytest.raises(DependencyError):
                await bench.broker.topic_settings([f"{namespace}.absent"])

    run(main)


def test_offsets_are_found_by_time(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace, partitions=2) as bench:
            await bench.send("a")
            reader = bench.broker.reader()
            await reader.assign({bench.at(): 0})
            first = (await read_to(reader, End(bench.at(), 1)))[0]
            assert isinstance(first, Record)
            await asyncio.sleep(0.01)
            await bench.send("b")

            async def at(timestamp: float) -> list[int]:
                found = await bench.broker.offsets_at([bench.at(0), bench.at(1)], timestamp)
                return [found[bench.at(0)], found[bench.at(1)]]

            assert await at(0) == [0, 0]
            assert await at(first.timestamp) == [0, 0]
            assert await at(first.timestamp + 0.005) == [1, 0]
            assert await at(first.timestamp + 3600) == [2, 0]

    run(main)


def test_what_is_not_there_is_an_error(log: Log, namespace: str) -> None:
    async def main() -> None:
        async with a_bench(log, namespace) as bench:
            asked = bench.broker.ends([Partition(f"{namespace}.absent", 0)])
            sent = bench.broker.send(Outgoing(f"{namespace}.absent", b"key", b""))
            for error in await asyncio.gather(asked, sent, return_exceptions=True):
                assert isinstance(error, DependencyError)

    run(main)
