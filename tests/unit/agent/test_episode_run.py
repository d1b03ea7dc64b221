"""One episode's run: attempts, limits, deadline, replay from recorded answers."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from headrace.errors import DependencyError, InfrastructureError, TooLarge
from headrace.schemas import packed
from headrace.schemas.events import (
    ActionRequested,
    Blob,
    EnvironmentUse,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    Failure,
    GenerationCompleted,
    GenerationRequested,
    ObservationRecorded,
    Ref,
    Sampling,
    TaskSubmitted,
    TrajectoryRecorded,
    Turn,
    Use,
)
from headrace.schemas.recipe.agent_settings import Agent as AgentSettings
from headrace.services.agent.agents import chat, multi_turn
from headrace.services.agent.episode import Agent, Episode
from headrace.services.agent.episode_run import EpisodeRun
from headrace.services.agent.records import AgentSetup
from headrace.services.agent.requests import meaning_of
from headrace.services.agent.turns import RecordedTurn, arrange
from headrace.services.base.clock import now_ms
from headrace.services.models.blobs import describe

TURNS = 3
LOST = Failure(origin="infrastructure", code="sandbox_lost", retryable=True)


def task(**changes: Any) -> TaskSubmitted:
    fields: dict[str, Any] = {
        "source": "test",
        "task_id": "1",
        "item_id": "1",
        "agent": "default",
        "environment": EnvironmentUse(use="default"),
        "roles": {"policy": Use(policy="default", sampling=Sampling(max_tokens=8))},
        "max_turns": 10,
        "max_tokens": 100,
        "deadline_s": 60,
    }
    return TaskSubmitted(**{**fields, **changes})


def start(submitted: TaskSubmitted, left_s: float = 60.0) -> EpisodeStarted:
    deadline = now_ms() + int(left_s * 1000)
    return EpisodeStarted(task=7, sample=2, submitted=submitted, seed=5, deadline=deadline)


class World:
    """Answers every request as a policy and an environment would, and keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[Event] = []
        self.run: EpisodeRun | None = None
        self.silent_after: int | None = None
        self.observed: Callable[[ActionRequested], dict[str, Any]] = lambda _: {}

    async def send(self, event: Event) -> Ref:
        self.sent.append(event)
        if self.silent_after is None or len(self.requests()) <= self.silent_after:
            answer = self.answer(event)
            if answer is not None:
                assert self.run is not None
                asyncio.get_running_loop().call_soon(self.run.on_answer, answer)
        return Ref(topic="t", partition=0, offset=len(self.sent), digest=bytes(16))

    def requests(self) -> list[GenerationRequested | ActionRequested]:
        return [e for e in self.sent if isinstance(e, GenerationRequested | ActionRequested)]

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.sent if type(event) is kind]

    def answer(self, event: Event) -> GenerationCompleted | ObservationRecorded | None:
        if isinstance(event, GenerationRequested):
            added = list(event.text.encode())
            return GenerationCompleted(
                task=event.task,
                sample=event.sample,
                attempt=event.attempt,
                call=event.call,
                digest=event.digest,
                policy=event.policy,
                worker="w",
                finish="stop",
                prompt_added=packed.pack_i32(added),
                tokens=packed.pack_i32([65, 66]),
                logprobs=packed.pack_f32([-0.5, -0.25]),
                versions=packed.pack_spans([3, 4]),
                text="AB",
            )
        if isinstance(event, ActionRequested) and event.kind != "close":
            done = event.index == TURNS
            fields = {
                "text": str(event.index),
                "reward": None if event.kind == "reset" else float(done),
                "terminated": done,
                **self.observed(event),
            }
            return ObservationRecorded(
                task=event.task,
                sample=event.sample,
                attempt=event.attempt,
                call=event.call,
                index=event.index,
                digest=event.digest,
                **fields,
            )
        return None


def end(
    world: World,
    submitted: TaskSubmitted | None = None,
    agent: Agent = multi_turn,
    *,
    left_s: float = 60.0,
    meanwhile: Callable[[EpisodeRun], Awaitable[None]] | None = None,
    answers: dict[int, dict[str, Any]] | None = None,
    score_s: dict[str, float] | None = None,
    bound_s: float = 5.0,
    untrained: Sequence[str] = (),
    **limits: Any,
) -> EpisodeEnded:
    """Runs an episode to its end; its outcome. `limits` are settings of its agent."""

    async def main() -> None:
        settings = AgentSettings.model_validate(limits)
        setup = AgentSetup(agent, {}, settings, {"default": "digest"}, score_s or {}, untrained)
        started = start(submitted or task(), left_s)
        world.run = EpisodeRun(world.send, started, 0.0, setup, answers or {})
        running = asyncio.create_task(world.run.run())
        if meanwhile is not None:
            await meanwhile(world.run)
        await asyncio.wait_for(running, bound_s)

    asyncio.run(main())
    (outcome,) = world.of(EpisodeEnded)
    assert isinstance(outcome, EpisodeEnded)
    return outcome


def play(world: World, *args: Any, **options: Any) -> tuple[EpisodeEnded, TrajectoryRecorded]:
    """As `end`, of an episode that has turns to tell: its outcome and its trajectory."""
    outcome = end(world, *args, **options)
    return outcome, world.of(TrajectoryRecorded)[0]


def test_an_agent_that_chats_appends_what_is_new_alone() -> None:
    world = World()
    outcome = end(world, task(options='{"system": "Be brief."}'), chat)
    assert outcome.reward == 1.0
    said = [json.loads(request.chat)["messages"] for request in world.of(GenerationRequested)]
    assert said == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "0"}],
        [{"role": "user", "content": "1"}],
        [{"role": "user", "content": "2"}],
    ]


def test_an_episode_is_recorded_whole() -> None:
    world = World()
    outcome, trajectory = play(world)

    assert (outcome.ending, outcome.reward, outcome.attempts) == ("finished", 1.0, 1)
    assert [turn.parent for turn in trajectory.turns] == [-1, 0, 1]
    assert [packed.unpack_i32(t.context) for t in trajectory.turns] == [[48], [49], [50]]
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 1.0]
    use = outcome.policies[0]
    assert (use.tokens, use.longest, use.oldest_version) == (6, 9, 3)
    kinds = [event.kind for event in world.of(ActionRequested)]
    assert kinds == ["reset", "step", "step", "step", "close"]
    order = [type(event) for event in world.sent[-3:]]
    assert order == [ActionRequested, TrajectoryRecorded, EpisodeEnded]


class Taught(World):
    """Whose workers say what they are told to, without logprobs and versions."""

    def answer(self, event: Event) -> Any:
        found = super().answer(event)
        if not isinstance(event, GenerationRequested) or event.demonstration is None:
            return found
        assert found is not None
        tokens = packed.pack_i32(list(event.demonstration.encode()))
        said = {"text": event.demonstration, "tokens": tokens, "logprobs": b"", "versions": b""}
        return found.model_copy(update=said)


async def half_taught(episode: Episode) -> None:
    """Shows the first turn, and leaves the others to the policy."""
    observation = await episode.reset()
    said: str | None = "xyz"
    while not observation.done:
        generation = await episode.generate(observation.text, demonstration=said)
        observation, said = await episode.step(generation.text), None


async def teacher(episode: Episode) -> None:
    """Shows all of it."""
    observation = await episode.reset()
    while not observation.done:
        generation = await episode.chat([{"role": "user", "content": "?"}], demonstration="x")
        observation = await episode.step(generation.text)


def test_what_is_demonstrated_is_a_turn_that_no_version_drew() -> None:
    world = Taught()
    outcome, trajectory = play(world, agent=half_taught)
    assert [turn.demonstrated for turn in trajectory.turns] == [True, False, False]
    assert [packed.count(turn.tokens) for turn in trajectory.turns] == [3, 2, 2]
    (use,) = outcome.policies
    assert (use.tokens, use.oldest_version) == (7, 3)
    steps = [json.loads(one.payload) for one in world.of(ActionRequested) if one.kind == "step"]
    assert [step["action"] for step in steps] == ["xyz", "AB", "AB"]

    (use,) = end(Taught(), agent=teacher).policies
    assert (use.tokens, use.oldest_version) == (3, -1)


def test_a_worker_that_knows_no_demonstrations_is_found_out() -> None:
    outcome, _ = play(World(), task(attempts=1), half_taught)
    assert outcome.failure is not None
    assert "too old" in outcome.failure.message


def test_a_request_means_what_it_must_say_and_how() -> None:
    """Of the same text: drawn, demonstrated, by a schema, and by messages."""
    asks: list[dict[str, Any]] = [
        {},
        {"demonstration": ""},
        {"demonstration": "x"},
        {"json_schema": {}},
        {"json_schema": {"type": "object"}},
    ]
    meanings = set()
    for ask in asks:

        async def once(episode: Episode, ask: dict[str, Any] = ask) -> None:
            await episode.generate("1", **ask)

        world = Taught()
        end(world, task(attempts=1), once)
        (request,) = world.of(GenerationRequested)
        meanings.add(request.digest)
        told = request.sampling.json_schema
        assert told == (json.dumps(ask["json_schema"]) if "json_schema" in ask else "")
    assert len(meanings) == len(asks)


def test_contexts_are_token_ids_that_only_grow() -> None:
    world = World()
    play(world)
    prompts = [packed.unpack_i32(prompt.tokens) for prompt in world.of(GenerationRequested)]
    assert prompts == [[], [48, 65, 66], [48, 65, 66, 49, 65, 66]]


def test_an_episode_of_a_lost_worker_goes_on_where_its_answers_end() -> None:
    first = World()
    play(first)
    requests = first.requests()
    recorded: dict[str, Any] = {request.call: first.answer(request) for request in requests[:4]}

    second = World()
    outcome, trajectory = play(second, answers={0: recorded})

    assert [e.event_id for e in second.requests()] == [e.event_id for e in requests[4:]]
    assert outcome.reward == 1.0
    assert trajectory.turns == first.of(TrajectoryRecorded)[0].turns


def test_an_answer_with_another_meaning_starts_a_new_attempt() -> None:
    first = World()
    play(first)
    reset = first.answer(first.requests()[0])
    assert isinstance(reset, ObservationRecorded)
    foreign = reset.model_copy(update={"digest": b"x" * 16})

    world = World()
    outcome, trajectory = play(world, answers={0: {foreign.call: foreign}})
    assert (outcome.ending, outcome.attempt, outcome.attempts) == ("finished", 1, 2)
    assert [failure.code for failure in trajectory.failures] == ["diverged"]


def test_infrastructure_failures_use_up_attempts_and_are_no_reward() -> None:
    world = World()
    world.observed = lambda action: {"failure": LOST} if action.index == 2 else {}
    outcome, trajectory = play(world, task(attempts=2))
    assert (outcome.ending, outcome.reward, outcome.attempts) == ("failed", None, 2)
    assert outcome.failure == LOST
    assert len(trajectory.failures) == 2
    assert [close.attempt for close in world.of(ActionRequested) if close.kind == "close"] == [0, 1]


def test_a_failure_that_passes_is_retried() -> None:
    world = World()
    world.observed = lambda action: {"failure": LOST} if action.attempt == 0 else {}
    outcome, _ = play(world)
    assert (outcome.ending, outcome.reward, outcome.attempt) == ("finished", 1.0, 1)


def test_limits_are_endings_with_the_recipes_reward() -> None:
    outcome, trajectory = play(World(), task(max_turns=2), unfinished_reward=-0.5)
    assert (outcome.ending, outcome.reward, len(trajectory.turns)) == ("turn_limit", -0.5, 2)
    outcome, _ = play(World(), task(max_tokens=4))
    assert (outcome.ending, outcome.reward) == ("token_limit", 0.0)


def test_requests_ask_for_the_version_that_the_start_names() -> None:
    def minima(submitted: TaskSubmitted, agent: Agent = multi_turn) -> set[int]:
        world = World()

        async def main() -> None:
            started = start(submitted).model_copy(update={"versions": {"default": 6}})
            setup = AgentSetup(agent, {}, AgentSettings(), {"default": "digest"})
            world.run = EpisodeRun(world.send, started, 0.0, setup, {})
            await asyncio.wait_for(world.run.run(), 5)

        asyncio.run(main())
        return {one.minimum for one in world.of(GenerationRequested)}

    async def teacher(episode: Episode) -> None:
        await episode.generate("a", demonstration="b")

    assert minima(task()) == {6}
    pinned = Use(policy="default", version=4, sampling=Sampling(max_tokens=8))
    assert minima(task(roles={"policy": pinned})) == {0}
    assert minima(task(), teacher) == {0}


class FullContext(World):
    """The model's context is full after so many turns. `drawn` are the tokens of the last one."""

    def __init__(self, turns: int, drawn: int) -> None:
        super().__init__()
        self.turns = turns
        self.drawn = drawn

    def answer(self, event: Event) -> GenerationCompleted | ObservationRecorded | None:
        answer = super().answer(event)
        if (
            isinstance(answer, GenerationCompleted)
            and len(self.of(GenerationRequested)) > self.turns
        ):
            some = range(self.drawn)
            changes: dict[str, Any] = {
                "finish": "overflow",
                "tokens": packed.pack_i32([67 for _ in some]),
                "logprobs": packed.pack_f32([-0.5 for _ in some]),
                "versions": packed.pack_spans([4 for _ in some]),
                "text": "C" * self.drawn,
            }
            answer = answer.model_copy(update=changes)
        return answer


def test_the_turn_that_fills_the_context_is_recorded() -> None:
    """A penalty must reach the tokens that caused it, even if they are the only ones."""
    for turns in (0, 1):
        outcome, trajectory = play(FullContext(turns, drawn=3), unfinished_reward=-1.0)
        assert (outcome.ending, outcome.reward, len(trajectory.turns)) == (
            "overflow",
            -1.0,
            turns + 1,
        )
        last = trajectory.turns[-1]
        assert (last.finish, packed.count(last.tokens)) == ("overflow", 3)
        assert packed.count(last.logprobs) == 3
        assert outcome.policies[0].tokens == 2 * turns + 3
        assert outcome.policies[0].oldest_version >= 3


def test_a_prompt_that_is_too_long_has_nothing_to_record() -> None:
    outcome, trajectory = play(FullContext(1, drawn=0), unfinished_reward=-1.0)
    assert (outcome.ending, outcome.reward, len(trajectory.turns)) == ("overflow", -1.0, 1)


def test_an_episode_that_a_limit_cut_can_be_masked() -> None:
    outcome, _ = play(World(), task(max_turns=2), unfinished_reward=-0.5, overlong="mask")
    assert (outcome.reward, outcome.masked) == (-0.5, True)
    assert not play(World(), task(max_turns=2), unfinished_reward=-0.5)[0].masked
    assert not play(World(), overlong="mask")[0].masked


def test_an_answer_that_the_recipe_cut_is_overlong_and_one_that_the_agent_cut_is_not() -> None:
    class Cut(World):
        def answer(self, event: Event) -> GenerationCompleted | ObservationRecorded | None:
            answer = super().answer(event)
            cut = isinstance(event, GenerationRequested) and event.sampling.max_tokens <= 2
            return answer.model_copy(update={"finish": "length"}) if cut and answer else answer

    def asking(*most: int | None) -> Agent:
        async def agent(episode: Episode) -> None:
            for limit in most:
                await episode.generate("a", max_tokens=limit)
            episode.reward = 1.0

        return agent

    def masked(agent: Agent, **limits: Any) -> bool:
        return play(Cut(), task(**limits), agent, overlong="mask")[0].masked

    assert masked(asking(None), max_tokens=2)
    assert masked(asking(None, None), max_tokens=4)
    assert not masked(asking(2))
    assert not masked(asking(2, None), max_tokens=20)


def test_what_a_policy_without_training_says_costs_nobody_a_reward() -> None:
    """A simulated user talks as much as the policy, and its last answer is cut."""

    class Talkative(World):
        def answer(self, event: Event) -> GenerationCompleted | ObservationRecorded | None:
            answer = super().answer(event)
            cut = isinstance(event, GenerationRequested) and event.policy == "user"
            return answer.model_copy(update={"finish": "length"}) if cut and answer else answer

    async def both(episode: Episode) -> None:
        await episode.generate("a")
        await episode.conversation("user").generate("b")
        episode.reward = 1.0

    def played(*untrained: str) -> EpisodeEnded:
        """Each policy samples 2 tokens."""
        limits = {"overlong_buffer": 2, "overlong_penalty": 1.0, "overlong": "mask"}
        roles = {
            role: Use(policy=policy, sampling=Sampling(max_tokens=2))
            for role, policy in (("policy", "default"), ("user", "user"))
        }
        submitted = task(roles=roles, max_tokens=4)
        return play(Talkative(), submitted, both, untrained=untrained, **limits)[0]

    assert (played().reward, played().masked) == (0.0, True)
    assert (played("user").reward, played("user").masked) == (1.0, False)


def test_length_is_penalised_within_the_buffer_alone() -> None:
    """DAPO's equation 13: nothing below the buffer, then linear, and everything beyond."""
    length = {"overlong_buffer": 4, "overlong_penalty": 2.0}
    for most, reward in ((10, 1.0), (9, 0.5), (8, 0.0), (6, -1.0)):  # 6 tokens are sampled
        outcome, trajectory = play(World(), task(max_tokens=most), **length)
        assert (outcome.ending, outcome.reward) == ("finished", reward)
        assert trajectory.reward == reward
        assert outcome.rewards.get("overlong", 0.0) == reward - 1.0
    outcome, _ = play(FullContext(0, drawn=1), unfinished_reward=0.0, **length)
    assert outcome.reward == -2.0
    outcome, _ = play(World(), task(max_tokens=6, purpose="evaluate"), **length)
    assert outcome.reward == 1.0


def test_the_deadline_can_count_as_unfinished() -> None:
    for settings, reward in (({"unfinished_reward": -1.0}, -1.0), ({}, 0.0)):
        world = World()
        world.silent_after = 4
        whole = task(deadline_s=1)
        outcome, trajectory = play(world, whole, left_s=1.0, timeouts="unfinished", **settings)
        assert (outcome.ending, outcome.reward, outcome.failure) == ("deadline", reward, None)
        assert len(trajectory.turns) == 2


def test_a_deadline_is_excluded_if_the_policy_did_not_have_the_whole_time() -> None:
    counted: dict[str, Any] = {"timeouts": "unfinished", "unfinished_reward": -1.0}
    world = World()
    world.silent_after = 4
    late = end(world, task(deadline_s=60), left_s=0.1, **counted)
    assert (late.ending, late.reward, late.failure is None) == ("deadline", None, False)

    first = World()
    play(first)
    recorded = [first.answer(one) for one in first.requests()[:2]]
    answers = {0: {one.call: one for one in recorded if one is not None}}
    heir = World()
    heir.silent_after = 0
    taken = end(heir, task(deadline_s=1), left_s=1.0, answers=answers, **counted)
    assert (taken.ending, taken.reward, taken.failure is None) == ("deadline", None, False)


def test_a_deadline_after_a_failed_attempt_is_excluded() -> None:
    """The policy did not have the whole time."""

    class Late(World):
        async def send(self, event: Event) -> Ref:
            if isinstance(event, GenerationRequested) and event.attempt == 1:
                self.silent_after = 0
            return await super().send(event)

    world = Late()
    world.observed = lambda action: {"failure": LOST} if action.attempt == 0 else {}
    whole = task(deadline_s=1)
    outcome, _ = play(world, whole, left_s=1.0, timeouts="unfinished", unfinished_reward=-1.0)
    assert (outcome.ending, outcome.attempt, outcome.reward) == ("deadline", 1, None)
    assert outcome.failure is not None


SLOW = Failure(origin="environment", code="step_timeout", retryable=True)


def play_slow(slow_action: int, slow_attempts: int = 2, **settings: Any) -> EpisodeEnded:
    """Plays an episode of two attempts whose environment takes too long in one action."""
    world = World()

    def observed(action: ActionRequested) -> dict[str, Any]:
        late = action.index == slow_action and action.attempt < slow_attempts
        return {"failure": SLOW} if late else {}

    world.observed = observed
    outcome, _ = play(world, task(attempts=2), unfinished_reward=-1.0, **settings)
    return outcome


def test_a_step_that_takes_too_long_is_retried_then_excluded() -> None:
    excluded = play_slow(2)
    assert (excluded.ending, excluded.reward, excluded.failure) == ("failed", None, SLOW)
    assert excluded.attempts == 2


def test_a_policy_gets_no_second_try_if_its_step_timeouts_count() -> None:
    for slow_attempts in (1, 2):
        counted = play_slow(2, slow_attempts, timeouts="unfinished")
        assert (counted.ending, counted.reward, counted.failure) == ("step_timeout", -1.0, None)
        assert counted.attempts == 1


def test_a_reset_that_takes_too_long_is_never_the_fault_of_the_policy() -> None:
    assert play_slow(0, 1, timeouts="unfinished").ending == "finished"
    excluded = play_slow(0, timeouts="unfinished")
    assert (excluded.ending, excluded.reward, excluded.failure) == ("failed", None, SLOW)


async def strict(episode: Episode) -> None:
    """Plays one turn, and raises because the answer is no number."""
    observation = await episode.reset()
    generation = await episode.generate(observation.text)
    episode.reward = float(generation.text)


def test_an_exception_in_an_agents_code_is_retried_then_excluded() -> None:
    outcome, trajectory = play(World(), task(attempts=2), strict, unfinished_reward=-1.0)
    assert (outcome.ending, outcome.reward, outcome.attempts) == ("failed", None, 2)
    assert [one.code for one in trajectory.failures] == ["agent_error", "agent_error"]


def test_an_exception_counts_at_once_if_the_recipe_says_so() -> None:
    settings: dict[str, Any] = {"exceptions": "unfinished", "unfinished_reward": -1.0}
    outcome, trajectory = play(World(), task(attempts=2), strict, **settings)
    assert (outcome.ending, outcome.reward, outcome.failure) == ("exception", -1.0, None)
    assert (outcome.attempts, len(trajectory.turns)) == (1, 1)
    (failure,) = trajectory.failures
    assert "could not convert string to float: 'AB'" in failure.message

    raised = Failure(origin="environment", code="environment_error", retryable=True)
    world = World()
    world.observed = lambda action: {"failure": raised} if action.index == 2 else {}
    outcome, _ = play(world, task(attempts=2), **settings)
    assert (outcome.ending, outcome.reward, outcome.attempts) == ("exception", -1.0, 1)


def test_an_exception_before_the_first_turn_never_counts() -> None:
    async def broken(episode: Episode) -> None:
        await episode.reset()
        raise RuntimeError("no turn yet")

    settings: dict[str, Any] = {"exceptions": "unfinished", "unfinished_reward": -1.0}
    outcome = end(World(), task(attempts=2), broken, **settings)
    assert (outcome.ending, outcome.reward, outcome.attempts) == ("failed", None, 2)
    lost = Failure(origin="infrastructure", code="worker_lost", retryable=True)
    world = World()
    world.observed = lambda action: {"failure": lost} if action.index == 2 else {}
    assert play(world, **settings)[0].ending == "failed"


@pytest.mark.parametrize("grouped", [False, True])
def test_an_engine_that_fails_an_agent_never_counts_against_the_policy(grouped: bool) -> None:
    async def fails() -> None:
        raise InfrastructureError("engine_silent", "no answer in 60 s")

    async def contained(episode: Episode) -> None:
        await episode.generate("a")
        if not grouped:
            await fails()
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())

    settings: dict[str, Any] = {"exceptions": "unfinished", "unfinished_reward": -1.0}
    outcome, _ = play(World(), task(attempts=2), contained, **settings)
    assert (outcome.ending, outcome.reward, outcome.attempts) == ("failed", None, 2)
    assert outcome.failure is not None
    assert (outcome.failure.origin, outcome.failure.code) == ("infrastructure", "engine_silent")


@pytest.mark.parametrize("most", [0, -3])
def test_an_answer_of_no_tokens_can_not_be_asked_for(most: int) -> None:
    async def asks(episode: Episode) -> None:
        with pytest.raises(ValueError, match=f"max_tokens is {most}, but an answer has"):
            await episode.generate("a", max_tokens=most)
        with pytest.raises(ValueError, match=f"max_tokens is {most}"):
            await episode.chat([{"role": "user", "content": "a"}], max_tokens=most)
        await episode.generate("a", max_tokens=1)

    world = World()
    outcome = end(world, task(), asks)
    assert outcome.ending == "finished"
    assert [one.sampling.max_tokens for one in world.of(GenerationRequested)] == [1]


def test_turns_with_samplings_of_their_own_are_arranged_in_linear_time() -> None:
    """Each turn near the end of an episode's tokens may have a limit of its own."""

    def arranged(count: int) -> float:
        recorded = {
            str(number): RecordedTurn(
                Turn(
                    call=str(number), policy="p", role="policy", context=b"", tokens=b"",
                    logprobs=b"", versions=b"", kv="fresh", finish="stop", text="",
                ),
                None, 1, 0, Sampling(max_tokens=1 + number // 2),
            )
            for number in range(1, count + 1)
        }  # fmt: skip
        began = time.process_time()
        turns, samplings = arrange(recorded)
        took = time.process_time() - began
        assert [one.sampling for one in turns[:4]] == [0, 1, 1, 2]
        assert [samplings[one.sampling].max_tokens for one in turns[:4]] == [1, 2, 2, 3]
        return took

    assert arranged(4000) < 1.0  # 50 s if each sampling is compared with all others


async def in_a_task_group(episode: Episode) -> None:
    await episode.reset()
    await episode.generate("a")
    async with asyncio.TaskGroup() as group:
        group.create_task(episode.generate("b"))


def test_what_ends_an_episode_counts_as_itself_inside_a_task_group() -> None:
    settings: dict[str, Any] = {"exceptions": "unfinished", "unfinished_reward": -1.0}
    limited = end(World(), task(max_turns=1), in_a_task_group, **settings)
    assert (limited.ending, limited.reward) == ("turn_limit", -1.0)
    world = World()
    answer = world.answer

    def failing(event: Event) -> Any:
        lost = isinstance(event, GenerationRequested) and event.text == "b"
        change = {"failure": LOST} if lost else {}
        return found.model_copy(update=change) if (found := answer(event)) is not None else None

    world.answer = failing  # type: ignore[method-assign]
    outcome = end(world, task(attempts=2), in_a_task_group, **settings)
    assert (outcome.ending, outcome.reward, outcome.attempts) == ("failed", None, 2)
    assert outcome.failure == LOST


def test_an_episode_gains_nothing_by_running_into_a_limit() -> None:
    for unfinished_reward, reward in ((0.0, -2.0), (-5.0, -5.0)):
        world = World()
        world.observed = lambda action: {"reward": -1.0} if action.kind == "step" else {}
        outcome, _ = play(world, task(max_turns=2), unfinished_reward=unfinished_reward)
        assert (outcome.ending, outcome.reward) == ("turn_limit", reward)


def test_after_the_deadline_an_heir_asks_nothing_new() -> None:
    first = World()
    play(first)
    recorded: dict[str, Any] = {one.call: first.answer(one) for one in first.requests()[:3]}
    heir = World()
    outcome, trajectory = play(heir, answers={0: recorded}, left_s=-1.0, bound_s=2.0)
    assert (outcome.ending, outcome.reward) == ("deadline", None)
    assert len(trajectory.turns) == 1
    assert [one.kind for one in heir.requests()] == ["close"]


def test_the_deadline_ends_an_episode_that_waits() -> None:
    world = World()
    world.silent_after = 2
    outcome, trajectory = play(world, left_s=0.1)
    assert (outcome.ending, outcome.reward) == ("deadline", None)
    assert outcome.failure is not None
    assert outcome.failure.origin == "infrastructure"
    assert len(trajectory.turns) == 1


def test_a_higher_attempt_in_the_log_moves_the_run() -> None:
    world = World()
    world.silent_after = 1

    async def higher(run: EpisodeRun) -> None:
        while not world.requests():
            await asyncio.sleep(0)
        world.silent_after = None
        answer = world.answer(world.requests()[0])
        assert answer is not None
        run.on_answer(answer.model_copy(update={"attempt": 2}))

    outcome, trajectory = play(world, meanwhile=higher)
    assert (outcome.ending, outcome.attempt) == ("finished", 2)
    assert trajectory.attempt == 2
    closed, *others = world.requests()[1:]
    assert isinstance(closed, ActionRequested)
    assert (closed.kind, closed.attempt) == ("close", 0)
    assert {request.attempt for request in others} == {2}


def test_what_was_played_is_told_as_its_own_attempt_whatever_comes_in_the_end() -> None:
    class Late(World):
        async def send(self, event: Event) -> Ref:
            if isinstance(event, TrajectoryRecorded):
                answer = self.answer(self.of(GenerationRequested)[0])
                assert answer is not None
                assert self.run is not None
                self.run.on_answer(answer.model_copy(update={"attempt": 1}))
            return await super().send(event)

    outcome, trajectory = play(Late())
    assert (outcome.attempt, outcome.attempts) == (trajectory.attempt, 1) == (0, 1)


def test_an_agent_that_outlives_its_attempt_asks_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.services.agent.episode_run.AGENT_CLOSE_S", 0.05)
    world = World()
    tries: list[asyncio.Event] = []
    late = asyncio.Event()
    refused: list[str] = []

    async def stubborn(episode: Episode) -> None:
        tries.append(asyncio.Event())
        first = len(tries) == 1
        try:
            await episode.generate("a")
        except asyncio.CancelledError:
            await late.wait()
        if not first:
            late.set()  # the one before asks for its call 2, while this one waits for its own
        try:
            await episode.generate("b")
        except BaseException as error:
            refused.append(type(error).__name__)
            raise

    async def move(run: EpisodeRun) -> None:
        world.silent_after = 0
        while not world.requests():
            await asyncio.sleep(0.01)
        world.silent_after = None
        (request,) = world.of(GenerationRequested)
        answer = world.answer(request.model_copy(update={"attempt": 1}))
        assert answer is not None
        run.on_answer(answer)

    outcome, trajectory = play(world, agent=stubborn, meanwhile=move)
    assert (outcome.ending, len(trajectory.turns)) == ("finished", 2)
    assert [(one.attempt, one.call) for one in world.of(GenerationRequested)] == [
        (0, "1"),
        (1, "2"),
    ]
    assert refused == ["AttemptFailed"]


def test_cancelling_ends_without_reward() -> None:
    world = World()
    world.silent_after = 0

    async def cancel(run: EpisodeRun) -> None:
        await asyncio.sleep(0)
        run.cancel("enough")
        run.cancel("again")

    outcome, _ = play(world, meanwhile=cancel)
    assert (outcome.ending, outcome.reward) == ("cancelled", None)
    assert outcome.failure is not None
    assert (outcome.failure.code, outcome.failure.message) == ("cancelled", "enough")


def test_what_a_cancelled_agent_raises_is_not_complained_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    world.silent_after = 0

    async def broken(episode: Episode) -> None:
        try:
            await episode.reset()
        finally:
            raise ZeroDivisionError("oops")

    async def cancel(run: EpisodeRun) -> None:
        await asyncio.sleep(0)
        run.cancel("enough")

    outcome, _ = play(world, task(), broken, meanwhile=cancel)
    assert outcome.ending == "cancelled"
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_an_episode_cancelled_between_two_attempts_tells_the_turns_of_neither() -> None:
    class Between(World):
        async def send(self, event: Event) -> Ref:
            if isinstance(event, ActionRequested) and event.kind == "close":
                assert self.run is not None
                self.run.cancel("enough")
            return await super().send(event)

    world = Between()
    world.observed = lambda action: {"failure": LOST} if action.index == 2 else {}
    outcome = end(world)
    assert (outcome.ending, outcome.attempt) == ("cancelled", 1)
    assert (outcome.trajectory, outcome.policies) == (None, ())
    assert world.of(TrajectoryRecorded) == []


def test_an_agents_bug_is_no_reward() -> None:
    async def broken(episode: Episode) -> None:
        await episode.reset()
        raise ZeroDivisionError("oops")

    outcome, _ = play(World(), task(attempts=1), broken)
    assert outcome.failure is not None
    assert (outcome.ending, outcome.reward, outcome.failure.code) == ("failed", None, "agent_error")
    assert outcome.failure.origin == "agent"
    assert "oops" in outcome.failure.message


class Odd(BaseException):
    """No Exception: agents' code should not raise one, and may."""


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt(), Odd()])
@pytest.mark.parametrize("gathered", [False, True])
def test_an_agent_that_exits_ends_its_episode_alone(raised: BaseException, gathered: bool) -> None:
    async def exiting(episode: Episode) -> None:
        async def leave() -> None:
            await episode.reset()
            raise raised

        await (episode.gather(leave) if gathered else leave())

    outcome, _ = play(World(), task(attempts=1), exiting)
    assert outcome.failure is not None
    assert (outcome.ending, outcome.failure.code) == ("failed", "agent_error")
    assert type(raised).__name__ in outcome.failure.message


def test_a_log_out_of_reach_is_not_taken_for_the_agents_bug() -> None:
    class Away(World):
        async def send(self, event: Event) -> Ref:
            if isinstance(event, GenerationRequested):
                raise DependencyError("the log is away")
            return await super().send(event)

    async def stubborn(episode: Episode) -> None:
        with suppress(Exception):
            await multi_turn(episode)

    world = Away()
    with pytest.raises(DependencyError, match="the log is away"):
        play(world, agent=stubborn)
    assert [type(event) for event in world.sent] == [ActionRequested]  # the reset, and no end


def test_parallel_calls_have_paths_that_replay() -> None:
    async def forked(episode: Episode) -> None:
        await episode.reset()
        await episode.generate("a")
        one, two = episode.conversation().fork(), episode.conversation().fork()
        await episode.gather(lambda: one.generate("b"), lambda: two.generate("c"))
        await episode.generate("d")

    world = World()
    _, trajectory = play(world, agent=forked)
    assert [turn.call for turn in trajectory.turns] == ["2", "3.1.1", "3.2.1", "4"]
    assert [turn.parent for turn in trajectory.turns] == [-1, 0, 0, 0]


def test_options_and_payload_reach_the_agent() -> None:
    seen: dict[str, Any] = {}

    async def curious(episode: Episode) -> None:
        seen.update(episode.task.payload, random=episode.random.random())
        await episode.reset()

    submitted = task(payload=json.dumps({"question": "?"}))
    play(World(), submitted, curious)
    first = dict(seen)
    play(World(), submitted, curious)
    assert first == seen
    assert first["question"] == "?"


def test_a_cancellation_that_the_agents_code_leaks_is_its_bug() -> None:
    async def leaking(episode: Episode) -> None:
        await episode.reset()
        raise asyncio.CancelledError

    outcome, _ = play(World(), task(attempts=2), leaking)
    assert outcome.failure is not None
    assert (outcome.ending, outcome.attempts) == ("failed", 2)
    assert outcome.failure.code == "agent_error"


def test_a_trajectory_that_no_record_can_hold_ends_its_episode_as_failed() -> None:
    class Narrow(World):
        async def send(self, event: Event) -> Ref:
            ref = await super().send(event)
            if isinstance(event, TrajectoryRecorded):
                raise TooLarge("9,000,000 bytes")
            return ref

    outcome, _ = play(Narrow())
    assert (outcome.ending, outcome.trajectory, outcome.reward) == ("failed", None, None)
    assert outcome.failure is not None
    assert outcome.failure.code == "too_large"


def test_an_outcome_that_no_record_can_hold_is_written_without_its_details() -> None:
    class Narrow(World):
        async def send(self, event: Event) -> Ref:
            if isinstance(event, EpisodeEnded) and event.rewards:
                raise TooLarge("9,000,000 bytes")
            return await super().send(event)

    async def rewarded(episode: Episode) -> None:
        await episode.generate("?")
        episode.reward = 0.5
        episode.rewards["form"] = 1.0

    outcome, trajectory = play(Narrow(), agent=rewarded)
    assert (outcome.ending, outcome.reward, outcome.rewards) == ("finished", 0.5, {})
    assert (outcome.policies[0].tokens, trajectory.rewards) == (2, {"form": 1.0})


@pytest.mark.parametrize("names", [["x" * 129], [str(number) for number in range(257)]])
def test_too_many_or_too_long_names_of_rewards_fail_the_attempt(names: list[str]) -> None:
    async def naming(episode: Episode) -> None:
        episode.rewards.update(dict.fromkeys(names, 1.0))

    outcome = end(World(), task(attempts=1), naming)
    assert outcome.failure is not None
    assert (outcome.ending, outcome.failure.code) == ("failed", "agent_error")
    assert "the named rewards of the episode have" in outcome.failure.message


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


WRONG_METRICS: list[Any] = [
    {"stage": "parse"}, {3: 1.0}, {"a": 10**400}, {"\ud83d": 1.0}, {"a": None}, None, [1.0],
]  # fmt: skip


@pytest.mark.parametrize("ending", ["finished", "failed", "deadline"])
@pytest.mark.parametrize("metrics", WRONG_METRICS)
def test_metrics_that_no_record_can_hold_end_no_worker(metrics: Any, ending: str) -> None:
    async def wrong(episode: Episode) -> None:
        episode.metrics = metrics
        if ending == "failed":
            raise ValueError("of something else")
        if ending == "deadline":
            await asyncio.sleep(60)

    outcome = end(World(), task(attempts=1), wrong, left_s=0.1 if ending == "deadline" else 60)
    assert outcome.ending == ("deadline" if ending == "deadline" else "failed")
    assert outcome.failure is not None
    if ending == "finished":
        assert "the named metrics of the episode have" in outcome.failure.message


@pytest.mark.parametrize(
    "error", [ValueError("a \ud83d"), Unspeakable()], ids=["half a character", "no message"]
)
def test_an_exception_whose_message_no_record_can_hold_fails_its_own_attempt(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)  # pytest-xdist can't send half a character

    async def wrong(episode: Episode) -> None:
        raise error

    outcome = end(World(), task(attempts=1), wrong)
    assert outcome.failure is not None
    message = {ValueError: "ValueError: a ?", Unspeakable: "Unspeakable: its message raises"}
    assert outcome.failure.message.startswith(message[type(error)])
    outcome.failure.message.encode()


def test_a_request_that_no_record_can_hold_is_not_tried_again() -> None:
    class Narrow(World):
        async def send(self, event: Event) -> Ref:
            if isinstance(event, GenerationRequested):
                raise TooLarge("9,000,000 bytes")
            return await super().send(event)

    outcome, _ = play(Narrow())
    assert outcome.failure is not None
    assert (outcome.failure.code, outcome.attempts) == ("too_large", 1)


async def judged(episode: Episode) -> None:
    """Has two judgements at the same time make its reward."""
    await episode.generate("?")
    scores = await episode.gather(
        lambda: episode.score("judge", {"of": 1}), lambda: episode.score("judge", {"of": 2})
    )
    episode.reward = max(scores)


def scores(*given: float | None) -> Callable[[ActionRequested], dict[str, Any]]:
    """Answers of a judge: what the call that ends so is given."""
    return lambda action: {"reward": given[int(action.call[2]) - 1]}


def test_a_score_is_what_the_agent_makes_of_it_and_is_recorded_under_the_judges_name() -> None:
    world = World()
    world.observed = scores(0.1, 0.2)
    outcome, trajectory = play(world, agent=judged)
    assert (outcome.ending, outcome.reward) == ("finished", 0.2)
    assert trajectory.rewards == outcome.rewards == {"judge": pytest.approx(0.3)}
    assert [turn.reward for turn in trajectory.turns] == [None]
    assert {event.kind for event in world.of(ActionRequested)} == {"score"}  # nothing to close

    recorded: dict[str, Any] = {ask.call: world.answer(ask) for ask in world.requests()}
    again = World()
    assert end(again, agent=judged, answers={0: recorded}).rewards == outcome.rewards
    assert again.requests() == []


def test_the_rewards_of_steps_are_added_without_rounding_in_between() -> None:
    async def walk(episode: Episode) -> None:
        await episode.generate("?")
        await episode.reset()
        for _ in range(10):
            await episode.step("on")

    world = World()
    world.observed = lambda action: {"reward": 0.1} if action.kind == "step" else {}
    assert end(world, agent=walk).reward == 1.0


@pytest.mark.parametrize("given", [None, float("nan"), float("inf")])
def test_a_judge_without_a_score_is_no_reward(given: float | None) -> None:
    world = World()
    world.observed = scores(1.0, given)
    outcome = end(world, task(attempts=2), judged)
    assert (outcome.ending, outcome.reward, outcome.attempts) == ("failed", None, 2)
    assert outcome.failure is not None
    assert outcome.failure.origin == "infrastructure"
    assert "'judge' answered without a score" in outcome.failure.message


def test_an_exception_of_a_judge_never_counts_against_the_policy() -> None:
    async def judged(episode: Episode) -> None:
        await episode.generate("a")
        await episode.score("judge", {})

    raised = Failure(origin="environment", code="environment_error", retryable=True)
    world = World()
    world.observed = lambda action: {"failure": raised}
    outcome = end(world, task(attempts=2), judged, exceptions="unfinished")
    assert (outcome.ending, outcome.reward, outcome.attempts) == ("failed", None, 2)
    assert outcome.failure is not None
    assert outcome.failure.code == "judge_error"


def test_a_judge_that_stays_silent_is_an_infrastructure_failure() -> None:
    class Silent(World):
        def answer(self, event: Event) -> GenerationCompleted | ObservationRecorded | None:
            return super().answer(event) if isinstance(event, GenerationRequested) else None

    world = Silent()
    outcome = end(world, task(attempts=2), judged, score_s={"judge": 0.01})
    assert (outcome.ending, outcome.reward, outcome.attempts) == ("failed", None, 2)
    assert outcome.failure is not None
    assert (outcome.failure.origin, outcome.failure.code) == ("infrastructure", "judge_silent")
    asked = world.of(ActionRequested)
    assert len(asked) >= 2
    assert all(event.expires_at < time.time() * 1000 for event in asked)


COLLECTING = EnvironmentUse(use="default", collect=("out/*",))


def a_file(name: str, content: bytes = b"x") -> Blob:
    return describe(content, "").model_copy(update={"name": name})


def test_the_files_of_an_attempt_are_in_its_trajectory_and_outcome() -> None:
    world = World()
    given: dict[str, dict[str, Any]] = {
        "step": {"artifacts": (a_file("log"), a_file("out/a", b"old"))},
        "collect": {"artifacts": (a_file("out/a", b"new"),), "reward": None, "terminated": False},
    }
    world.observed = lambda action: given.get(action.kind, {})
    submitted = task(environment=COLLECTING, labels={"exp": "7", "curation.state": "{}"})
    outcome, trajectory = play(world, submitted)
    kinds = [event.kind for event in world.of(ActionRequested)]
    assert kinds == ["reset", "step", "step", "step", "collect", "close"]
    actions = world.of(ActionRequested)
    assert [action.index for action in actions] == [0, 1, 2, 3, 4, 5]
    assert outcome.artifacts == (a_file("log"), a_file("out/a", b"new"))
    assert trajectory.artifacts == outcome.artifacts
    assert outcome.labels == trajectory.labels == {"exp": "7"}
    assert outcome.reward == 1.0


def test_files_of_a_failed_attempt_do_not_mix_with_those_of_the_next() -> None:
    world = World()

    def observed(action: ActionRequested) -> dict[str, Any]:
        if action.kind == "collect":
            return {"artifacts": (a_file("out/a"),), "failure": None if action.attempt else LOST}
        return {"artifacts": (a_file(f"of-{action.attempt}"),)}

    world.observed = observed
    outcome, trajectory = play(world, task(environment=COLLECTING))
    assert (outcome.attempt, outcome.reward) == (1, 1.0)
    assert [one.name for one in outcome.artifacts] == ["of-1", "out/a"]
    assert [one.name for one in trajectory.artifacts] == ["of-1", "out/a"]


@pytest.mark.parametrize("artifacts", [("../x",), ("a", "a"), ("a", "a/b"), ("",)])
def test_names_that_anybody_may_write_fail_the_attempt(artifacts: tuple[str, ...]) -> None:
    world = World()
    world.observed = lambda _: {"artifacts": tuple(map(a_file, artifacts))}
    outcome = end(world, task(attempts=1))
    assert outcome.failure is not None
    assert (outcome.failure.code, outcome.reward) == ("bad_artifacts", None)
    assert outcome.artifacts == ()


def test_a_store_that_fails_for_good_gives_no_reward() -> None:
    world = World()
    failure = Failure(origin="infrastructure", code="artifacts_unavailable", retryable=True)
    world.observed = lambda action: {"failure": failure} if action.kind == "collect" else {}
    outcome = end(world, task(environment=COLLECTING, attempts=2))
    assert (outcome.ending, outcome.reward, outcome.attempts) == ("failed", None, 2)


def test_files_are_not_waited_for_beyond_the_deadline() -> None:
    world = World()
    world.silent_after = 7  # the collect is the 8th request
    outcome = end(world, task(environment=COLLECTING), left_s=0.5)
    assert outcome.failure is not None
    assert (outcome.failure.code, outcome.reward) == ("collect", None)


def test_an_episode_is_cancelled_while_its_files_are_collected() -> None:
    world = World()
    world.silent_after = 7

    async def meanwhile(run: EpisodeRun) -> None:
        while len(world.requests()) < 8:
            await asyncio.sleep(0.001)
        run.cancel("enough")

    outcome = end(world, task(environment=COLLECTING), meanwhile=meanwhile)
    assert (outcome.ending, outcome.reward) == ("cancelled", None)


def test_a_recorded_collect_is_not_asked_for_again() -> None:
    first = World()
    first.observed = lambda _: {"artifacts": (a_file("out/a"),)}
    end(first, task(environment=COLLECTING))
    recorded = [first.answer(event) for event in first.sent]
    answers = {0: {answer.call: answer for answer in recorded if answer is not None}}
    heir = World()
    outcome = end(heir, task(environment=COLLECTING), answers=answers, left_s=-1.0)
    assert outcome.artifacts == (a_file("out/a"),)
    assert [request.kind for request in heir.of(ActionRequested)] == ["close"]


def test_a_task_without_collect_asks_as_before() -> None:
    world = World()
    end(world)
    assert "collect" not in [event.kind for event in world.of(ActionRequested)]
    reset = world.of(ActionRequested)[0]
    old = EnvironmentUse(use="default").model_dump_json(exclude={"collect"})
    assert reset.digest == meaning_of("reset", "0", old, "{}")


@pytest.mark.parametrize("code", ["step_timeout", "environment_error"])
def test_slow_or_broken_collecting_is_never_counted_against_the_policy(code: str) -> None:
    world = World()
    failure = Failure(origin="environment", code=code, retryable=True)
    world.observed = lambda action: {"failure": failure} if action.kind == "collect" else {}
    outcome = end(
        world, task(environment=COLLECTING, attempts=2),
        timeouts="unfinished", exceptions="unfinished", unfinished_reward=-1.0,
    )  # fmt: skip
    assert (outcome.ending, outcome.reward, outcome.attempts) == ("failed", None, 2)
