"""What the in-memory log does beyond the contract: processes that freeze and die, and repetition.

The loop's time is virtual: it jumps to the next timer, so that sessions run out at once.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DependencyError, Fenced
from headrace.services.kafka.broker import Broker, Committed, End, Outgoing, Partition, Record
from tests.memory.memory_broker import SESSION_S, MemoryBroker, MemoryCluster
from tests.memory.memory_faults import Faults
from tests.memory.memory_group import Member, balance
from tests.memory.memory_state import TRANSACTION_S

FIRST = Partition("topic", 0)


class Jump(selectors.SelectSelector):
    """Waits for no one: the time that it was told to wait has passed."""

    passed = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "all tasks wait for each other"
        self.passed += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jump = Jump()
        super().__init__(self.jump)

    def time(self) -> float:
        return self.jump.passed

    def wall_time(self) -> float:
        return 1_000.0 + self.jump.passed


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(test())


async def a_cluster(partitions: int = 1) -> tuple[MemoryCluster, MemoryBroker]:
    cluster = MemoryCluster()
    broker = cluster.client("first")
    await broker.create_topics({"topic": (partitions, {})})
    await broker.commit_first("group", [Partition("topic", n) for n in range(partitions)])
    return cluster, broker


def outgoing(value: str) -> Outgoing:
    return Outgoing("topic", b"key", value.encode(), partition=0)


async def content(broker: Broker) -> list[bytes | None]:
    reader = broker.reader()
    await reader.assign({FIRST: 0})
    records: list[bytes | None] = []
    while True:
        for item in await reader.read():
            if isinstance(item, End):
                return records
            records.append(item.value)


async def join(broker: Broker, story: list[Any], name: str) -> asyncio.Task[None]:
    """A member that notes what it is told and reads."""

    async def on_assigned(commits: Mapping[Partition, Committed]) -> None:
        story.append((name, "assigned", [at.number for at in commits]))

    async def on_revoked(
        partitions: Sequence[Partition], lost: bool
    ) -> Mapping[Partition, Committed]:
        story.append((name, "lost" if lost else "revoked", [at.number for at in partitions]))
        return {}

    subscription = broker.subscribe(["topic"], "group", on_assigned, on_revoked)

    async def read() -> None:
        while True:
            story.extend(
                (name, "read", item.partition.number, item.offset)
                for item in await subscription.read()
                if isinstance(item, Record)
            )

    return asyncio.create_task(read())


def test_what_a_killed_process_had_in_flight_lands_in_part() -> None:
    async def main() -> None:
        cluster, broker = await a_cluster()
        doomed = cluster.client("doomed")
        sends = [asyncio.create_task(doomed.send(outgoing(str(n)))) for n in range(3)]
        await asyncio.sleep(0)  # All are under way,
        await asyncio.sleep(0)  # and have landed, but none is answered.
        sends.append(asyncio.create_task(doomed.send(outgoing("never"))))
        await asyncio.sleep(0)
        doomed.kill()
        outcomes = await asyncio.gather(*sends, return_exceptions=True)
        assert isinstance(outcomes[-1], DependencyError)
        assert await content(broker) == [b"0", b"1", b"2"]
        with pytest.raises(DependencyError, match="was killed"):
            await doomed.send(outgoing("after death"))

    run(main)


def test_a_frozen_process_sends_when_it_thaws() -> None:
    async def main() -> None:
        _, broker = await a_cluster()
        broker.freeze()
        sending = asyncio.create_task(broker.send(outgoing("late")))
        await asyncio.sleep(60)
        assert not sending.done()
        broker.thaw()
        assert (await sending).offset == 0

    run(main)


def test_a_cancelled_send_may_land() -> None:
    async def main() -> None:
        _, broker = await a_cluster()
        sending = asyncio.create_task(broker.send(outgoing("sent")))
        await asyncio.sleep(0)
        sending.cancel()
        await asyncio.wait([sending])
        assert await content(broker) == [b"sent"]

    run(main)


def test_a_session_ends_when_it_has_run_out_and_not_before() -> None:
    async def main() -> None:
        cluster, broker = await a_cluster(partitions=2)
        story: list[Any] = []
        silent = cluster.client("silent")
        one = await join(silent, story, "silent")
        await asyncio.sleep(1)
        two = await join(broker, story, "heir")
        await asyncio.sleep(1)
        assert story == [
            ("silent", "assigned", [0, 1]),
            ("silent", "revoked", [1]),
            ("heir", "assigned", [1]),
        ]
        story.clear()
        silent.freeze()
        await asyncio.sleep(SESSION_S - 0.1)
        silent.thaw()  # Just in time.
        await asyncio.sleep(SESSION_S)
        assert story == []
        silent.freeze()
        await asyncio.sleep(SESSION_S + 0.1)
        assert story == [("heir", "assigned", [0])]
        silent.thaw()
        await asyncio.sleep(1)
        assert story[1:] == [
            ("silent", "lost", [0]),
            ("heir", "revoked", [1]),
            ("silent", "assigned", [1]),
        ]
        for task in (one, two):
            task.cancel()
        await asyncio.gather(silent.close(), broker.close())

    run(main)


def test_a_transaction_left_open_is_aborted_in_time() -> None:
    async def main() -> None:
        cluster, broker = await a_cluster()
        doomed = cluster.client("doomed")
        writer = await doomed.fenced("writer")
        writing = asyncio.create_task(writer.write([outgoing("never decided")]))
        while not cluster.state.log(FIRST).end:
            await asyncio.sleep(0)
        doomed.freeze()
        await broker.send(outgoing("after"))
        assert await content(broker) == []
        await asyncio.sleep(TRANSACTION_S)
        assert await content(broker) == [b"after"]
        doomed.thaw()
        with pytest.raises(Fenced):
            await writing
        await (await broker.fenced("writer")).write([outgoing("decided")])
        await asyncio.sleep(TRANSACTION_S)
        assert await content(broker) == [b"after", b"decided"]

    run(main)


def test_a_fence_between_write_and_commit_leaves_nothing() -> None:
    async def main() -> None:
        cluster, broker = await a_cluster()
        writer = await broker.fenced("writer")
        writing = asyncio.create_task(writer.write([outgoing("a"), outgoing("b")]))
        while not cluster.state.log(FIRST).end:
            await asyncio.sleep(0)
        cluster.state.fence("writer")
        with pytest.raises(Fenced):
            await writing
        assert await content(broker) == []
        assert await broker.ends([FIRST]) == {FIRST: (0, 3)}

    run(main)


def test_a_cancelled_write_runs_to_its_end() -> None:
    async def main() -> None:
        cluster, broker = await a_cluster()
        writer = await broker.fenced("writer")
        writing = asyncio.create_task(writer.write([outgoing("whole")]))
        while not cluster.state.log(FIRST).end:
            await asyncio.sleep(0)
        writing.cancel()
        await asyncio.wait([writing])
        await writer.close()
        assert await content(await another(cluster)) == [b"whole"]

    async def another(cluster: MemoryCluster) -> Broker:
        broker = cluster.client("another")
        await broker.fenced("writer")
        return broker

    run(main)


def test_a_callback_that_fails_or_hangs_ends_the_reading() -> None:
    async def main() -> None:
        _, broker = await a_cluster()

        async def fails(_: Mapping[Partition, Committed]) -> None:
            raise ValueError("no room")

        async def hangs(_: Mapping[Partition, Committed]) -> None:
            await asyncio.Event().wait()

        async def on_revoked(
            partitions: Sequence[Partition], lost: bool
        ) -> Mapping[Partition, Committed]:
            raise AssertionError("it was never told of them")

        for on_assigned, error in ((fails, ValueError), (hangs, DependencyError)):
            subscription = broker.subscribe(["topic"], "group", on_assigned, on_revoked)
            with pytest.raises(error):
                await subscription.read()
            await subscription.close()

    run(main)


def test_the_same_run_twice_is_the_same() -> None:
    def story_of_a_run() -> list[Any]:
        story: list[Any] = []

        async def main() -> None:
            cluster, broker = await a_cluster(partitions=7)
            clients = [cluster.client(str(number)) for number in range(3)]
            tasks = []
            for client in clients:
                tasks.append(await join(client, story, client._process.name))
                await asyncio.gather(
                    *(broker.send(Outgoing("topic", str(n).encode(), b"")) for n in range(20))
                )
            clients[1].kill()
            await asyncio.sleep(2 * SESSION_S)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*(client.close() for client in clients))

        run(main)
        return story

    first = story_of_a_run()
    assert len([line for line in first if line[1] == "read"]) >= 60
    assert story_of_a_run() == first


PARTITIONS = st.integers(1, 40).map(lambda count: [Partition("topic", n) for n in range(count)])


@given(PARTITIONS, st.lists(st.booleans(), min_size=1, max_size=20))
def test_assignments_are_balanced_and_sticky(
    partitions: list[Partition], joins: list[bool]
) -> None:
    members = [Member(("topic",))]
    shares = balance(partitions, members, {})
    for joining in joins:
        before = dict(shares)
        joins_now = joining or len(members) == 1
        if joins_now:
            members.append(Member(("topic",)))
        else:
            members.pop(0)
        shares = balance(partitions, members, before)
        counts = [list(shares.values()).count(member) for member in members]
        assert shares.keys() == set(partitions)
        assert sum(counts) == len(partitions)
        assert max(counts) - min(counts) <= 1
        moved = [at for at in partitions if before[at] in members and shares[at] != before[at]]
        assert len(moved) <= (len(partitions) // len(members) if joins_now else 0)


def test_members_get_only_topics_that_they_asked_for() -> None:
    one, other = Member(("a",)), Member(("a", "b"))
    partitions = [Partition(topic, n) for topic in "ab" for n in range(3)]
    shares = balance(partitions, [one, other], {})
    assert sorted(at for at, member in shares.items() if member is one) == partitions[:3]
    assert sorted(at for at, member in shares.items() if member is other) == partitions[3:]


# Faults


def always(**shares: Any) -> Faults:
    return Faults(Random(0), fail_s=1.0, **shares)


@pytest.mark.parametrize(
    ("faults", "written"), [(always(lost_answers=1.0), [b"it"]), (always(lost_sends=1.0), [])]
)
def test_a_send_is_reported_as_failed_and_written_or_not(
    faults: Faults, written: list[bytes]
) -> None:
    async def main() -> None:
        cluster, broker = await a_cluster()
        with pytest.raises(DependencyError, match="the record may be written"):
            await cluster.client("unlucky", faults).send(outgoing("it"))
        assert await content(broker) == written

    run(main)


@pytest.mark.parametrize(("late", "landed"), [(0.0, []), (1.0, [b"0", b"1"])])
def test_what_has_left_a_process_lands_after_its_death(late: float, landed: list[bytes]) -> None:
    async def main() -> None:
        cluster, broker = await a_cluster()
        doomed = cluster.client("doomed", Faults(Random(0), latency_s=1.0, late=late))
        sends = [asyncio.create_task(doomed.send(outgoing(str(n)))) for n in range(2)]
        await asyncio.sleep(0)
        doomed.kill()
        await asyncio.gather(*sends, return_exceptions=True)
        assert await content(broker) == []
        await asyncio.sleep(60)
        assert await content(broker) == landed

    run(main)


def test_a_transaction_is_taken_back_and_written_again_or_never_heard_of() -> None:
    async def main() -> None:
        cluster, broker = await a_cluster()
        faults = Faults(Random(3), aborts=0.5)
        writer = await cluster.client("writer", faults).fenced("writer")
        for n in range(8):
            await writer.write([outgoing(str(n))])
        await asyncio.sleep(1)  # The last one's marks come a moment later.
        assert await content(broker) == [str(n).encode() for n in range(8)]
        assert (await broker.ends([FIRST]))[FIRST][1] > 2 * 8
        faults.unknown_commits = 1.0
        for _ in range(2):  # It is broken for good.
            with pytest.raises(DependencyError, match="could not learn"):
                await writer.write([outgoing("perhaps")])
        await broker.fenced("writer")
        assert len(await content(broker)) in (8, 9)

    run(main)


def test_a_log_that_is_away_keeps_all_waiting_and_the_sessions() -> None:
    async def main() -> None:
        cluster, broker = await a_cluster()
        story: list[Any] = []
        reading = await join(broker, story, "first")
        await asyncio.sleep(1)
        cluster.outage(20.0)
        await asyncio.wait_for(broker.send(outgoing("patient")), 21.0)
        await asyncio.sleep(2 * SESSION_S)
        assert story == [("first", "assigned", [0]), ("first", "read", 0, 0)]
        cluster.outage(40.0)
        with pytest.raises(DependencyError, match="30 s"):
            await broker.send(outgoing("impatient"))
        reading.cancel()

    run(main)


def test_a_session_that_is_lost_unheard_lets_two_read_at_once() -> None:
    async def main() -> None:
        cluster, broker = await a_cluster()
        story: list[Any] = []
        readings = [await join(broker, story, "first")]
        await asyncio.sleep(1)
        readings.append(await join(cluster.client("second"), story, "second"))
        await asyncio.sleep(1)
        broker.lose_sessions(5.0)
        await asyncio.sleep(1)
        await broker.send(outgoing("it"))
        await asyncio.sleep(1)
        assert ("first", "read", 0, 0) in story
        assert ("second", "read", 0, 0) in story
        assert ("first", "lost", [0]) not in story
        await asyncio.sleep(5)
        assert ("first", "lost", [0]) in story
        for reading in readings:
            reading.cancel()

    run(main)
