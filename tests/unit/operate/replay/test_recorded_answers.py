"""An agent against a record: the same code asks the same; other code is shown where it differs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.schemas.events import (
    EpisodeEnded,
    EpisodeStarted,
    Failure,
    GenerationRequested,
    Sampling,
)
from headrace.schemas.recipe.agent_settings import Agent as AgentSettings
from headrace.services.agent.agents import multi_turn
from headrace.services.agent.episode import Agent, Episode
from headrace.services.agent.records import AgentSetup
from headrace.services.operate.replay import recorded_answers as recorded_module
from headrace.services.operate.replay.recorded_answers import (
    END,
    Divergence,
    RecordedAttempt,
    replay_attempt,
)
from tests.unit.agent.test_episode_run import LOST, Taught, World, play, task


def record(
    agent: Agent = multi_turn,
    world: World | None = None,
    exceptions: str = "exclude",
    **changes: Any,
) -> RecordedAttempt:
    """What the log has after an agent has run in a world."""
    world = world or World()
    outcome, _ = play(world, task(**changes), agent, exceptions=exceptions)
    requests = {
        one.call: one
        for one in world.requests()
        if getattr(one, "kind", "") != "close" and one.attempt == outcome.attempt
    }
    answers = {call: answer for call, one in requests.items() if (answer := world.answer(one))}
    return RecordedAttempt(
        EpisodeStarted(task=7, sample=2, submitted=task(**changes), seed=5, deadline=1),
        outcome.attempt,
        requests,
        answers,
        outcome,
    )


def replay(attempt: RecordedAttempt, agent: Agent = multi_turn) -> Divergence | None:
    return asyncio.run(replay_attempt(attempt, AgentSetup(agent, {}, AgentSettings(), {})))


def without(attempt: RecordedAttempt, call: str) -> RecordedAttempt:
    """The same record, whose answer to a call never came, and no outcome."""
    answers = {key: one for key, one in attempt.answers.items() if key != call}
    return RecordedAttempt(attempt.started, attempt.attempt, attempt.requests, answers)


async def forked(episode: Episode) -> None:
    await episode.reset()
    await episode.generate("a")
    one, two = episode.conversation().fork(), episode.conversation().fork()
    await episode.gather(lambda: one.generate("b"), lambda: two.generate("c"))
    await episode.score("judge", {"of": episode.random.random()})


def test_scores_of_a_teacher_are_no_request_of_the_agent() -> None:
    attempt = record()
    score = GenerationRequested(
        task=7, sample=2, attempt=0, call="6.score0", policy="teacher", kind="score",
        sampling=Sampling(max_tokens=1), expires_at=1, digest=bytes(16),
    )  # fmt: skip
    attempt.add(score)
    assert replay(attempt) is None


async def silent(episode: Episode) -> None:
    await episode.reset()


async def broken(episode: Episode) -> None:
    await episode.reset()
    raise ZeroDivisionError("oops")


async def quitting(episode: Episode) -> None:
    await episode.reset()
    raise SystemExit(3)


async def generous(episode: Episode) -> None:
    await multi_turn(episode)
    episode.reward = 7.0


async def curt(episode: Episode) -> None:
    observation = await episode.reset()
    while not observation.done:
        generation = await episode.generate(observation.text, max_tokens=1)
        observation = await episode.step(generation.text)


async def louder(episode: Episode) -> None:
    observation = await episode.reset()
    while not observation.done:
        generation = await episode.generate(observation.text)
        observation = await episode.step(generation.text.lower())


@pytest.mark.parametrize("agent", [multi_turn, forked, silent, broken, quitting, generous])
def test_what_has_not_changed_does_not_diverge(agent: Agent) -> None:
    assert replay(record(agent, attempts=1), agent) is None


def test_limits_and_later_attempts_replay_too() -> None:
    assert replay(record(max_turns=2)) is None
    assert replay(record(max_tokens=4)) is None
    world = World()
    world.observed = lambda action: {"failure": LOST} if action.attempt == 0 else {}
    again = record(world=world)
    assert again.attempt == 1
    assert replay(again) is None


def test_an_exception_that_counts_replays_too() -> None:
    async def late(episode: Episode) -> None:
        await episode.generate("a")
        raise ValueError("not a number")

    attempt = record(late, exceptions="unfinished")
    assert attempt.outcome is not None
    assert attempt.outcome.ending == "exception"
    assert replay(attempt, late) is None
    assert replay(attempt) is not None


def test_another_question_is_shown_as_it_was_and_is() -> None:
    found = replay(record(), curt)
    assert found is not None
    assert (found.call, found.then["ask"]) == ("2", "generate")
    assert (found.then["sampling"]["max_tokens"], found.now["sampling"]["max_tokens"]) == (8, 1)
    assert found.then["text"] == found.now["text"]


def test_another_demonstration_is_shown_as_it_was_and_is() -> None:
    async def teacher(episode: Episode) -> None:
        await episode.generate("1 + 1", demonstration="2")

    async def wrong(episode: Episode) -> None:
        await episode.generate("1 + 1", demonstration="3")

    found = replay(record(teacher, Taught()), wrong)
    assert found is not None
    assert (found.then["demonstration"], found.now["demonstration"]) == ("2", "3")


def test_another_action_is_shown_as_it_was_and_is() -> None:
    found = replay(record(), louder)
    assert found is not None
    assert (found.call, found.now["ask"]) == ("3", "step")
    assert (found.then["payload"], found.now["payload"]) == ('{"action": "AB"}', '{"action": "ab"}')


def test_who_asks_more_or_less_diverges() -> None:
    more = replay(record(silent), multi_turn)
    assert more is not None
    assert (more.call, more.then["ask"], more.now["ask"]) == ("2", "nothing more", "generate")
    less = replay(record(multi_turn), silent)
    assert less is not None
    assert (less.call, less.then["ask"], less.now["ask"]) == ("2", "generate", "nothing more")


def test_another_end_of_the_same_questions_diverges() -> None:
    found = replay(record(multi_turn), generous)
    assert found is not None
    assert (found.call, found.then["reward"], found.now["reward"]) == (END, 1.0, 7.0)
    raised = replay(record(silent), broken)
    assert raised is not None
    assert raised.now["raised"] == "ZeroDivisionError: oops"
    quit_ = replay(record(silent), quitting)
    assert quit_ is not None
    assert quit_.now["raised"] == "RuntimeError: the agent's code raised SystemExit: 3"
    repaired = replay(record(broken, attempts=1), silent)
    assert repaired is not None
    assert (repaired.then["ending"], repaired.now["ending"]) == ("failed", "finished")


def test_the_record_ends_where_no_answer_came() -> None:
    """Killed, cancelled or out of time: what would have come next, nobody knows."""
    whole = record()
    assert replay(without(whole, "4")) is None
    assert replay(without(whole, "4"), louder) is not None, "before that, all counts"
    assert whole.outcome is not None
    late = Failure(origin="infrastructure", code="deadline")
    outcome: EpisodeEnded = whole.outcome.model_copy(update={"ending": "deadline", "failure": late})
    requests = {"1": whole.requests["1"]}
    cut = RecordedAttempt(whole.started, 0, requests, {"1": whole.answers["1"]}, outcome)
    assert replay(cut) is None


def test_a_question_that_is_no_longer_kept_is_compared_by_its_digest() -> None:
    whole = record()
    bare = RecordedAttempt(whole.started, 0, {}, whole.answers, whole.outcome)
    assert replay(bare) is None
    found = replay(bare, curt)
    assert found is not None
    assert found.then["ask"] == "something that is no longer kept"


def test_an_agent_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stuck(episode: Episode) -> None:
        await episode.reset()
        await asyncio.Event().wait()

    monkeypatch.setattr(recorded_module, "AGENT_S", 0.05)
    found = replay(record(), stuck)
    assert found is not None
    assert "no end within" in found.now["ask"]
