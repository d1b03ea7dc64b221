"""The env worker's shard: open, step, repeat, rebuild, expire, close."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from headrace.errors import DependencyError, InfrastructureError, TooLarge, UsageError
from headrace.schemas.events import ActionRequested, EnvironmentUse, Event, ObservationRecorded, Ref
from headrace.services.base.clock import now_ms
from headrace.services.base.shown import shown
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.environment import Claim
from headrace.services.env.gymnasium_environment import GymnasiumEnvironment
from headrace.services.env.null import NullEnvironment
from headrace.services.env.setup import EnvironmentSetup
from headrace.services.env.shard import EnvShard
from headrace.services.env.slots import EnvironmentSlots
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import Delivery

PARTITION = Partition("t.actions.v1", 0)
KNOWN = ("default",)
REF = Ref(topic="t.actions.v1", partition=0, offset=0, digest=bytes(16))


class FakeContext:
    """A shard's hands without a log: keeps what is sent and which records are held."""

    def __init__(self) -> None:
        self.partition = PARTITION
        self.caught_up = self.away = False
        self.begins_at = 0
        self.sent: list[ObservationRecorded] = []
        self.held: set[int] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.arrived = asyncio.Event()
        self.done_below = 0

    async def send(self, event: Event) -> Ref:
        if self.away:
            raise DependencyError("the log did not answer: was the record written?")
        assert isinstance(event, ObservationRecorded)
        self.sent.append(event)
        self.arrived.set()
        return REF

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def hold(self, delivery: Delivery[Any], *, long: bool = False) -> Callable[[], None]:
        assert long == (delivery.event.kind == "reset" and delivery.event.environment.use in KNOWN)
        self.held.add(delivery.offset)
        return lambda: self.held.discard(delivery.offset)

    async def answers(self, count: int) -> list[ObservationRecorded]:
        while len(self.sent) < count:
            self.arrived.clear()
            await asyncio.wait_for(self.arrived.wait(), 5)
        return self.sent

    async def idle(self) -> None:
        while self.tasks:
            await asyncio.wait(self.tasks, timeout=5)


class Counter(NullEnvironment):
    """Counts what is made and closed."""

    made = 0
    closed = 0
    unlike = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(turns=3, **options)
        type(self).made += 1

    async def reset(self, task: TaskView) -> Observation:
        observation = await super().reset(task)
        return Observation(text=observation.text + "!" * self.unlike)

    async def step(self, action: str) -> Observation:
        if action == "break":
            raise InfrastructureError("host_gone")
        if action == "wrong":
            raise UsageError("no such option")
        if action == "bug":
            raise ZeroDivisionError
        if action == "nan":
            return Observation(reward=float("nan"))
        if action == "infinite":
            return Observation(data={"what": float("inf")})
        if action == "hang":
            await asyncio.Event().wait()
        return await super().step(action)

    async def aclose(self) -> None:
        type(self).closed += 1


D = bytes(16)


def action(index: int, kind: str = "step", **changes: Any) -> ActionRequested:
    fields: dict[str, Any] = {
        "task": 1,
        "sample": 0,
        "call": str(index + 1),
        "index": index,
        "kind": kind,
        "environment": EnvironmentUse(use="default"),
        "payload": json.dumps({"action": "go"}),
        "expires_at": now_ms() + 60_000,
        "digest": bytes([index]) * 16,
    }
    return ActionRequested(**{**fields, **changes})


class Bench:
    """A shard, and how to feed it."""

    def __init__(self, slots: int = 8, step_s: float | None = None) -> None:
        Counter.made = Counter.closed = Counter.unlike = 0
        self.context = FakeContext()
        setups = {"default": EnvironmentSetup(Counter, {}, EnvironmentSlots(slots))}
        bounds = {} if step_s is None else {"default": step_s}
        self.shard = EnvShard(self.context, setups, "me", (), bounds)  # type: ignore[arg-type]
        self._offset = 0

    async def feed(self, *events: Event) -> None:
        for event in events:
            await self.shard.on_event(Delivery(event, REF, 0.0, PARTITION, self._offset))
            self._offset += 1

    async def live(self) -> None:
        self.context.caught_up = True
        await self.shard.on_caught_up()


def run(
    test: Callable[[Bench], Coroutine[Any, Any, None]], slots: int = 8, step_s: float | None = None
) -> None:
    async def main() -> None:
        bench = Bench(slots, step_s)
        try:
            await test(bench)
        finally:
            tasks = list(bench.context.tasks)
            for task in tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


def test_an_episode_from_reset_to_close() -> None:
    async def test(bench: Bench) -> None:
        await bench.live()
        await bench.feed(action(0, "reset"), action(1), action(2), action(3))
        answers = await bench.context.answers(4)
        assert [answer.text for answer in answers] == ["0", "1", "2", "3"]
        assert [answer.terminated for answer in answers] == [False, False, False, True]
        assert answers[1].digest == action(1).digest
        assert bench.context.held == {0}
        await bench.feed(action(4, "close"))
        await bench.context.idle()
        assert bench.context.held == set()
        assert Counter.closed == 1

    run(test)


def test_a_repeated_action_is_answered_again_and_not_done_again() -> None:
    async def test(bench: Bench) -> None:
        await bench.live()
        await bench.feed(action(0, "reset"), action(1), action(1), action(0, "reset"), action(2))
        answers = await bench.context.answers(4)
        assert [answer.text for answer in answers] == ["0", "1", "1", "2"]

    run(test)


def test_an_action_without_its_environment_is_lost_not_rewarded() -> None:
    async def test(bench: Bench) -> None:
        await bench.live()
        await bench.feed(action(2))
        (answer,) = await bench.context.answers(1)
        assert answer.failure is not None
        assert (answer.failure.code, answer.failure.origin) == ("sandbox_lost", "infrastructure")
        assert answer.reward is None

    run(test)


def test_failures_are_typed() -> None:
    async def test(bench: Bench) -> None:
        await bench.live()
        codes = {
            "break": ("infrastructure", "host_gone"),
            "bug": ("environment", None),
            "nan": ("environment", "not_finite"),
            "infinite": ("environment", "bad_observation"),
        }
        for sample, (text, (origin, code)) in enumerate(codes.items()):
            payload = json.dumps({"action": text})
            await bench.feed(
                action(0, "reset", sample=sample), action(1, sample=sample, payload=payload)
            )
            answer = (await bench.context.answers(2 * sample + 2))[-1]
            assert answer.failure is not None
            assert answer.failure.retryable
            assert answer.failure.origin == origin
            assert answer.failure.code == code or code is None
            assert answer.reward is None

    run(test)


def test_what_only_the_recipe_sets_no_task_can_change() -> None:
    setup = EnvironmentSetup(GymnasiumEnvironment, {"id": "Taxi-v3"}, EnvironmentSlots(1))
    use = EnvironmentUse(use="default", options='{"render": "mine:run"}')
    claim = Claim(task=1, sample=0, attempt=0, partition=0, offset=0, expires_at=0.0)
    with pytest.raises(UsageError, match=r"can't set the options \['render'\]"):
        asyncio.run(setup.take(use, claim))


def test_a_newer_attempt_replaces_the_older() -> None:
    async def test(bench: Bench) -> None:
        await bench.live()
        await bench.feed(action(0, "reset"), action(1))
        await bench.context.answers(2)
        await bench.feed(action(0, "reset", attempt=1), action(2))
        answers = await bench.context.answers(3)
        assert answers[-1].attempt == 1
        assert (Counter.made, Counter.closed) == (2, 1)
        await bench.feed(action(1, attempt=1))
        assert (await bench.context.answers(4))[-1].text == "1"

    run(test)


def after(text: str, index: int, **changes: Any) -> bytes:
    """The digest that an action carries if the agent saw this answer of Counter."""
    fields: dict[str, Any] = {"reward": 0.0 if index else None, "text": text, **changes}
    return shown(ObservationRecorded(task=1, sample=0, call="", index=index, digest=D, **fields))


def test_it_is_rebuilt_from_recorded_actions_and_does_the_newest_again() -> None:
    async def test(bench: Bench) -> None:
        actions = (action(1, after=after("0", 0)), action(2, after=after("1", 1)))
        await bench.feed(action(0, "reset"), *actions)
        assert bench.context.sent == []
        await bench.live()
        (answer,) = await bench.context.answers(1)
        assert (answer.call, answer.text, answer.failure) == ("3", "2", None)
        await bench.feed(action(3, after=after("2", 2)))
        assert (await bench.context.answers(2))[-1].terminated

    run(test)


def test_a_claim_says_whether_an_earlier_owner_may_have_begun_the_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: dict[int, bool] = {}

    async def take(_: object, use: EnvironmentUse, claim: Claim) -> Counter:
        taken[claim.task] = claim.repeated
        return Counter()

    monkeypatch.setattr(EnvironmentSetup, "take", take)

    async def test(bench: Bench) -> None:
        await bench.feed(action(0, "reset"))
        await bench.live()
        await bench.feed(action(0, "reset", task=2))
        await bench.context.answers(2)
        assert taken == {1: True, 2: False}

    run(test)


def test_a_world_that_differs_when_rebuilt_is_a_failure() -> None:
    async def test(bench: Bench) -> None:
        Counter.unlike = 1
        await bench.feed(action(0, "reset"), action(1, after=after("0", 0)))
        await bench.live()
        (answer,) = await bench.context.answers(1)
        assert answer.failure is not None
        assert answer.failure.code == "diverged"

    run(test)


@pytest.mark.parametrize("replayable", [True, False])
def test_the_answer_that_a_predecessor_gave_counts(replayable: bool) -> None:
    async def test(bench: Bench) -> None:
        Counter.replayable = replayable
        try:
            await bench.feed(action(0, "reset"))
            await bench.live()
            await bench.context.answers(1)  # The first one is in the log already, and differs.
            await bench.feed(action(1, after=after("elsewhere", 0)))
            answer = (await bench.context.answers(2))[-1]
        finally:
            Counter.replayable = True
        assert answer.failure is not None
        assert answer.failure.code == ("diverged" if replayable else "sandbox_lost")

    run(test)


def test_it_is_closed_where_it_is_lost_while_it_is_rebuilt() -> None:
    async def test(bench: Bench) -> None:
        hang = json.dumps({"action": "hang"})
        seen = action(1, payload=hang, after=after("0", 0))
        await bench.feed(action(0, "reset"), seen, action(2, after=after("1", 1)))
        await bench.live()
        while not Counter.made:
            await asyncio.sleep(0)
        for task in list(bench.context.tasks):
            task.cancel()
        await bench.context.idle()
        assert Counter.closed == 1

    run(test)


@pytest.mark.parametrize("text", ["0", "elsewhere"])
def test_an_answer_of_another_worker_that_came_first_counts(text: str) -> None:
    async def test(bench: Bench) -> None:
        await bench.live()
        await bench.feed(action(0, "reset"))
        await bench.context.answers(1)
        await bench.feed(action(1, after=after(text, 0)))
        own, next_one = await bench.context.answers(2)
        assert own.text == "0"
        code = next_one.failure.code if next_one.failure is not None else ""
        assert code == ("" if text == "0" else "superseded")

    run(test)


def test_answers_say_where_the_environment_is() -> None:
    async def test(bench: Bench) -> None:
        await bench.live()
        await bench.feed(action(0, "reset"), action(2, sample=1))
        answers = await bench.context.answers(2)
        assert {answer.sample: answer.partition for answer in answers} == {0: 0, 1: -1}

    run(test)


def test_what_a_predecessor_left_unanswered_is_answered_without_its_environment() -> None:
    async def test(bench: Bench) -> None:
        unknown = action(0, "reset", task=2, environment=EnvironmentUse(use="nowhere"))
        overdue = action(1, task=4, expires_at=now_ms() - 1)
        bench.context.done_below = 2
        answered = [action(1, task=3), action(0, "score", task=5)]
        await bench.feed(*answered, action(1), unknown, overdue)
        assert len(bench.context.held) == 3
        await bench.live()
        answers = await bench.context.answers(2)
        codes = {answer.task: answer.failure.code for answer in answers if answer.failure}
        assert codes == {1: "sandbox_lost", 2: "unknown_environment"}
        await bench.context.idle()
        assert bench.context.held == set()

    run(test)


def test_closed_episodes_are_not_taken_up() -> None:
    async def test(bench: Bench) -> None:
        await bench.feed(action(0, "reset"), action(1), action(2, "close"))
        assert bench.context.held == set()
        await bench.live()
        assert bench.context.tasks == set()

    run(test)


def test_the_deadline_ends_an_environment_that_hangs() -> None:
    async def test(bench: Bench) -> None:
        await bench.live()
        expires_at = now_ms() + 50
        hang = json.dumps({"action": "hang"})
        await bench.feed(
            action(0, "reset", expires_at=expires_at),
            action(1, payload=hang, expires_at=expires_at),
        )
        await bench.context.answers(1)
        await bench.context.idle()
        assert Counter.closed == 1
        assert bench.context.held == set()

    run(test)


def test_resets_wait_for_slots_and_closes_do_not() -> None:
    async def test(bench: Bench) -> None:
        await bench.live()
        await bench.feed(action(0, "reset"), action(0, "reset", sample=1))
        await bench.context.answers(1)
        await bench.feed(action(1, "close", sample=1))
        await bench.feed(action(0, "reset", sample=2))
        assert len(bench.context.sent) == 1
        await bench.feed(action(1, "close"))
        answers = await bench.context.answers(2)
        assert answers[-1].sample == 2

    run(test, slots=1)


def test_a_persistent_environment_is_made_once() -> None:
    async def test(bench: Bench) -> None:
        await bench.live()
        use = EnvironmentUse(use="default", mode="persistent")
        for sample in range(3):
            await bench.feed(action(0, "reset", sample=sample, environment=use))
            await bench.context.answers(sample + 1)
            await bench.feed(action(1, "close", sample=sample, environment=use))
            await bench.context.idle()
        assert (Counter.made, Counter.closed) == (1, 0)

    run(test)


def test_a_step_that_takes_longer_than_its_limit_fails_the_attempt() -> None:
    async def test(bench: Bench) -> None:
        await bench.live()
        hang = json.dumps({"action": "hang"})
        use = EnvironmentUse(use="default", mode="persistent")
        await bench.feed(
            action(0, "reset", environment=use), action(1, payload=hang, environment=use)
        )
        late = (await bench.context.answers(2))[1]
        assert late.failure is not None
        assert (late.failure.origin, late.failure.code) == ("environment", "step_timeout")
        assert late.failure.retryable
        assert late.reward is None
        # The next attempt gets another instance, not the one whose step was cancelled.
        await bench.feed(action(2, "close", environment=use))
        await bench.context.idle()
        assert (Counter.made, Counter.closed) == (1, 1)
        await bench.feed(action(0, "reset", attempt=1, environment=use))
        assert (await bench.context.answers(3))[2].text == "0"

    run(test, step_s=0.05)


def test_an_unknown_environment_is_answered_as_such() -> None:
    async def test(bench: Bench) -> None:
        await bench.live()
        await bench.feed(action(0, "reset", environment=EnvironmentUse(use="none")))
        (answer,) = await bench.context.answers(1)
        assert answer.failure is not None
        assert (answer.failure.origin, answer.failure.code) == ("operator", "unknown_environment")

    run(test)


def test_what_no_record_can_hold_is_a_failure_of_the_environment() -> None:
    async def test(bench: Bench) -> None:
        fits = bench.context.send

        async def send(event: Event) -> Ref:
            assert isinstance(event, ObservationRecorded)
            if event.text == "1":
                raise TooLarge("9,000,000 bytes")
            return await fits(event)

        bench.context.send = send  # type: ignore[method-assign]
        await bench.live()
        await bench.feed(action(0, "reset"), action(1), action(2))
        answers = await bench.context.answers(3)
        failures = [answer.failure.code if answer.failure else None for answer in answers]
        assert failures == [None, "too_large", "too_large"]

    run(test)


def test_an_observation_that_is_none_is_a_failure_of_the_environment() -> None:
    class Odd(Counter):
        async def step(self, action: str) -> Observation:
            return Observation(data={"not JSON": object()})

    async def test(bench: Bench) -> None:
        setup = EnvironmentSetup(Odd, {}, EnvironmentSlots(1))
        bench.shard = EnvShard(bench.context, {"default": setup}, "me")  # type: ignore[arg-type]
        await bench.live()
        await bench.feed(action(0, "reset"), action(1))
        failure = (await bench.context.answers(2))[1].failure
        assert failure is not None
        assert (failure.origin, failure.code) == ("environment", "bad_observation")

    run(test)


def test_a_reset_whose_answers_do_not_get_through_stays_held() -> None:
    async def test(bench: Bench) -> None:
        await bench.live()
        await bench.feed(action(0, "reset"))
        await bench.context.answers(1)
        bench.context.away = True
        await bench.feed(action(1))
        with pytest.raises(DependencyError):
            await asyncio.gather(*bench.context.tasks)
        assert bench.context.held == {0}

    run(test)


def test_a_wrong_recipe_is_the_operators_doing_and_not_retried() -> None:
    async def test(bench: Bench) -> None:
        await bench.live()
        wrong = json.dumps({"action": "wrong"})
        await bench.feed(action(0, "reset"), action(1, payload=wrong))
        failure = (await bench.context.answers(2))[-1].failure
        assert failure is not None
        assert (failure.origin, failure.code, failure.retryable) == ("operator", "unusable", False)

    run(test)


class Lived(Counter):
    """Outlives its worker: an action that was begun is remembered outside of it."""

    replayable = False
    begun = -1
    released = 0

    async def reset(self, task: TaskView) -> Observation:
        type(self).begun = 0
        return await super().reset(task)

    async def step(self, action: str) -> Observation:
        type(self).begun += 1
        return await super().step(action)

    async def resume(self, task: TaskView, done: int) -> None:
        if type(self).begun != done:
            raise InfrastructureError("sandbox_lost", f"{type(self).begun} begun, {done} answered")

    async def release(self) -> None:
        type(self).released += 1


class Swept(EnvironmentSetup):
    """Notes what it was asked to sweep."""

    def __init__(self) -> None:
        super().__init__(Lived, {}, EnvironmentSlots(8))
        self.asked: list[tuple[int, int, int | None]] = []

    async def sweep(
        self, partition: int, read_to: int, open_attempt: Callable[[int, int], int | None]
    ) -> None:
        self.asked.append((partition, read_to, open_attempt(1, 0)))


class ResumableBench(Bench):
    """A shard of environments that outlive it."""

    def __init__(self, slots: int = 8) -> None:
        super().__init__(slots)
        Lived.begun, Lived.released, Lived.closed = -1, 0, 0
        self.setup = Swept()
        self.context.begins_at = 7
        self.shard = EnvShard(self.context, {"default": self.setup}, "me")  # type: ignore[arg-type]

    async def end(self) -> None:
        for task in list(self.context.tasks):
            task.cancel()
        await self.context.idle()


def resumable(test: Callable[[ResumableBench], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        bench = ResumableBench()
        try:
            await test(bench)
        finally:
            await bench.end()

    asyncio.run(main())


@pytest.mark.parametrize("begun", [1, 2])
def test_what_outlives_its_worker_is_left_with_the_partition_and_found_again(begun: int) -> None:
    """The newest action was begun by the worker that is gone, or not."""

    async def test(bench: ResumableBench) -> None:
        await bench.live()
        await bench.feed(action(0, "reset"), action(1, after=after("0", 0)))
        await bench.context.answers(2)
        await bench.end()
        assert (Lived.closed, Lived.released) == (0, 1)
        other = ResumableBench()
        Lived.begun = begun
        actions = action(1, after=after("0", 0)), action(2, after=after("1", 1))
        await other.feed(action(0, "reset"), *actions)
        await other.live()
        (answer,) = await other.context.answers(1)
        if begun == 1:
            assert (answer.index, answer.failure, Lived.begun) == (2, None, 2)
        else:
            assert answer.failure is not None
            assert answer.failure.code == "sandbox_lost"
        # The agent saw an answer of the worker that is gone. So the action was done.
        await other.feed(action(3, after=after("2" if begun == 2 else answer.text, 2)))
        answers = await other.context.answers(2)
        assert (answers[-1].failure, Lived.begun) == (None, 3)
        await other.feed(action(4, "close"))
        await asyncio.sleep(0)
        await other.end()
        assert Lived.closed == 1

    resumable(test)


def test_what_was_begun_and_not_answered_is_not_done_again() -> None:
    async def test(bench: ResumableBench) -> None:
        Lived.begun = 1
        await bench.feed(action(0, "reset"), action(1, after=after("0", 0)))
        await bench.live()
        (answer,) = await bench.context.answers(1)
        assert answer.failure is not None
        assert answer.failure.code == "sandbox_lost"
        assert (answer.reward, Lived.begun) == (None, 1)
        await bench.feed(action(2, "close"))  # The agent makes a new attempt.
        await asyncio.sleep(0)
        await bench.end()
        assert (Lived.closed, Lived.begun) == (1, 1)

    resumable(test)


def test_a_sweep_knows_what_was_read_and_what_is_open() -> None:
    async def test(bench: ResumableBench) -> None:
        await bench.live()
        await asyncio.sleep(0)
        assert bench.setup.asked == [(0, 6, None)]

    resumable(test)


@pytest.mark.parametrize("live", [True, False])
def test_what_another_team_answers_for_is_left_alone(live: bool) -> None:
    async def main() -> None:
        context = FakeContext()
        shard = EnvShard(context, {}, "me", {"judge"})  # type: ignore[arg-type]
        context.caught_up = live
        use = EnvironmentUse(use="judge")
        for index, kind in enumerate(("score", "reset", "step", "close")):
            asked = action(index, kind, environment=use)
            await shard.on_event(Delivery(asked, REF, 0.0, PARTITION, index))
        context.caught_up = True
        await shard.on_caught_up()
        await context.idle()
        assert (context.sent, context.held) == ([], set())

    asyncio.run(main())
