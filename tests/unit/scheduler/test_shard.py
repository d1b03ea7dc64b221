"""The scheduler's shell: what a successor does about what its predecessor started."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.schemas.events import (
    BatchAssembled,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    PolicyPublished,
    Ref,
)
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import Delivery
from headrace.services.scheduler import service
from headrace.services.scheduler.service import SchedulerShard
from tests.unit.scheduler.test_core import recipe, start_all, task
from tests.whole_core import WholeCore

TASKS = Partition("tasks", 0)


class Context:
    """A ShardContext, and what was started through it."""

    partition = TASKS

    def __init__(self) -> None:
        self.caught_up = False
        self.begins_at = 0
        self.held = 0
        self.started: list[int] = []
        self.transactions: list[list[int]] = []
        """The tasks that were started in each."""
        self.released: list[int] = []
        self.spawned: list[asyncio.Task[None]] = []

    def hold(self, delivery: Delivery[Any]) -> Callable[[], None]:
        return lambda: self.released.append(delivery.offset)

    def hold_positions(self) -> Callable[[], None]:
        self.held += 1

        def release() -> None:
            self.held -= 1

        return release

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self.spawned.append(asyncio.create_task(work, name=name))

    async def send_all(self, events: Sequence[EpisodeStarted]) -> None:
        self.started += [event.task for event in events]
        self.transactions.append([event.task for event in events])


def delivery(event: Event, offset: int = 0) -> Delivery[Any]:
    ref = Ref(topic="any", partition=0, offset=offset, digest=bytes(16))
    return Delivery(event, ref, 1.0, TASKS, offset)


def ended(number: int, sample: int) -> EpisodeEnded:
    return EpisodeEnded(
        task=number, sample=sample, item_id=str(number), ending="finished", reward=1.0
    )


def test_a_successor_does_not_start_what_has_finished() -> None:
    # Given a predecessor that started tasks 0, 1 and 2, of which 1 has ended and is decided:
    # the commit still stands at 0, which has not.
    settings = recipe(groups=4)
    predecessor = WholeCore(settings)
    predecessor.on_policy("default", 0)
    for number in range(3):
        predecessor.on_task(number, task(number))
    starts = start_all(predecessor)
    batch = BatchAssembled.model_validate(
        {
            "policy": "default",
            "version": 1,
            "recipe": settings.digest,
            "seed": 0,
            "samples": (),
            "sampled_tokens": 0,
            "low_mark": 0,
            "decided": ({"first": 1, "last": 1},),
            "groups_read": 0,
        }
    )
    published = PolicyPublished(
        policy="default", version=0, status="initial", digest=bytes(32), full_version=0
    )
    context = Context()
    told: list[int] = []

    async def main() -> None:
        async def ends(places: Sequence[Partition]) -> dict[Partition, tuple[int, int]]:
            told.append(context.held)
            return {place: (0, 4) for place in places}

        services = SimpleNamespace(
            recipe=settings,
            log=SimpleNamespace(broker=SimpleNamespace(ends=ends)),
            ending=asyncio.Event(),
        )
        shard = SchedulerShard(context, services)  # type: ignore[arg-type]
        # When a successor catches up, with one more task than was started,
        for number in range(4):
            await shard.on_event(delivery(task(number), number))
        for event in (*starts, ended(1, 0), ended(1, 1), published, batch):
            await shard.on_event(delivery(event))
        context.caught_up = True
        await shard.on_caught_up()
        for _ in range(5):
            await asyncio.sleep(0)
        for one in context.spawned:
            one.cancel()

    asyncio.run(main())

    # Then it starts that one alone, and lets the commit pass all four tasks.
    assert context.started == [3, 3]
    assert context.released == [0, 1, 2, 3]
    # And the commit does not pass the starts of those that have not finished.
    assert told == [3]
    assert context.held == 3


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (service.BYTES_A_TRANSACTION, [[0, 0, 1, 1, 2, 2]]),
        (15_000, [[0, 0, 1, 1], [2, 2]]),
        (1, [[0, 0], [1, 1], [2, 2]]),
    ],
)
def test_a_transaction_has_so_many_bytes_and_whole_tasks(
    most: int, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "BYTES_A_TRANSACTION", most)
    context = Context()
    context.caught_up = True
    published = PolicyPublished(
        policy="default", version=0, status="initial", digest=bytes(32), full_version=0
    )

    async def main() -> None:
        async def ends(places: Sequence[Partition]) -> dict[Partition, tuple[int, int]]:
            return {place: (0, 3) for place in places}

        services: Any = SimpleNamespace(
            recipe=recipe(groups=50),
            log=SimpleNamespace(broker=SimpleNamespace(ends=ends)),
            ending=asyncio.Event(),
        )
        shard = SchedulerShard(context, services)  # type: ignore[arg-type]
        await shard.on_event(delivery(published))
        for number in range(3):
            large = task(number, payload='{"text": "%s"}' % ("x" * 3_000))
            await shard.on_event(delivery(large, number))
        await shard.on_caught_up()
        for _ in range(9):
            await asyncio.sleep(0)
        for one in context.spawned:
            one.cancel()

    asyncio.run(main())
    assert context.transactions == expected
