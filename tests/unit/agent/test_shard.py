"""The agent worker's shard: what it does about answers that no live episode waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from typing import Any, cast

import pytest

from headrace.errors import DependencyError, TooLarge
from headrace.schemas.events import (
    ActionRequested,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    ObservationRecorded,
    Ref,
    TaskEnded,
    TaskSubmitted,
)
from headrace.schemas.recipe.agent_settings import Agent as AgentSettings
from headrace.services.agent import early_answers
from headrace.services.agent.crash_isolation.isolation import Isolation
from headrace.services.agent.episode import Episode
from headrace.services.agent.memory.unread_answers import AnswerReader
from headrace.services.agent.records import AgentSetup
from headrace.services.agent.routing.action_routes import ActionRoutes
from headrace.services.agent.routing.prompt_routes import PromptRoutes
from headrace.services.agent.shard import AgentShard
from headrace.services.base.clock import now_ms
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.tasks.cancellation import Cancellations
from headrace.services.worker.shard import ShardContext
from tests.unit.agent.test_episode_run import task

EPISODES = Partition("episodes", 0)


async def patient(episode: Episode) -> None:
    await episode.reset()


class Nobody:
    """Cancellations: none so far."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def subscribe(self, on_cancelled: Callable[..., None]) -> None: ...

    def unsubscribe(self, on_cancelled: Callable[..., None]) -> None: ...

    def reason(self, submitted: TaskSubmitted) -> str | None:
        return self.reasons.get(submitted.task_id)

    def id_of(self, submitted: TaskSubmitted) -> tuple[str, str]:
        return submitted.source, submitted.task_id


class Bench:
    """A ShardContext, its shard, and what it sent."""

    partition = EPISODES
    deaths = 0
    is_open = True

    def __init__(self) -> None:
        self.caught_up = False
        self.sent: list[Event] = []
        self.places: list[tuple[int, str, int]] = []
        """Attempt, kind and partition of each action."""
        self.spawned: list[asyncio.Task[None]] = []
        self.adopted: list[asyncio.Task[None]] = []
        self.held = 0
        """How often the positions of the answers are held."""
        self.unreachable: Exception | None = None
        """What a send raises."""
        self.cancellations = Nobody()
        setup = AgentSetup(patient, {}, AgentSettings(), {})
        self.shard = AgentShard(
            cast("ShardContext", self),
            {"default": setup},
            lambda _: None,
            asyncio.Event(),
            cast("Isolation", None),
            cast("Cancellations", self.cancellations),
            PromptRoutes((), 1),
            ActionRoutes(("default",), 8),
            AnswerReader(cast("EventLog", self)),
        )

    def hold(self, delivery: Delivery[Any]) -> Callable[[], None]:
        return lambda: None

    def hold_positions(self) -> Callable[[], None]:
        def release() -> None:
            self.held -= 1

        self.held += 1
        return release

    def spawn(
        self, work: Coroutine[Any, Any, None], name: str, trace: Context | None = None
    ) -> asyncio.Task[None]:
        self.spawned.append(asyncio.create_task(work, name=name, context=trace))
        return self.spawned[-1]

    def adopt(self, task: asyncio.Task[None]) -> None:
        self.adopted.append(task)

    async def send(self, event: Event, partition: int | None = None) -> Ref:
        if self.unreachable is not None:
            raise self.unreachable
        self.sent.append(event)
        if isinstance(event, ActionRequested):
            assert partition is not None
            self.places.append((event.attempt, event.kind, partition))
        return Ref(topic="any", partition=0, offset=len(self.sent), digest=bytes(16))

    async def feed(self, *events: Event) -> None:
        for event in events:
            ref = Ref(topic="any", partition=0, offset=0, digest=bytes(16))
            await self.shard.on_event(Delivery(event, ref, 1.0, EPISODES, 0))
        for _ in range(20):
            await asyncio.sleep(0)

    async def catch_up(self) -> None:
        self.caught_up = True
        await self.shard.on_caught_up()
        await self.feed()

    def closed(self) -> list[tuple[int, int, int]]:
        """Task, sample and attempt of each `close`."""
        actions = [event for event in self.sent if isinstance(event, ActionRequested)]
        return [(a.task, a.sample, a.attempt) for a in actions if a.kind == "close"]

    async def end(self) -> None:
        for spawned in self.spawned:
            spawned.cancel()
            with suppress(asyncio.CancelledError):
                await spawned
        for agent in self.adopted:
            agent.cancel()
        await asyncio.gather(*self.adopted, return_exceptions=True)


def on_a_bench(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        bench = Bench()
        try:
            await test(bench)
        finally:
            await bench.end()

    asyncio.run(main())


def started(number: int, sample: int = 0) -> EpisodeStarted:
    submitted = task(task_id=str(number), samples=2)
    return EpisodeStarted(
        task=number, sample=sample, submitted=submitted, seed=5, deadline=now_ms() + 60_000
    )


def observed(number: int, sample: int = 0, attempt: int = 0, index: int = 0) -> ObservationRecorded:
    return ObservationRecorded(
        task=number,
        sample=sample,
        attempt=attempt,
        call=str(index + 1),
        index=index,
        digest=bytes(16),
    )


def outcome(number: int, sample: int = 0) -> EpisodeEnded:
    return EpisodeEnded(
        task=number, sample=sample, item_id=str(number), ending="cancelled", attempts=1
    )


def result(number: int) -> TaskEnded:
    return TaskEnded(
        task=number,
        source="test",
        task_id=str(number),
        item_id=str(number),
        closed_by="all",
        outcomes=(outcome(number),),
    )


def test_an_answer_to_what_is_over_frees_its_environment() -> None:
    async def test(bench: Bench) -> None:
        await bench.feed(started(3), outcome(3), started(3, 1))
        await bench.catch_up()
        # When what a zombie asked is answered after the episode's end, and after its task's:
        await bench.feed(observed(3, attempt=2), result(3), observed(3, 1, attempt=1))
        assert bench.closed() == [(3, 0, 2), (3, 1, 1)]

    on_a_bench(test)


def test_what_answered_before_the_take_over_is_freed_where_its_episode_is_over() -> None:
    async def test(bench: Bench) -> None:
        # Given answers to an episode that ended before, to one that goes on, and to one that is
        # cancelled, of which this owner has asked nothing:
        bench.cancellations.reasons["5"] = "nobody needs it"
        await bench.feed(started(3), outcome(3), started(4), started(5))
        await bench.feed(observed(3, index=0), observed(3, index=1), observed(4), observed(5))
        await bench.catch_up()
        assert sorted(bench.closed())[0] == (3, 0, 0)
        assert (5, 0, 0) in bench.closed()
        # The one that goes on closes its own once its agent is done, and just that.
        assert bench.closed().count((4, 0, 0)) == 1

    on_a_bench(test)


def test_a_result_that_no_record_can_hold_is_written_without_details() -> None:
    class Narrow(Bench):
        async def send(self, event: Event, partition: int | None = None) -> Ref:
            if isinstance(event, TaskEnded) and event.outcomes[0].rewards:
                raise TooLarge("9,000,000 bytes")
            return await super().send(event, partition)

    async def main() -> None:
        bench = Narrow()
        try:
            await bench.catch_up()
            await bench.feed(started(3), started(3, 1))
            for sample in (0, 1):
                await bench.feed(outcome(3, sample).model_copy(update={"rewards": {"form": 1.0}}))
            (written,) = (event for event in bench.sent if isinstance(event, TaskEnded))
            assert [one.ending for one in written.outcomes] == ["cancelled", "cancelled"]
            assert not any(one.rewards for one in written.outcomes)
        finally:
            await bench.end()

    asyncio.run(main())


def test_the_largest_numbers_that_a_record_holds_end_nobody() -> None:
    async def test(bench: Bench) -> None:
        largest = 2**31 - 1
        await bench.feed(started(3), outcome(3), started(3, 1))
        await bench.catch_up()
        await bench.feed(observed(3, index=largest), observed(3, 1, attempt=largest))
        assert (3, 0, 0) in bench.closed()
        (ended,) = [event for event in bench.sent if isinstance(event, EpisodeEnded)]
        assert (ended.ending, ended.attempt, ended.attempts) == ("failed", largest, largest)

    on_a_bench(test)


def answered(bench: Bench, partition: int) -> ObservationRecorded:
    """An environment's answer to the newest reset, from this partition of `actions`."""
    resets = [one for one in bench.sent if isinstance(one, ActionRequested) and one.kind == "reset"]
    update = {"partition": partition, "digest": resets[-1].digest, "attempt": resets[-1].attempt}
    return observed(resets[-1].task).model_copy(update=update)


def test_the_environment_that_answers_first_is_the_attempts_and_another_one_is_closed() -> None:
    async def test(bench: Bench) -> None:
        await bench.catch_up()
        await bench.feed(started(3))
        # An earlier owner had sent the reset to partition 5.
        await bench.feed(answered(bench, 5), answered(bench, 0))
        assert bench.places[0] == (0, "reset", 0)
        assert sorted(bench.places[1:]) == [(0, "close", 0), (0, "close", 5)]

    on_a_bench(test)


def test_a_successor_closes_the_second_environment_too() -> None:
    async def test(bench: Bench) -> None:
        first = observed(3).model_copy(update={"partition": 5})
        await bench.feed(started(3), first, first.model_copy(update={"partition": 6}))
        await bench.catch_up()
        assert (0, "close", 6) in bench.places
        assert bench.places[-1][0] == 1, "the digest is not that of the request: a new attempt"
        assert (0, "close", 5) in bench.places

    on_a_bench(test)


def test_an_environment_that_answers_when_its_episode_is_over_is_closed_where_it_is() -> None:
    async def test(bench: Bench) -> None:
        await bench.catch_up()
        await bench.feed(started(3), outcome(3))
        late = observed(3).model_copy(update={"partition": 7})
        await bench.feed(late)
        assert bench.places[-1] == (0, "close", 7)
        assert bench.held == 0

    on_a_bench(test)


def test_an_answer_whose_environment_could_not_be_closed_is_read_again() -> None:
    async def test(bench: Bench) -> None:
        await bench.catch_up()
        await bench.feed(started(3), outcome(3))
        bench.unreachable = DependencyError("the log did not answer")
        await bench.feed(observed(3).model_copy(update={"partition": 7}))
        assert bench.held == 1, "the commit does not pass the answer"
        assert isinstance(bench.spawned.pop().exception(), DependencyError)

    on_a_bench(test)


def test_an_environment_is_closed_although_no_record_comes_after_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(early_answers, "START_S", 0.05)

    async def test(bench: Bench) -> None:
        await bench.catch_up()
        await bench.feed(observed(3).model_copy(update={"partition": 7}))
        assert bench.held == 1, "the commit does not pass the answer"
        assert bench.places == []
        await asyncio.sleep(0.04)
        await bench.feed(observed(4).model_copy(update={"partition": 6}))
        async with asyncio.timeout(10):
            while bench.held:
                await asyncio.sleep(0.01)
        assert bench.places == [(0, "close", 7), (0, "close", 6)]

    on_a_bench(test)
