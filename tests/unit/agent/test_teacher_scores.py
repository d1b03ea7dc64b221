"""A policy's teacher scores what the policy sampled, once, after the end of the episode."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headrace.schemas import packed
from headrace.schemas.events import (
    ActionRequested,
    EpisodeEnded,
    Event,
    Failure,
    GenerationCompleted,
    GenerationRequested,
    ObservationRecorded,
    Sampling,
    TaskSubmitted,
    TrajectoryRecorded,
    Use,
)
from headrace.schemas.recipe.agent_settings import Agent as AgentSettings
from headrace.services.agent.agents import multi_turn
from headrace.services.agent.episode import Agent, Episode
from headrace.services.agent.episode_run import EpisodeRun
from headrace.services.agent.records import AgentSetup
from headrace.services.agent.teacher_scores import Teacher
from tests.unit.agent.test_episode_run import World, start, task

BUSY = Failure(origin="infrastructure", code="engine_failed", retryable=True)
Answers = dict[int, dict[str, Any]]


class Classroom(World):
    """Scores what is asked: the logprob of a token is minus its place in the sequence."""

    def __init__(self, *scores: dict[str, Any] | None) -> None:
        """`scores` change the first answers of the teacher. None: it does not answer."""
        super().__init__()
        self.scores = list(scores)

    @property
    def asked(self) -> list[GenerationRequested]:
        return [one for one in self.of(GenerationRequested) if one.kind == "score"]

    def answer(self, event: Event) -> GenerationCompleted | ObservationRecorded | None:
        if not isinstance(event, GenerationRequested) or event.kind != "score":
            return super().answer(event)
        change = self.scores.pop(0) if self.scores else {}
        return None if change is None else scored(event, change)


def scored(request: GenerationRequested, change: dict[str, Any]) -> GenerationCompleted:
    places = [n for one in request.scored for n in range(one.first, one.first + one.count)]
    fields = {
        "finish": "failed" if "failure" in change else "stop",
        "logprobs": packed.pack_f32([-float(n) for n in places]),
        "versions": packed.pack_spans([0] * len(places)),
    }
    return GenerationCompleted(
        task=request.task,
        sample=request.sample,
        attempt=request.attempt,
        call=request.call,
        digest=request.digest,
        policy=request.policy,
        worker="w",
        **{**fields, **change},
    )


def play(
    world: World,
    agent: Agent = multi_turn,
    submitted: TaskSubmitted | None = None,
    *,
    answers: Answers | None = None,
    answer_s: float = 5.0,
    left_s: float = 60.0,
    meanwhile: Callable[[EpisodeRun], Awaitable[None]] | None = None,
    **limits: Any,
) -> tuple[EpisodeEnded, TrajectoryRecorded]:
    async def main() -> None:
        settings = AgentSettings.model_validate(limits)
        teachers = {"default": Teacher("teacher", answer_s)}
        setup = AgentSetup(agent, {}, settings, {"default": "digest"}, teachers=teachers)
        started = start(submitted or task(), left_s)
        world.run = EpisodeRun(world.send, started, 0.0, setup, answers or {})
        running = asyncio.create_task(world.run.run())
        if meanwhile is not None:
            await meanwhile(world.run)
        await asyncio.wait_for(running, 10.0)

    asyncio.run(main())
    [outcome] = world.of(EpisodeEnded)
    [trajectory] = world.of(TrajectoryRecorded)
    return outcome, trajectory


def teacher_logprobs(trajectory: TrajectoryRecorded) -> list[list[float]]:
    return [packed.unpack_f32(turn.teacher) for turn in trajectory.turns]


def test_a_conversation_is_sent_once_however_many_turns_it_has() -> None:
    world = Classroom()
    outcome, trajectory = play(world)

    [request] = world.asked
    assert (request.policy, request.call, request.pinned) == ("teacher", "6.score0", None)
    # Each turn adds one token of context, and two sampled ones.
    assert packed.unpack_i32(request.tokens) == [48, 65, 66, 49, 65, 66, 50, 65, 66]
    assert [(one.first, one.count) for one in request.scored] == [(1, 2), (4, 2), (7, 2)]
    assert teacher_logprobs(trajectory) == [[-1, -2], [-4, -5], [-7, -8]]
    assert (outcome.ending, outcome.reward) == ("finished", 1.0)


def test_limits_of_turns_do_not_make_samplings_different() -> None:
    world = Classroom()
    play(world)
    limits = {one.sampling.max_tokens for one in world.of(GenerationRequested)}
    assert len(limits) > 1
    assert [one.sampling for one in world.asked[0].scored] == [0, 0, 0]


def test_the_environment_is_closed_before_the_teacher_is_asked() -> None:
    world = Classroom()
    play(world)
    kinds = [e.kind for e in world.sent if isinstance(e, ActionRequested | GenerationRequested)]
    assert kinds[-2:] == ["close", "score"]


async def forked(episode: Episode) -> None:
    one = episode.conversation()
    await one.generate("a")
    other = one.fork()
    await one.generate("b")
    await other.generate("c", json_schema={"type": "null"})
    episode.reward = 0.0


def test_a_turn_that_two_sequences_share_is_scored_once() -> None:
    world = Classroom()
    _, trajectory = play(world, forked)

    first, second = world.asked
    assert [(one.first, one.count) for one in first.scored] == [(1, 2), (4, 2)]
    assert packed.unpack_i32(second.tokens) == [97, 65, 66, 99, 65, 66]
    assert [(one.first, one.count) for one in second.scored] == [(4, 2)]
    assert second.samplings[0].json_schema == '{"type": "null"}'
    assert teacher_logprobs(trajectory) == [[-1, -2], [-4, -5], [-4, -5]]


async def two_roles(episode: Episode) -> None:
    await episode.generate("a")
    await episode.generate("b", role="other")
    await episode.generate("c")
    episode.reward = 0.0


def test_only_turns_of_policies_with_a_teacher_are_scored() -> None:
    world = Classroom()
    roles = {
        "policy": Use(policy="default", sampling=Sampling(max_tokens=8)),
        "other": Use(policy="other", sampling=Sampling(max_tokens=8)),
    }
    _, trajectory = play(world, two_roles, task(roles=roles))
    assert packed.unpack_i32(world.asked[0].tokens) == [97, 65, 66, 99, 65, 66]
    assert [bool(turn.teacher) for turn in trajectory.turns] == [True, False, True]


def test_a_failed_score_is_asked_again_under_its_own_call() -> None:
    world = Classroom({"failure": BUSY}, {"failure": BUSY})
    outcome, trajectory = play(world)
    assert [one.call for one in world.asked] == ["6.score0", "6.score1", "6.score2"]
    assert outcome.reward == 1.0
    assert all(turn.teacher for turn in trajectory.turns)


WRONG = {"logprobs": packed.pack_f32([-1.0])}
REFUSED = {"failure": Failure(origin="operator", code="bad_tokens")}


@pytest.mark.parametrize(
    ("answers", "code", "tries"),
    [
        ([{"failure": BUSY}] * 3, "teacher_failed", 3),
        ([REFUSED], "teacher_failed", 1),
        ([{"finish": "overflow", "logprobs": b""}], "teacher_overflow", 1),
        ([WRONG], "teacher_failed", 1),
        ([None], "teacher_silent", 1),
    ],
)
def test_an_episode_without_its_scores_has_no_reward(
    answers: list[dict[str, Any] | None], code: str, tries: int
) -> None:
    world = Classroom(*answers)
    outcome, trajectory = play(world, answer_s=0.3)
    assert len(world.asked) == tries
    assert (outcome.ending, outcome.reward, trajectory.reward) == ("failed", None, None)
    assert outcome.failure is not None
    assert (outcome.failure.origin, outcome.failure.code) == ("infrastructure", code)
    assert "teacher" in outcome.failure.message
    # Its turns are recorded nevertheless, and it is not played again.
    assert teacher_logprobs(trajectory) == [[], [], []]
    assert outcome.attempt == 0


def test_a_restart_finds_recorded_scores_and_asks_for_the_others() -> None:
    first = Classroom({"failure": BUSY})
    _, trajectory = play(first)
    recorded: dict[str, Any] = {}
    first.scores = [{"failure": BUSY}]
    for request in first.requests():
        if (answer := first.answer(request)) is not None and request.call != "6.score1":
            recorded[request.call] = answer
    again = Classroom()
    outcome, same = play(again, answers={0: recorded})
    assert [one.call for one in again.asked] == ["6.score1"]
    assert again.asked[0].digest == first.asked[1].digest
    assert same.turns == trajectory.turns
    assert outcome.reward == 1.0


async def in_branches(episode: Episode) -> None:
    await episode.gather(*[lambda: episode.new_conversation().generate("a")] * 2)
    await episode.generate("b")
    episode.reward = 1.0


@pytest.mark.parametrize("agent", [multi_turn, in_branches])
def test_an_episode_that_waits_for_its_teacher_beyond_its_deadline_survives_its_worker(
    agent: Agent,
) -> None:
    first = Classroom()
    _, trajectory = play(first, agent)
    played = {one.call: first.answer(one) for one in first.requests() if one not in first.asked}
    heir = Classroom()
    outcome, same = play(heir, agent, answers={0: played}, left_s=-1.0)
    assert (outcome.ending, outcome.reward) == ("finished", 1.0)
    assert [one.call for one in heir.asked] == [one.call for one in first.asked]
    assert same.turns == trajectory.turns


def test_the_first_of_two_answers_counts_and_late_ones_change_nothing() -> None:
    world = Classroom()

    def twice(event: Event) -> None:
        assert world.run is not None
        if isinstance(event, GenerationRequested) and event.kind == "score":
            world.run.on_answer(scored(event, {}))
            world.run.on_answer(scored(event, {"logprobs": packed.pack_f32([-9.0] * 6)}))

    send = world.send

    async def sent(event: Event) -> Any:
        twice(event)
        return await send(event)

    world.send = sent  # type: ignore[method-assign]
    _, trajectory = play(world)
    assert teacher_logprobs(trajectory) == [[-1, -2], [-4, -5], [-7, -8]]
    assert world.run is not None
    world.run.on_answer(scored(world.asked[0], {}))


def test_a_task_may_be_cancelled_while_scores_are_out() -> None:
    world = Classroom(None)

    async def cancel(run: EpisodeRun) -> None:
        while not world.asked:
            await asyncio.sleep(0.01)
        run.cancel("enough")

    outcome, trajectory = play(world, meanwhile=cancel, answer_s=60.0)
    assert (outcome.ending, outcome.reward) == ("cancelled", None)
    assert outcome.failure is not None
    assert outcome.failure.message == "enough"
    assert len(trajectory.turns) == 3


async def without_reward(episode: Episode) -> None:
    await episode.generate("a")


async def endless(episode: Episode) -> None:
    while True:
        await episode.generate("a")


@pytest.mark.parametrize(
    ("agent", "submitted", "limits"),
    [
        (multi_turn, task(purpose="evaluate"), {}),
        (without_reward, task(), {}),
        (endless, task(max_turns=2), {"unfinished_reward": 0.0, "overlong": "mask"}),
    ],
    ids=["evaluated", "no reward", "masked"],
)
def test_nothing_is_scored_that_is_not_trained_on(
    agent: Agent, submitted: TaskSubmitted, limits: dict[str, Any]
) -> None:
    world = Classroom()
    play(world, agent, submitted, **limits)
    assert world.asked == []


def test_what_a_limit_cut_is_scored_if_it_counts() -> None:
    world = Classroom()
    outcome, trajectory = play(world, endless, task(max_turns=2), unfinished_reward=0.0)
    assert outcome.ending == "turn_limit"
    assert teacher_logprobs(trajectory) == [[-1, -2], [-4, -5]]
