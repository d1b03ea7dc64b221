"""A successor keeps bounded bytes of answers, and reads the others when its agents ask."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.schemas.events import ActionRequested, EpisodeEnded, Event, ObservationRecorded, Ref
from headrace.schemas.recipe.agent_settings import Agent as AgentSettings
from headrace.services.agent import early_answers
from headrace.services.agent.episode import Episode
from headrace.services.agent.memory import unread_answers
from headrace.services.agent.records import AgentSetup
from headrace.services.kafka.broker import Partition, Position
from headrace.services.log.event_log import Delivery
from tests.unit.agent.test_shard import Bench, started

TURNS = 20
OBSERVATIONS = Partition("observations", 0)


async def agent(episode: Episode) -> None:
    """Acts on the length of what it observes."""
    observation = await episode.reset()
    for _ in range(TURNS):
        observation = await episode.step(str(len(observation.text)))


class Recorded(Bench):
    """A bench whose observations are in a log, from which they can be read again."""

    def __init__(self, log: list[ObservationRecorded]) -> None:
        super().__init__()
        self.log = log
        self.broker = self
        self.fetches: list[list[int]] = []
        """The offsets of each fetch."""
        setup = AgentSetup(agent, {}, AgentSettings(), {})
        self.shard.agents = {"default": setup}

    async def fetch(self, positions: Sequence[Position]) -> list[Any]:
        self.fetches.append([at.offset for at in positions])
        await asyncio.sleep(0)
        return positions  # type: ignore[return-value]

    async def decode(self, record: Position) -> Delivery[Event]:
        assert record.partition == OBSERVATIONS
        return self.delivery(record.offset)

    def delivery(self, offset: int) -> Delivery[Event]:
        # A new object each time: the real log decodes the record each time, too.
        event = self.log[offset].model_copy(update={"text": f"{offset:08d}" * 1_000})
        ref = Ref(topic="any", partition=0, offset=offset, digest=bytes(16))
        return Delivery(event, ref, float(offset), OBSERVATIONS, offset)

    async def read_all(self) -> None:
        for offset in range(len(self.log)):
            await self.shard.on_event(self.delivery(offset))

    async def quiet(self) -> None:
        """Waits until nothing more is sent or read, however often the loop goes round."""
        before = None
        while before != (before := (len(self.sent), len(self.fetches))):
            for _ in range(200):
                await asyncio.sleep(0)


def answer_to(action: ActionRequested) -> ObservationRecorded:
    return ObservationRecorded(
        task=action.task,
        sample=action.sample,
        attempt=action.attempt,
        call=action.call,
        index=action.index,
        digest=action.digest,
        partition=0,
        instance="an env worker",
    )


async def recorded_turns(episodes: int, turns: int) -> list[ObservationRecorded]:
    """The log of episodes that got so many answers, turn by turn."""
    bench, log = Recorded([]), list[ObservationRecorded]()
    await bench.catch_up()
    await bench.feed(*(started(number) for number in range(episodes)))
    for _ in range(turns):
        actions = [one for one in bench.sent if isinstance(one, ActionRequested)]
        bench.sent.clear()
        for action in actions:
            log.append(answer_to(action))
            bench.log = log
            await bench.shard.on_event(bench.delivery(len(log) - 1))
        for _ in range(5):
            await asyncio.sleep(0)
    await bench.end()
    return log


def taken_over(episodes: int, turns: int) -> Recorded:
    """A successor of these episodes, when nothing is left to do."""

    async def main() -> Recorded:
        log = await recorded_turns(episodes, turns)
        bench = Recorded(log)
        reading = asyncio.create_task(bench.shard.reader.run())
        for number in range(episodes):
            await bench.feed(started(number))
        await bench.read_all()
        await bench.catch_up()
        await bench.quiet()
        assert not reading.done()
        reading.cancel()
        await bench.end()
        return bench

    return asyncio.run(main())


@pytest.mark.parametrize("kept", [0, 20_000, 10**9])
def test_each_episode_goes_on_where_it_was_whatever_is_kept(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_answers, "KEPT_BYTES", kept)
    monkeypatch.setattr(unread_answers, "READ_AT_ONCE", 7)
    bench = taken_over(episodes=5, turns=9)
    asked = sorted((one.task, one.kind, one.index) for one in bench.sent)  # type: ignore[attr-defined]
    assert asked == [(number, "step", 9) for number in range(5)]
    read = [offset for fetch in bench.fetches for offset in fetch]
    # All together read the log once, and nearly in its order.
    assert len(read) == len(set(read)) == {0: 45, 20_000: 43, 10**9: 0}[kept]
    assert all(abs(offset - n) <= 7 for n, offset in enumerate(read, 45 - len(read)))


def test_the_environment_of_an_episode_that_is_over_is_closed_though_no_answer_was_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(early_answers, "KEPT_BYTES", 0)

    async def main() -> None:
        bench = Recorded(await recorded_turns(episodes=1, turns=3))
        bench.cancellations.reasons["0"] = "nobody needs it"
        await bench.feed(started(0))
        await bench.read_all()
        await bench.catch_up()
        (close, ended) = (
            one for one in bench.sent if isinstance(one, ActionRequested | EpisodeEnded)
        )
        assert isinstance(close, ActionRequested)
        assert (close.kind, close.index) == ("close", 3)
        assert isinstance(ended, EpisodeEnded)
        assert ended.ending == "cancelled"
        await bench.end()

    asyncio.run(main())


def test_a_take_over_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_answers, "KEPT_BYTES", 100_000)
    monkeypatch.setattr(unread_answers, "READ_BYTES", 100_000)
    episodes, turns = 20, 20  # 3.2 MB of observations

    async def main() -> tuple[int, int]:
        bench = Recorded(await recorded_turns(episodes, turns))
        reading = asyncio.create_task(bench.shard.reader.run())
        for number in range(episodes):
            await bench.feed(started(number))
        tracemalloc.start()
        await bench.read_all()
        await bench.catch_up()
        await bench.quiet()
        left, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        reading.cancel()
        await bench.end()
        return left, peak

    left, peak = asyncio.run(main())
    assert peak < 1_500_000
    assert left < 700_000
