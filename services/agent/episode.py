"""The public agent API: an agent is an ordinary coroutine that takes an Episode.

    async def solve(episode: Episode) -> None:
        observation = await episode.reset()
        while not observation.done:
            generation = await episode.generate(observation.text)
            observation = await episode.step(generation.text)

It is durable: after a crash it is run again from its beginning against the recorded answers, and
goes on where it stopped. So its code must be deterministic: `episode.random` for chance, no clock
of its own, and `episode.gather` (not `asyncio.gather`) for calls at the same time.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from random import Random
from typing import Any, Literal, Protocol

from headrace.schemas import packed
from headrace.schemas.events import (
    ActionRequested,
    EpisodeStarted,
    GenerationCompleted,
    GenerationRequested,
    ObservationRecorded,
    Sampling,
)
from headrace.services.agent.call_paths import begin_branch, branch
from headrace.services.agent.conversation import Conversation, Generation, Prompt
from headrace.services.agent.requests import action_requested, generation_requested
from headrace.services.agent.stops import EpisodeStopped, exits_contained
from headrace.services.agent.turns import RecordedTurn
from headrace.services.base.clock import now
from headrace.services.base.types import Observation, TaskView


class NoScore(Exception):
    """A judge answered without a score. An agent that lets it pass fails its attempt."""


class EpisodeRuntime(Protocol):
    """What an Episode stands on: requests out, first recorded answers in."""

    started: EpisodeStarted
    attempt: int

    async def ask_policy(self, request: GenerationRequested) -> GenerationCompleted: ...

    async def ask_environment(self, request: ActionRequested) -> ObservationRecorded: ...


class Episode:
    """One try at a task. See the module's text for what an agent's code must hold to."""

    def __init__(self, runtime: EpisodeRuntime, options: Mapping[str, Any]) -> None:
        started = runtime.started
        submitted = started.submitted
        self._runtime = runtime
        self._attempt = runtime.attempt
        self._started = started
        self._contexts: dict[str, Conversation] = {}
        self._rewards: list[float] = []
        self._reward: float | None = None
        self._scores: dict[str, list[float]] = {}
        self._turn_count = 0
        self._token_count = 0
        self._actions = 0
        self.turns: dict[str, RecordedTurn] = {}
        """What was said so far, by call path."""
        self.random = Random(f"{started.seed}/{runtime.attempt}")
        """The agent's source of chance: the same after a crash."""
        self.metrics: dict[str, float] = {}
        """Numbers for the trajectory's report."""
        self.rewards: dict[str, float] = {}
        """Named components of the reward, summed over the steps; and judges' scores."""
        self.task = TaskView(
            number=started.task,
            sample=started.sample,
            payload=json.loads(submitted.payload),
            options={**options, **json.loads(submitted.options)},
            seed=submitted.seed,
        )
        begin_branch()

    @property
    def reward(self) -> float | None:
        """The episode's reward: what was set, else the sum of the steps' rewards, else None."""
        if self._reward is not None:
            return self._reward
        return sum(self._rewards) if self._rewards else None

    @reward.setter
    def reward(self, value: float) -> None:
        self._reward = float(value)

    @property
    def turns_left(self) -> int:
        """How many generations the task still allows."""
        return self._started.submitted.max_turns - self._turn_count

    @property
    def tokens_left(self) -> int:
        """How many sampled tokens the task still allows."""
        return self._started.submitted.max_tokens - self._token_count

    @property
    def seconds_left(self) -> float:
        """Until the episode's deadline. By the clock: what an agent does must not depend on it."""
        return max(0.0, self._started.deadline / 1000 - now())

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that policies play in the task."""
        return tuple(self._started.submitted.roles)

    def sampling(self, role: str = "policy") -> Sampling:
        """How a role's tokens are drawn. KeyError for a role that the task lacks."""
        return self._started.submitted.roles[role].sampling

    async def reset(self) -> Observation:
        """Starts the environment. Once an episode, before any step."""
        return await self._act("reset", self._started.submitted.payload)

    async def step(self, action: str) -> Observation:
        """Acts in the environment."""
        return await self._act("step", json.dumps({"action": action}))

    async def score(self, judge: str, payload: Mapping[str, Any]) -> float:
        """Asks the environment `judge` of the recipe for a score of `payload`, JSON values.

        The score is told to the agent and changes no reward by itself: `episode.reward = score`
        does. It is recorded in `rewards`, under the judge's name; several of one judge add up.
        NoScore where the judge answers without one.
        """
        observation = await self._act("score", json.dumps(payload, sort_keys=True), judge)
        if observation.reward is None or not math.isfinite(observation.reward):
            raise NoScore(f"the judge {judge!r} answered without a score: {observation.reward}")
        scores = self._scores.setdefault(judge, [])
        scores.append(observation.reward)
        # Exactly rounded: scores asked for at the same time add up alike, in whatever order.
        self.rewards[judge] = math.fsum(scores)
        return observation.reward

    async def generate(
        self,
        text: str = "",
        *,
        role: str = "policy",
        max_tokens: int | None = None,
        demonstration: str | None = None,
        json_schema: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Appends `text` to the role's own context, and what the policy says to it, or should say:
        see `Context.generate`."""
        context = self.context(role)
        return await context.generate(
            text, max_tokens=max_tokens, demonstration=demonstration, json_schema=json_schema
        )

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        role: str = "policy",
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        demonstration: str | None = None,
        json_schema: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Appends new messages to the role's own context: see `Context.chat`."""
        return await self.context(role).chat(
            messages,
            tools=tools,
            max_tokens=max_tokens,
            demonstration=demonstration,
            json_schema=json_schema,
        )

    def context(self, role: str = "policy") -> Conversation:
        """The role's own context, one an episode. KeyError for a role that the task lacks."""
        if role not in self._contexts:
            self._started.submitted.roles[role]
            self._contexts[role] = Conversation(self._ask, role)
        return self._contexts[role]

    def new_conversation(self, role: str = "policy") -> Conversation:
        """A fresh, empty context beside the role's own."""
        return Conversation(self._ask, role)

    async def gather(self, *branches: Callable[[], Coroutine[Any, Any, Any]]) -> list[Any]:
        """Runs coroutine functions at the same time, with call paths that replay."""
        path = branch().next()

        async def run(index: int, coroutine: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
            begin_branch(f"{path}.{index}.")
            with exits_contained():
                return await coroutine()

        tasks = [asyncio.create_task(run(i, branch)) for i, branch in enumerate(branches, 1)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _act(
        self, kind: Literal["reset", "step", "score"], payload: str, judge: str | None = None
    ) -> Observation:
        here = branch()
        after = here.last_turn
        index = self._actions if judge is None else 0
        request = action_requested(
            self._started, self._attempt, here.next(), kind, payload, index=index, judge=judge
        )
        if judge is None:
            self._actions += 1
        answer = await self._runtime.ask_environment(request)
        if judge is None:
            self._note_reward(answer, after)
        return Observation(
            text=answer.text,
            data=json.loads(answer.data),
            reward=answer.reward,
            rewards=answer.rewards,
            terminated=answer.terminated,
            truncated=answer.truncated,
        )

    def _note_reward(self, answer: ObservationRecorded, after: str | None) -> None:
        for name, value in answer.rewards.items():
            self.rewards[name] = self.rewards.get(name, 0.0) + value
        if answer.reward is None:
            return
        self._rewards.append(answer.reward)
        if after is not None:
            recorded = self.turns[after]
            total = (recorded.turn.reward or 0.0) + answer.reward
            recorded.turn = recorded.turn.model_copy(update={"reward": total})

    async def _ask(self, context: Conversation, prompt: Prompt) -> Generation:
        if self.turns_left <= 0:
            raise EpisodeStopped("turn_limit")
        left = self.tokens_left
        if left <= 0:
            raise EpisodeStopped("token_limit")
        here = branch()
        request = generation_requested(
            self._started, self._attempt, here.next(), context, prompt, max_tokens=left
        )
        self._turn_count += 1
        answer = await self._runtime.ask_policy(request)
        if answer.finish == "overflow":
            raise EpisodeStopped("overflow")
        if prompt.demonstration is not None and answer.logprobs:
            raise RuntimeError(
                f"worker {answer.worker} draws where it is told what to say: renew it"
            )
        before = request.sampling.json_before
        if not answer.text.startswith(before[: len(answer.text)]):
            raise RuntimeError(
                f"worker {answer.worker} says what does not begin with {before!r}: renew it"
            )
        sampled = packed.unpack_i32(answer.tokens)
        self.turns[request.call] = context.append(request, answer, sampled)
        self._token_count += len(sampled)
        here.last_turn = request.call
        finish: Literal["stop", "length"] = "length" if answer.finish == "length" else "stop"
        return Generation(answer.text, tuple(sampled), finish)


Agent = Callable[[Episode], Awaitable[None]]
"""An agent: see the module's text."""
