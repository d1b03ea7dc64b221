"""What the next owner of a partition keeps of ended episodes, and what it still does for them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import permutations

import pytest

from headrace.schemas.events import (
    ActionRequested,
    EpisodeEnded,
    Event,
    GenerationCompleted,
    ObservationRecorded,
    TaskEnded,
)
from tests.unit.agent.test_shard import (
    Bench,
    answered,
    observed,
    on_a_bench,
    outcome,
    result,
    started,
)

TOPICS = ("episodes", "generations", "observations", "outcomes", "results")
ENDED = ((3, 0), (3, 1), (4, 0), (4, 1), (5, 0))
"""Task 3 has a result. Task 4 has both outcomes, and no result. Sample 1 of task 5 is open."""


def generated(number: int, sample: int, call: int) -> GenerationCompleted:
    return GenerationCompleted(
        task=number,
        sample=sample,
        call=str(call),
        policy="default",
        worker="an engine",
        finish="stop",
        digest=bytes(16),
        text="word " * 100,
    )


def answers() -> dict[str, list[Event]]:
    """The answers to the episodes that have ended, by topic."""
    stepped = [
        observed(*key, index=index).model_copy(update={"partition": 2, "text": "word " * 100})
        for key in ENDED
        for index in (0, 1, 2)
    ]
    # What a former owner that did not know of its end asked:
    stray = observed(3, 0, attempt=1).model_copy(update={"partition": 7})
    turns = [generated(*key, call) for key in ENDED for call in (4, 5)]
    return {"generations": list(turns), "observations": [*stepped, stray]}


def first_reset() -> ObservationRecorded:
    """The answer to the reset of the open episode, as its former owner asked for it."""
    found: list[ObservationRecorded] = []

    async def test(bench: Bench) -> None:
        await bench.catch_up()
        await bench.feed(started(5, 1))
        found.append(answered(bench, 6).model_copy(update={"sample": 1}))

    on_a_bench(test)
    return found[0]


def in_order(order: Sequence[str], reset: ObservationRecorded) -> tuple[list[Event], list[Event]]:
    """All records topic by topic, and those of them that are answers to ended episodes."""
    recorded = answers()
    to_ended = [*recorded["generations"], *recorded["observations"]]
    recorded["observations"].append(reset)
    recorded["episodes"] = [started(number, sample) for number in (3, 4, 5) for sample in (0, 1)]
    late = outcome(4, 1).model_copy(update={"ending": "finished", "attempts": 2})
    recorded["outcomes"] = [*(outcome(*key) for key in ENDED), late]
    recorded["results"] = [
        result(3).model_copy(update={"outcomes": (outcome(3), outcome(3, 1))}),
    ]
    return [event for topic in order for event in recorded[topic]], to_ended


@pytest.mark.parametrize("order", list(permutations(TOPICS)), ids="-".join)
def test_of_ended_episodes_nothing_is_kept_but_what_closes_their_environments(
    order: tuple[str, ...],
) -> None:
    reset = first_reset()

    async def test(bench: Bench) -> None:
        events, to_ended = in_order(order, reset)
        kept = [weakref.ref(answer) for answer in to_ended]
        await bench.feed(*events)
        del events, to_ended
        # Given no run yet, when it catches up:
        assert bench.sent == []
        assert [answer() for answer in kept if answer() is not None] == []

        await bench.catch_up()
        actions = [event for event in bench.sent if isinstance(event, ActionRequested)]
        closes = sorted(
            (one.task, one.sample, one.attempt, one.index, partition)
            for one, (_, kind, partition) in zip(actions, bench.places, strict=True)
            if kind == "close"
        )
        # Then each environment is closed after its last answer, where it is.
        expected = [(*key, 0, 3, 2) for key in ENDED]
        assert closes == sorted([*expected, (3, 0, 1, 1, 7), (5, 1, 0, 1, 6)])
        # The task whose result is missing gets it, with the first outcomes.
        (written,) = [event for event in bench.sent if isinstance(event, TaskEnded)]
        assert written.task == 4
        assert [(one.sample, one.ending, one.attempts) for one in written.outcomes] == [
            (0, "cancelled", 1),
            (1, "cancelled", 1),
        ]
        # The open episode goes on with the recorded answer, and nothing else runs again.
        ended = [event for event in bench.sent if isinstance(event, EpisodeEnded)]
        assert [(one.task, one.sample, one.ending) for one in ended] == [(5, 1, "finished")]
        assert {kind for _, kind, _ in bench.places} == {"close"}

    on_a_bench(test)


def test_answers_to_an_open_episode_are_kept_whatever_its_sibling_did() -> None:
    async def test(bench: Bench) -> None:
        kept = observed(5, 1)
        await bench.feed(observed(5), kept, outcome(5), started(5), started(5, 1))
        assert bench.shard._early_answers.take((5, 1)) == {0: {"1": kept}}
        assert bench.shard._early_answers.take((5, 0)) == {}

    on_a_bench(test)
