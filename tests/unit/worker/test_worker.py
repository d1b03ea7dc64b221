"""What a Worker does about partitions: assignment, commits, holds, release, endings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.errors import DependencyError, Fenced, RecordsLost
from headrace.schemas.codec import Codec
from headrace.schemas.events import ActionRequested, EnvironmentUse, Event, ObservationRecorded, Ref
from headrace.schemas.topics import ACTIONS, DEAD_LETTERS, OBSERVATIONS, Topics
from headrace.services.kafka.broker import Committed, End, Outgoing, Partition, Position, Record
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import WHOLE, read_records
from headrace.services.worker.commit_metadata import read_metadata
from headrace.services.worker.shard import CLOSE_S, ShardClosed, ShardContext
from headrace.services.worker.shard_host import INTAKE, ShardHost
from headrace.services.worker.worker import COMMIT_INTERVAL_S, OPEN, Worker
from tests.memory.memory_broker import MemoryBroker, MemoryCluster
from tests.memory.memory_registry import MemoryRegistry
from tests.simulation import virtual_time

GROUP = "unit.worker"
TOPICS = Topics("unit", ("default",), 2, pool_partitions=2)
MAIN = Partition(TOPICS.name(ACTIONS), 0)
OTHER = Partition(TOPICS.name(ACTIONS), 1)
SIDE_TOPIC = Partition(TOPICS.name(OBSERVATIONS), 0)
COMMITTED = 2 * COMMIT_INTERVAL_S
"""Virtual seconds after which what could be committed is."""


def action(number: int) -> ActionRequested:
    return ActionRequested(
        task=number,
        sample=0,
        call="1",
        index=0,
        kind="reset",
        environment=EnvironmentUse(use="default"),
        expires_at=1,
        digest=bytes(16),
    )


def observation(number: int) -> ObservationRecorded:
    return ObservationRecorded(task=number, sample=0, call="1", index=0, digest=bytes(16))


class Notebook:
    """A shard that notes what happens, and holds the tasks that it is told to."""

    def __init__(self, context: ShardContext, held: set[int]) -> None:
        self.context = context
        self.story: list[Any] = []
        self.releases: dict[int, Callable[[], None]] = {}
        self.happened = asyncio.Event()
        self._held = held

    async def on_event(self, delivery: Delivery[Any]) -> None:
        task = delivery.event.task
        main = isinstance(delivery.event, ActionRequested)
        if main and task in self._held:
            self.releases[task] = self.context.hold(delivery)
        self.note(task if main else f"answer {task}")

    async def on_caught_up(self) -> None:
        self.note("caught up")

    async def aclose(self) -> None:
        self.note("closed")

    def note(self, what: Any) -> None:
        self.story.append(what)
        self.happened.set()

    async def until(self, what: Any) -> None:
        async with asyncio.timeout(20):
            while what not in self.story:
                self.happened.clear()
                await self.happened.wait()


class Place:
    """A cluster with the topics, and workers on it."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        self.registry = MemoryRegistry()
        self.broker = self.cluster.client("test")
        self.log = self.log_of(self.broker)

    def log_of(self, broker: MemoryBroker, name: str = "test") -> EventLog:
        codec = Codec()
        self.registry.prepare(codec, TOPICS)
        return EventLog(broker, TOPICS, codec, self.registry, name)

    async def apply(self) -> None:
        await self.broker.create_topics({placed.name: (placed.partitions, {}) for placed in TOPICS})
        await self.broker.commit_first(GROUP, [MAIN, OTHER])

    async def write(self, *events: Event, at: int = 0) -> None:
        """Writes events to partition `at` of their topics, whatever their keys say."""
        for event in events:
            record = self.log.outgoing(event)
            await self.broker.send(
                Outgoing(record.topic, record.key, record.value, record.headers, at)
            )

    async def commit_of(self, partition: Partition = MAIN) -> Committed:
        return (await self.broker.committed(GROUP, [partition]))[partition]

    async def dead_letters(self) -> list[Record]:
        whole = {TOPICS.partition(DEAD_LETTERS): WHOLE}
        return [record async for record in read_records(self.broker, whole)]


class Member:
    """One process with a Worker."""

    def __init__(
        self,
        place: Place,
        name: str,
        *,
        held: set[int] | None = None,
        make: Callable[[ShardContext], Any] | None = None,
        **settings: Any,
    ) -> None:
        self.client = place.cluster.client(name)
        self.stopping = asyncio.Event()
        self.shards: list[Any] = []
        self._made = asyncio.Event()
        self._make = make or (lambda context: Notebook(context, held or set()))
        worker = Worker(
            place.log_of(self.client, name),
            topics=[MAIN.topic],
            consumer_group=GROUP,
            make_shard=self._make_shard,
            stopping=self.stopping,
            **settings,
        )
        self.running = asyncio.create_task(worker.run())

    def _make_shard(self, context: ShardContext) -> Any:
        shard = self._make(context)
        self.shards.append(shard)
        self._made.set()
        return shard

    async def shard(self, partition: Partition = MAIN) -> Any:
        """The newest shard of a partition, once there is one."""
        async with asyncio.timeout(20):
            while True:
                for shard in reversed(self.shards):
                    if shard.context.partition == partition:
                        return shard
                self._made.clear()
                await self._made.wait()

    async def stop(self) -> None:
        self.stopping.set()
        await self.running


async def fetched_at_once(one: Member, write: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Has a member see all that is written only when it is written."""
    one.client.freeze()
    await write()
    one.client.thaw()
    await asyncio.sleep(0.1)


def with_side_partition(partition: Partition) -> Mapping[Partition, Any]:
    return {Partition(SIDE_TOPIC.topic, partition.number): "committed"}


@asynccontextmanager
async def member(place: Place, name: str = "one", **settings: Any) -> Any:
    one = Member(place, name, **settings)
    try:
        yield one
    finally:
        one.client.kill()
        one.running.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await one.running


def run(test: Callable[[Place], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        place = Place()
        await place.apply()
        await test(place)

    virtual_time.run(main)


def test_a_shard_reads_all_there_was_before_it_may_send() -> None:
    class Eager(Notebook):
        async def on_event(self, delivery: Delivery[Any]) -> None:
            await super().on_event(delivery)
            if delivery.event.task == 0:
                with pytest.raises(AssertionError, match="while it catches up"):
                    await self.context.send(observation(9))

    async def test(place: Place) -> None:
        await place.write(*map(action, range(3)), *map(observation, range(3)))
        async with member(
            place, make=lambda context: Eager(context, set()), side_partitions=with_side_partition
        ) as one:
            shard = await one.shard()
            await shard.until("caught up")
            before = shard.story.index("caught up")
            everything = {0, 1, 2, "answer 0", "answer 1", "answer 2"}
            assert set(shard.story[:before]) == everything
            await place.write(action(3), observation(3))
            await shard.until(3)
            await shard.until("answer 3")
            await shard.context.send(observation(9))

    run(test)


def test_a_worker_catches_up_with_side_partitions_first() -> None:
    async def test(place: Place) -> None:
        await place.write(observation(0))
        settings: dict[str, Any] = {
            "side_partitions": with_side_partition,
            "side_partitions_first": True,
        }
        async with member(place, **settings) as one:
            shard = await one.shard()
            await place.write(*map(action, range(3)))
            await shard.until(2)
            assert shard.story[:2] == ["answer 0", "caught up"]

    run(test)


def test_what_an_earlier_owner_did_lies_behind_the_positions_of_a_commit() -> None:
    async def test(place: Place) -> None:
        side = {"side_partitions": with_side_partition, "side_partitions_first": True}
        settings: dict[str, Any] = {**side, "held": {0, 1}}
        async with member(place, "one", **settings) as one:
            shard = await one.shard()
            await place.write(action(0))
            await shard.until(0)
            # It works on record 1, which lies behind the commit, before it dies.
            await place.write(action(1), observation(1))
            await shard.until("answer 1")
            await asyncio.sleep(COMMITTED)
            assert await place.commit_of() == Committed(0, "[0]")
        async with member(place, "two", **settings) as two:
            shard = await two.shard()
            await shard.until(1)
            await asyncio.sleep(COMMITTED)
            assert shard.story[:2] == ["answer 1", "caught up"]
            assert await place.commit_of() == Committed(0, "[0]")
            shard.releases[0]()
            await asyncio.sleep(COMMITTED)
            assert await place.commit_of() == Committed(1, "[0]")
            shard.releases[1]()
            await asyncio.sleep(COMMITTED)
            assert await place.commit_of() == Committed(2, "[1]")

    run(test)


def test_the_commit_stays_at_the_oldest_record_that_is_held() -> None:
    async def test(place: Place) -> None:
        await place.write(*map(action, range(5)))
        async with member(place, held={1, 3}) as one:
            shard = await one.shard()
            await shard.until(4)
            await asyncio.sleep(COMMITTED)
            assert (await place.commit_of()).offset == 1
            shard.releases[3]()
            await asyncio.sleep(COMMITTED)
            assert (await place.commit_of()).offset == 1
            shard.releases[1]()
            await asyncio.sleep(COMMITTED)
            assert (await place.commit_of()).offset == 5

    run(test)


def test_the_open_records_of_all_partitions_are_counted() -> None:
    async def test(place: Place) -> None:
        await place.write(action(0), action(1))
        await place.write(action(2), at=1)
        async with member(place, held={0, 1, 2}) as one:
            await (await one.shard(MAIN)).until(1)
            await (await one.shard(OTHER)).until(2)
            await asyncio.sleep(COMMITTED)
            assert OPEN.labels(MAIN.topic)._value.get() == 3

    run(test)


def test_a_commit_has_the_positions_at_which_its_record_was_first_read() -> None:
    async def test(place: Place) -> None:
        async with member(place, held={0, 1}, side_partitions=with_side_partition) as one:
            shard = await one.shard()
            await place.write(*map(observation, range(3)))
            await shard.until("answer 2")
            await place.write(action(0))
            await shard.until(0)
            await place.write(*map(observation, range(3, 7)))
            await shard.until("answer 6")
            await place.write(action(1))
            await shard.until(1)
            await asyncio.sleep(COMMITTED)
            assert await place.commit_of() == Committed(0, "[3]")

        async with member(
            place, "two", held={0, 1}, side_partitions=with_side_partition
        ) as two:  # one was killed
            shard = await two.shard()
            await shard.until("caught up")
            assert "answer 2" not in shard.story
            assert "answer 3" in shard.story
            await asyncio.sleep(COMMITTED)
            assert await place.commit_of() == Committed(0, "[3]")
            shard.releases[0]()
            await asyncio.sleep(COMMITTED)
            # Read while catching up: what it caused may lie anywhere after the old positions.
            assert await place.commit_of() == Committed(1, "[3]")
            shard.releases[1]()
            await asyncio.sleep(COMMITTED)
            assert await place.commit_of() == Committed(2, "[7]")

    run(test)


def test_a_commits_note_never_goes_back_to_what_retention_may_have_deleted() -> None:
    async def test(place: Place) -> None:
        # All that was there is done once it is read: its side partition is no longer needed.
        await place.write(action(0), *map(observation, range(3)))
        async with member(place, held={1}, side_partitions=with_side_partition) as one:
            shard = await one.shard()
            await shard.until("caught up")
            await asyncio.sleep(COMMITTED)
            assert await place.commit_of() == Committed(1, "[3]")
            await place.write(action(1))  # and no record of a side partition since
            await shard.until(1)
            await asyncio.sleep(COMMITTED)
            assert await place.commit_of() == Committed(1, "[3]")

    run(test)


def test_positions_that_a_shard_holds_are_committed_until_it_releases_them() -> None:
    async def test(place: Place) -> None:
        await place.write(action(0), action(1), *map(observation, range(5)))
        context = ShardContext(place.log, cast("Any", None), cast("Any", None), MAIN, 0)
        shard = Notebook(context, {0})
        host = ShardHost(place.log, context, shard, {SIDE_TOPIC: 1}, {SIDE_TOPIC: 3}, [SIDE_TOPIC])
        pump = asyncio.create_task(host.run())

        async def read(partition: Partition, offset: int, then: Any) -> int:
            await host.take(*await place.broker.fetch([Position(partition, offset)]))
            await shard.until(then)
            return committed()

        def committed() -> int:
            return read_metadata(host.to_commit().metadata, [SIDE_TOPIC]).positions[SIDE_TOPIC]

        # Given what is held while the shard catches up, and what is held later,
        assert await read(SIDE_TOPIC, 1, "answer 1") == 1
        first = context.hold_positions()
        assert await read(SIDE_TOPIC, 2, "answer 2") == 1
        assert await read(MAIN, 0, 0) == 1
        second = context.hold_positions()
        assert await read(SIDE_TOPIC, 3, "answer 3") == 1
        # Then the oldest positions that anything needs are committed: those of the first hold,
        first()
        # of the open record and the second hold,
        assert committed() == 3
        shard.releases[0]()
        assert committed() == 3
        # and then what was read.
        second()
        assert committed() == 4
        # While a transaction is under way nothing is noted, and then what was written is passed.
        context.writing = True
        assert await read(SIDE_TOPIC, 4, "answer 4") == 4
        context.writing = False
        context.on_written([Ref(topic=SIDE_TOPIC.topic, partition=0, offset=8, digest=bytes(16))])
        assert committed() == 9
        await host.close(lost=True)
        pump.cancel()

    run(test)


def test_what_a_shard_holds_as_it_has_caught_up_is_read_again_by_the_next_owner() -> None:
    class Closing(Notebook):
        async def on_caught_up(self) -> None:
            self.release = self.context.hold_positions()
            await super().on_caught_up()

    async def test(place: Place) -> None:
        await place.write(*map(observation, range(3)))
        context = ShardContext(place.log, cast("Any", None), cast("Any", None), MAIN, 0)
        shard = Closing(context, set())
        host = ShardHost(place.log, context, shard, {SIDE_TOPIC: 1}, {SIDE_TOPIC: 3}, [SIDE_TOPIC])
        pump = asyncio.create_task(host.run())

        def committed() -> int:
            return read_metadata(host.to_commit().metadata, [SIDE_TOPIC]).positions[SIDE_TOPIC]

        for offset in (1, 2):
            await host.take(*await place.broker.fetch([Position(SIDE_TOPIC, offset)]))
        await shard.until("answer 2")
        await asyncio.sleep(0.1)
        assert context.caught_up
        assert committed() == 1, "what follows from the answers is not done yet"
        shard.release()
        assert committed() == 3
        await host.close(lost=True)
        pump.cancel()

    run(test)


def test_what_was_deleted_under_a_side_partition_ends_the_worker() -> None:
    async def test(place: Place) -> None:
        async with member(place, held={0}, side_partitions=with_side_partition) as one:
            shard = await one.shard()
            await place.write(*map(observation, range(3)))
            await shard.until("answer 2")
            await place.write(action(0))
            await shard.until(0)
            await asyncio.sleep(COMMITTED)
            assert await place.commit_of() == Committed(0, "[3]")
        await place.write(*map(observation, range(3, 7)))
        place.cluster.expire(SIDE_TOPIC, 5)
        async with member(place, "two", held={0}, side_partitions=with_side_partition) as two:
            with pytest.raises(RecordsLost, match=f"{SIDE_TOPIC.topic}/0: 2 .* offsets 3 to 4"):
                await two.running

    run(test)


def test_what_was_deleted_under_a_commit_ends_the_worker() -> None:
    async def test(place: Place) -> None:
        await place.write(*map(action, range(3)))
        place.cluster.expire(MAIN, 2)
        async with member(place) as one:
            with pytest.raises(RecordsLost, match=f"{MAIN.topic}/0: 2 .* offsets 0 to 1"):
                await one.running

    run(test)


def test_without_metadata_side_partitions_are_read_from_what_is_kept() -> None:
    async def test(place: Place) -> None:
        await place.write(*map(observation, range(3)))
        place.cluster.expire(SIDE_TOPIC, 2)
        async with member(place, side_partitions=with_side_partition) as one:
            shard = await one.shard()
            await shard.until("answer 2")
            assert "answer 1" not in shard.story

    run(test)


def test_partitions_pass_to_another_member_without_loss() -> None:
    async def test(place: Place) -> None:
        async with member(place, held={1}) as one, member(place, "two", held={1}) as two:
            await asyncio.sleep(1)
            for number in range(2):
                await place.write(*map(action, range(3)), at=number)
            held = {shard.context.partition: shard for shard in (*one.shards, *two.shards)}
            for shard in held.values():
                await shard.until(2)
            await one.stop()
            for partition in (MAIN, OTHER):
                shard = await two.shard(partition)
                await shard.until(2)
                shard.releases[1]()
            await asyncio.sleep(COMMITTED)
            assert (await place.commit_of(MAIN)).offset == 3
            assert (await place.commit_of(OTHER)).offset == 3
        handed = [shard for shard in two.shards if shard.story[0] == 1]
        assert len(handed) == 1, "the one that was handed over began at the held record"

    run(test)


def test_a_release_after_the_partition_is_lost_moves_no_commit() -> None:
    async def test(place: Place) -> None:
        await place.write(action(0))
        async with member(place, held={0}) as one:
            shard = await one.shard()
            await shard.until(0)
            await one.stop()
            shard.releases[0]()
            assert (await place.commit_of()).offset == 0
            with pytest.raises(ShardClosed):
                await shard.context.send(observation(0))

    run(test)


def test_what_aclose_finishes_in_time_is_committed() -> None:
    class Finishing(Notebook):
        async def aclose(self) -> None:
            for release in self.releases.values():
                await self.context.send(observation(0))
                release()

    async def test(place: Place) -> None:
        await place.write(action(0))
        async with member(place, make=lambda context: Finishing(context, {0})) as one:
            await (await one.shard()).until("caught up")
            await one.stop()
            assert (await place.commit_of()).offset == 1

    run(test)


def test_garbage_is_parked_and_passed() -> None:
    async def test(place: Place) -> None:
        await place.write(action(0))
        await place.broker.send(Outgoing(MAIN.topic, b"key", b"garbage", [("h", b"1")], 0))
        await place.write(action(1))
        async with member(place) as one:
            await (await one.shard()).until(1)
            await asyncio.sleep(COMMITTED)
            assert (await place.commit_of()).offset == 3
            (dead,) = await place.dead_letters()
            assert (dead.key, dead.value) == (b"key", b"garbage")

    run(test)


def test_a_sole_writer_that_is_cut_off_ends() -> None:
    async def test(place: Place) -> None:
        async with member(place, fenced="sole") as one:
            shard = await one.shard(MAIN)
            await shard.until("caught up")
            other = await one.shard(OTHER)
            await other.until("caught up")
            refs = await other.context.send_all([observation(1), observation(2)])
            assert [type(ref) for ref in refs] == [Ref, Ref]

            async def send() -> None:
                await other.context.send(observation(3))

            await place.broker.fenced("sole")
            other.context.spawn(send(), "send")
            with pytest.raises(Fenced):
                await one.running

    run(test)


def test_transactions_of_a_sole_writer_do_not_overlap() -> None:
    async def test(place: Place) -> None:
        async with member(place, fenced="sole") as one:
            shard = await one.shard(OTHER)
            await shard.until("caught up")
            context = shard.context
            plainly, under_way = context.log.send_all, 0

            async def send_all(*arguments: Any) -> list[Ref]:
                nonlocal under_way
                under_way += 1
                refs: list[Ref] = await plainly(*arguments)
                assert (under_way, context.writing) == (1, True)
                under_way -= 1
                return refs

            context.log = SimpleNamespace(send_all=send_all)
            await asyncio.gather(*(context.send_all([observation(n)]) for n in range(5)))
            assert not context.writing

    run(test)


def test_a_worker_whose_log_is_gone_releases_its_partitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def close(self: Any) -> None:
        """The group can't be left, so no callback says that partitions were revoked."""

    monkeypatch.setattr("tests.memory.memory_reading.MemorySubscription.close", close)

    async def test(place: Place) -> None:
        async with member(place) as one:
            shard = await one.shard()
            await shard.until("caught up")

            async def lost() -> None:
                raise DependencyError("the log is gone")

            shard.context.spawn(lost(), "lost")
            with pytest.raises(DependencyError):
                await one.running
            assert "closed" in shard.story
            with pytest.raises(ShardClosed):
                await shard.context.send(observation(1))

    run(test)


def test_a_paused_partition_waits_until_it_is_resumed() -> None:
    async def test(place: Place) -> None:
        async with member(place, side_partitions=with_side_partition) as one:
            shard = await one.shard()
            await place.write(action(0))
            await shard.until(0)
            await shard.context.pause()
            await place.write(action(1), observation(1))
            await shard.until("answer 1")
            await asyncio.sleep(5)
            assert 1 not in shard.story
            await shard.context.resume()
            await shard.until(1)

    run(test)


@pytest.mark.parametrize("spawned", [False, True])
def test_a_handler_that_fails_ends_the_worker_and_keeps_its_record(spawned: bool) -> None:
    class Failing(Notebook):
        async def on_event(self, delivery: Delivery[Any]) -> None:
            await super().on_event(delivery)
            if delivery.event.task == 1:
                if not spawned:
                    await self.fail()
                self.context.hold(delivery)
                self.context.spawn(self.fail(), "fail")

        async def fail(self) -> None:
            raise ZeroDivisionError("a bug")

    async def test(place: Place) -> None:
        await place.write(*map(action, range(3)))
        async with member(place, make=lambda context: Failing(context, set())) as one:
            with pytest.raises(ZeroDivisionError):
                await one.running
            assert (await place.commit_of()).offset == 1

    run(test)


def test_an_end_in_order_is_bounded_whatever_a_shard_does() -> None:
    class Stubborn(Notebook):
        async def on_caught_up(self) -> None:
            self.context.spawn(self.hang(), "hang")
            await super().on_caught_up()

        async def hang(self) -> None:
            while True:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(1_000)
                if asyncio.get_running_loop().time() > 100:
                    return

        async def aclose(self) -> None:
            await asyncio.Event().wait()

    async def test(place: Place) -> None:
        await place.write(action(0))
        async with member(place, make=lambda context: Stubborn(context, set())) as one:
            await (await one.shard()).until(0)
            began = asyncio.get_running_loop().time()
            await one.stop()
            assert asyncio.get_running_loop().time() - began <= 2 * CLOSE_S + 0.1
            assert (await place.commit_of()).offset == 1
            await asyncio.sleep(2_000)

    run(test)


def test_what_a_former_shard_had_fetched_is_not_given_to_its_successor() -> None:
    gate = asyncio.Event()

    class Slow(Notebook):
        """Handles nothing of partition 0 until the gate is open."""

        async def on_event(self, delivery: Delivery[Any]) -> None:
            if self.context.partition == MAIN:
                await gate.wait()
            await super().on_event(delivery)

    async def test(place: Place) -> None:
        async with member(place, make=lambda context: Slow(context, set())) as one:
            main, other = await one.shard(MAIN), await one.shard(OTHER)
            await main.until("caught up")
            some = INTAKE * 6 // 10
            await fetched_at_once(one, lambda: place.write(*map(action, range(some))))
            await place.write(action(0), at=1)
            await other.until(0)

            # One fetch brings more of partition 0 than there is room for, and then partition 1.
            async def write() -> None:
                await place.write(*map(action, range(some, INTAKE + 50)))
                await place.write(action(1), action(2), at=1)

            await fetched_at_once(one, write)
            await asyncio.sleep(COMMITTED)
            async with member(place, "two", held={1, 2}) as two:
                await (await two.shard(OTHER)).until(2)
                await two.stop()
            await asyncio.sleep(1)
            returned = await one.shard(OTHER)
            assert returned is not other
            gate.set()
            await main.until(INTAKE + 49)
            await returned.until(2)
            await asyncio.sleep(1)
            assert [what for what in returned.story if what != "caught up"] == [1, 2]

    run(test)


async def killed_with_a_record_open(place: Place, name: str, **settings: Any) -> int:
    """Deaths that a member is told of, which is then killed with record 0 open."""
    async with member(place, name, held={0}, count_deaths=True, **settings) as one:
        shard = await one.shard()
        await shard.until("caught up")
        return int(shard.context.deaths)


def test_an_owner_is_told_how_many_died_before_it() -> None:
    async def test(place: Place) -> None:
        await place.write(action(0))
        settings: dict[str, Any] = {"side_partitions": with_side_partition}
        told = [await killed_with_a_record_open(place, str(n), **settings) for n in range(4)]
        assert told == [0, 1, 2, 3]
        assert await place.commit_of() == Committed(0, '{"at":[0],"owners":4}')

    run(test)


def test_who_hands_over_in_order_has_not_died() -> None:
    async def test(place: Place) -> None:
        await place.write(action(0))
        await killed_with_a_record_open(place, "one")
        async with member(place, "two", held={0}, count_deaths=True) as two:
            await (await two.shard()).until("caught up")
            await two.stop()
        assert await killed_with_a_record_open(place, "three") == 1

    run(test)


def test_who_ends_by_a_failure_has_died() -> None:
    class Failing(Notebook):
        async def on_caught_up(self) -> None:
            raise ZeroDivisionError("a bug")

    async def test(place: Place) -> None:
        await place.write(action(0))
        make = lambda context: Failing(context, {0})  # noqa: E731
        async with member(place, make=make, count_deaths=True) as one:
            with pytest.raises(ZeroDivisionError):
                await one.running
        assert await killed_with_a_record_open(place, "two") == 1

    run(test)


def test_deaths_are_forgotten_once_all_that_was_open_is_done() -> None:
    async def test(place: Place) -> None:
        await place.write(action(0), action(1))
        assert await killed_with_a_record_open(place, "one") == 0
        async with member(place, "two", held={0, 1, 2}, count_deaths=True) as two:
            shard = await two.shard()
            await shard.until("caught up")
            await place.write(action(2))
            await shard.until(2)
            shard.releases[0]()
            await asyncio.sleep(COMMITTED)
            assert (await place.commit_of()).metadata == '{"at":[],"owners":2}'
            shard.releases[1]()
            await asyncio.sleep(COMMITTED)
            assert (await place.commit_of()) == Committed(2, '{"at":[],"owners":1}')
        async with member(place, "three", count_deaths=True) as three:
            assert (await three.shard()).context.deaths == 1

    run(test)


def test_a_zombie_that_comes_back_undoes_no_count() -> None:
    async def test(place: Place) -> None:
        await place.write(action(0))
        async with member(place, "zombie", held={0}, count_deaths=True) as zombie:
            await (await zombie.shard()).until("caught up")
            zombie.client.freeze()
            await asyncio.sleep(20)  # longer than its session
            async with member(place, "two", held={0}, count_deaths=True) as two:
                shard = await two.shard()
                await shard.until("caught up")
                assert shard.context.deaths == 1
                zombie.client.thaw()
                await asyncio.sleep(COMMITTED)
                assert (await place.commit_of()).metadata == '{"at":[],"owners":2}'

    run(test)


def test_a_shard_that_ends_keeps_nobody_waiting_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.services.worker.shard_host.INTAKE", 1)

    class Slow:
        async def on_event(self, delivery: Any) -> None:
            """Is never asked."""

        async def on_caught_up(self) -> None:
            await asyncio.Event().wait()

        async def aclose(self) -> None:
            """Has nothing to say."""

    async def main() -> None:
        place, nothing = Partition("topic", 0), cast("Any", None)
        context = ShardContext(nothing, nothing, nothing, place, 0)
        host = ShardHost(nothing, context, Slow(), {}, {}, [])
        takes = [asyncio.create_task(host.take(End(place, n))) for n in range(4)]
        await asyncio.sleep(0.01)
        await host.close(lost=True)
        await asyncio.wait_for(asyncio.gather(*takes), 1.0)

    asyncio.run(main())
