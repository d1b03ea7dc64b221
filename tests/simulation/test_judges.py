"""A judge of another team: it reads `actions`, answers on `observations`, and dies at whiles."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest

from headrace.schemas.events import ActionRequested, EpisodeEnded, ObservationRecorded
from headrace.schemas.topics import ACTIONS
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import Start, follow_events
from tests.simulation.processes import Run
from tests.simulation.scenario import Scenario, calm
from tests.simulation.simulate import simulate
from tests.simulation.world import verdict

LIVES = 4


async def answer_all(log: EventLog, starts: dict[Partition, Start]) -> None:
    """Answers every score, and moves `starts` on behind each answer."""
    reader = follow_events(log, starts.copy())
    try:
        async for item in reader:
            if not isinstance(item, Delivery) or not isinstance(item.event, ActionRequested):
                continue
            asked = item.event
            if asked.kind == "score":
                score = verdict(json.loads(asked.payload))
                names = ("task", "sample", "attempt", "call", "index", "digest")
                known = {name: getattr(asked, name) for name in names}
                await log.send(ObservationRecorded(**known, reward=score))
            starts[item.partition] = item.offset + 1
    finally:
        await reader.aclose()


async def serve(run: Run, log: EventLog) -> None:
    """A judge that dies, and starts again behind its last commit: some it answers twice."""
    starts: dict[Partition, Start] = dict.fromkeys(log.topics.partitions_of(ACTIONS), "first")
    for life in range(LIVES):
        committed = starts.copy()
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await answer_all(log, starts)
        starts = committed if life % 2 else starts
    await answer_all(log, starts)


def judged_elsewhere(acts: list[str]) -> Scenario:
    scenario = calm()
    tree = scenario.recipe.model_dump(mode="json")
    tree["tasks"] |= {"agent": "debater", "max_turns": 6}
    tree["environments"]["jury"]["use"] = "external"
    scenario.recipe = type(scenario.recipe).model_validate(tree)
    scenario.acts, scenario.victims = acts, ("agent", "env")
    return scenario


@pytest.mark.parametrize("acts", [[], ["kill"] * 12], ids=["calm", "kills"])
def test_a_judge_elsewhere_answers_by_topic_alone(acts: list[str]) -> None:
    judging: list[asyncio.Task[None]] = []

    async def begin(run: Run, log: EventLog) -> None:
        judging.append(asyncio.create_task(serve(run, log)))

    result = simulate(1, scenario=judged_elsewhere(acts), meanwhile=begin)
    assert result.violations == []
    assert result.endings.keys() == {"finished"}
    assert result.facts is not None
    outcomes = [one.event for one in result.facts.all(EpisodeEnded)]
    assert all(outcome.rewards["jury"] == outcome.reward for outcome in outcomes)
    scores = [one.event for one in result.facts.all(ActionRequested) if one.event.kind == "score"]
    assert len(scores) >= len(outcomes) > 0
