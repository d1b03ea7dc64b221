"""Isolated episodes are bisected: those that crash end as poison, and the others finish."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from math import log2
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import ActionRequested, EpisodeEnded, Event, ObservationRecorded, Ref
from headrace.services.agent.crash_isolation.frames import Frame
from headrace.services.agent.crash_isolation.isolation import CHILDREN, IsolatedEpisode, Isolation
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

    async def main() -> list[IsolatedEpisode]:
        isolated_episodes = [isolated_of(context, sample) for sample in range(count)]
        context.spawn(Isolation(children).run(context, isolated_episodes), "")  # type: ignore[arg-type]
        await context.finished()
        return isolated_episodes

    isolated_episodes = asyncio.run(main())
    ended = {event.sample: event for event in context.sent if isinstance(event, EpisodeEnded)}
    assert ended.keys() == killers
    for outcome in ended.values():
        assert outcome.failure is not None
        assert (outcome.failure.origin, outcome.failure.code) == ("operator", "poison")
        assert "SIGSEGV" in outcome.failure.message
        assert (outcome.ending, outcome.reward, outcome.trajectory) == ("failed", None, None)
    assert {one.started.sample for one in isolated_episodes if one.ended} == set(
        range(count)
    ) - killers
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
