"""Isolated episodes are bisected: those that crash end as poison, and the others finish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from math import log2
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import ActionRequested, EpisodeEnded, Event, ObservationRecorded, Ref
from headrace.services.agent.crash_isolation import isolation as module
from headrace.services.agent.crash_isolation.frames import Frame
from headrace.services.agent.crash_isolation.isolation import (
    CHILDREN,
    HANG_S,
    IsolatedEpisode,
    Isolation,
)
from headrace.services.base.clock import now
from tests.unit.agent.test_episode_run import World, play, start, task

NOWHERE = Ref(topic="t", partition=0, offset=0, digest=bytes(16))


class Context:
    """A ShardContext that keeps what was sent, and waits for what was spawned."""

    def __init__(self) -> None:
        self.sent: list[Event] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def send(self, event: Event) -> Ref:
        self.sent.append(event)
        return NOWHERE

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self.tasks.append(asyncio.create_task(work))

    async def finished(self) -> None:
        while self.tasks:
            await self.tasks.pop()


class Children:
    """Makes children that die as soon as they come to a killer; those before it have ended."""

    def __init__(self, killers: set[int]) -> None:
        self.killers = killers
        self.made = self.live = self.most = 0

    async def __call__(self) -> Any:
        children = self
        children.made += 1
        children.live += 1
        children.most = max(children.most, children.live)

        class Fake:
            async def run(self, isolated_episodes: Sequence[IsolatedEpisode]) -> str | None:
                for isolated in isolated_episodes:
                    await asyncio.sleep(0)
                    if isolated.started.sample in children.killers:
                        return "SIGSEGV"
                    isolated.ended = True
                return None

            async def aclose(self) -> None:
                children.live -= 1

        return Fake()


def isolated_of(context: Context, sample: int = 2, answers: Any = None) -> IsolatedEpisode:
    started = start(task()).model_copy(update={"sample": sample})
    return IsolatedEpisode(context, started, 0.0, answers or {}, context.send)  # type: ignore[arg-type]


@given(st.integers(1, 60), st.sets(st.integers(0, 59), max_size=4))
def test_those_that_kill_end_as_poison_and_all_others_go_on(count: int, chosen: set[int]) -> None:
    killers = {sample for sample in chosen if sample < count}
    children, context = Children(killers), Context()

    async def main() -> None:
        isolated_episodes = [isolated_of(context, sample) for sample in range(count)]
        isolation = Isolation(children)
        isolation.add(isolated_episodes)
        async with working(isolation):
            while not all(one.ended for one in isolated_episodes):
                await asyncio.sleep(0)
                ended = {one.sample for one in context.sent if isinstance(one, EpisodeEnded)}
                for one in isolated_episodes:
                    if one.started.sample in ended:  # as the shard does when it reads the outcome
                        one.stop()

    asyncio.run(main())
    ended = {event.sample: event for event in context.sent if isinstance(event, EpisodeEnded)}
    assert ended.keys() == killers
    for outcome in ended.values():
        assert outcome.failure is not None
        assert (outcome.failure.origin, outcome.failure.code) == ("operator", "poison")
        assert "SIGSEGV" in outcome.failure.message
        assert (outcome.ending, outcome.reward, outcome.trajectory) == ("failed", None, None)
    assert children.live == 0
    assert children.most <= CHILDREN
    assert children.made <= 1 + len(killers) * 2 * (log2(count) + 1)


def test_what_was_answered_is_not_asked_again_and_the_rest_is() -> None:
    first = World()
    play(first)
    reset, prompt = first.requests()[:2]
    recorded = first.answer(reset)
    assert isinstance(recorded, ObservationRecorded)

    async def main() -> None:
        context = Context()
        told: list[Frame] = []
        isolated = isolated_of(context, answers={0: {recorded.call: recorded}})
        isolated.tell = told.append
        await isolated.relay(reset)
        assert (context.sent, told) == ([], [Frame("answer", event=recorded)])
        assert await isolated.relay(prompt) == NOWHERE
        assert context.sent == [prompt]
        answer = first.answer(prompt)
        assert answer is not None
        isolated.on_answer(answer)
        isolated.on_answer(answer)  # another worker's, of the same id
        assert [frame.event for frame in told] == [recorded, answer]

    asyncio.run(main())


def test_the_environment_of_a_poison_is_closed() -> None:
    first = World()
    play(first)
    step = first.of(ActionRequested)[1]

    async def main() -> list[Event]:
        context = Context()
        isolated = isolated_of(context)
        await isolated.relay(step)
        await isolated.end_as_poison("SIGKILL")
        return context.sent

    _, close, outcome = asyncio.run(main())
    assert isinstance(close, ActionRequested)
    assert (close.kind, close.index) == ("close", step.index + 1)
    assert isinstance(outcome, EpisodeEnded)


def test_what_its_child_does_not_close_is_closed_before_the_end() -> None:
    """A child that is cancelled before it asks for an action knows of no environment."""
    first = World()
    play(first)
    end = first.of(EpisodeEnded)[0]
    observed = ObservationRecorded(task=1, sample=2, call="1", index=0, digest=bytes(16))
    close = next(one for one in first.of(ActionRequested) if one.kind == "close")

    async def sent(*by_child: Event) -> list[Event]:
        context = Context()
        isolated = isolated_of(context, answers={0: {observed.call: observed}})
        for event in by_child:
            await isolated.relay(event)
        return context.sent

    added, _ = asyncio.run(sent(end))
    assert isinstance(added, ActionRequested)
    assert added.kind == "close"
    assert asyncio.run(sent(close, end)) == [close, end]


def test_an_isolated_episode_that_waits_for_a_child_is_cancelled_and_stopped_all_the_same() -> None:
    async def main() -> None:
        isolated = isolated_of(Context())
        told: list[Frame] = []
        isolated.cancel("enough")
        assert isolated.cancelled == "enough"
        isolated.tell = told.append
        isolated.cancel("again")
        isolated.stop()
        assert told == [Frame("cancel", text="enough"), Frame("stop")]
        assert isolated.ended

    asyncio.run(main())


@asynccontextmanager
async def working(isolation: Isolation) -> AsyncIterator[None]:
    """Runs the isolation meanwhile."""
    running = asyncio.create_task(isolation.run())
    try:
        async with asyncio.timeout(20):
            yield
        assert not running.done() or running.result() is None
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class Lasting:
    """Makes children whose episodes take for ever, and notes the numbers of those that run."""

    def __init__(self, killers: Sequence[int] = ()) -> None:
        self.runs: list[list[int]] = []
        self.killers = killers

    async def __call__(self) -> Any:
        children = self

        class Fake:
            async def run(self, isolated_episodes: Sequence[IsolatedEpisode]) -> str | None:
                numbers = [one.started.sample for one in isolated_episodes]
                children.runs.append(numbers)
                if set(numbers) & set(children.killers):
                    await asyncio.sleep(0.01)
                    return "SIGSEGV"
                try:
                    await asyncio.Event().wait()
                finally:
                    children.runs.remove(numbers)
                return None

            async def aclose(self) -> None: ...

        return Fake()


def test_partitions_that_come_while_all_children_are_in_use_do_not_wait_for_their_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TRIAL_S", 0.05)
    monkeypatch.setattr(module, "CHECK_S", 0.01)

    async def main() -> None:
        context, children = Context(), Lasting()
        isolation = Isolation(children)
        async with working(isolation):
            for number in range(2 * CHILDREN):  # of one shard each; all take for hours
                isolation.add([isolated_of(context, number)])
                await asyncio.sleep(0.005)
            while sorted(one for run in children.runs for one in run) != list(range(2 * CHILDREN)):
                await asyncio.sleep(0.01)
            assert len(children.runs) <= CHILDREN

    asyncio.run(main())


def test_shards_that_wait_together_share_a_child() -> None:
    async def main() -> None:
        context, children = Context(), Lasting()
        isolation = Isolation(children)
        for number in range(20):
            isolation.add([isolated_of(context, number)])
        async with working(isolation):
            while not children.runs:
                await asyncio.sleep(0.01)
            assert children.runs == [list(range(20))]

    asyncio.run(main())


def test_what_is_cancelled_or_overdue_ends_while_it_waits_for_a_child() -> None:
    def observed(sample: int) -> ObservationRecorded:
        return ObservationRecorded(task=1, sample=sample, call="1", index=0, digest=bytes(16))

    async def main() -> None:
        context, children = Context(), Lasting()
        isolation = Isolation(children)
        async with working(isolation):
            for number in range(CHILDREN):
                isolation.add([isolated_of(context, number)])
                while len(children.runs) <= number:
                    await asyncio.sleep(0.005)
            cancelled, overdue, patient = (
                isolated_of(context, number, {0: {"1": observed(number)}})
                for number in (20, 21, 22)
            )
            past = int(1000 * (now() - HANG_S - 1))
            overdue.started = overdue.started.model_copy(update={"deadline": past})
            isolation.add([cancelled, overdue, patient])
            await asyncio.sleep(0.02)
            cancelled.cancel("nobody needs it")
            while not (cancelled.ended and overdue.ended):
                await asyncio.sleep(0.01)
            await context.finished()
            ends = {one.sample: one for one in context.sent if isinstance(one, EpisodeEnded)}
            assert {number: one.ending for number, one in ends.items()} == {
                20: "cancelled",
                21: "deadline",
            }
            assert ends[20].failure is not None
            assert ends[20].failure.message == "nobody needs it"
            closes = [one.sample for one in context.sent if isinstance(one, ActionRequested)]
            assert sorted(closes) == [20, 21]
            assert not patient.ended

    asyncio.run(main())


def test_a_killer_is_found_although_innocents_use_all_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TRIAL_S", 0.05)
    monkeypatch.setattr(module, "CHECK_S", 0.01)
    monkeypatch.setattr(module, "CHILDREN", 2)

    async def main() -> None:
        context, children = Context(), Lasting(killers=[5, 11])
        isolation = Isolation(children)
        isolation.add([isolated_of(context, number) for number in range(12)])
        async with working(isolation):
            while {one.sample for one in context.sent if isinstance(one, EpisodeEnded)} != {5, 11}:
                await asyncio.sleep(0.01)

    asyncio.run(main())
