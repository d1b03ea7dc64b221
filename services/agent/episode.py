"""The public agent API: an agent is an ordinary coroutine function that takes an Episode.

    async def solve(episode: Episode) -> None:
        observation = await episode.reset()
        while not observation.done:
            generation = await episode.generate(observation.text)
            observation = await episode.step(generation.text)

An agent is durable. After a crash, another worker runs it again from its beginning, with the
recorded answers, until it reaches the point where it stopped; from there it goes on. So an agent's
code must be deterministic: it must make the same requests if it gets the same answers. Use
`episode.random` for random numbers and `episode.gather` (not `asyncio.gather`) for requests at the
same time, and do not let the clock or the outside world decide what is asked.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from random import Random
from statistics import fmean
from typing import Any, Literal

from headrace.schemas import packed
from headrace.schemas.events import (
    ObservationRecorded,
    Sampling,
)
from headrace.services.agent.artifacts.attempt_files import AttemptFiles
from headrace.services.agent.awaiting import check_awaited, forgotten, must_await
from headrace.services.agent.conversation import Asked, Conversation, Generation, Prompt
from headrace.services.agent.requests import (
    EpisodeRuntime,
    action_requested,
    generation_requested,
)
from headrace.services.agent.stops import EpisodeStopped, NoScore, exits_contained
from headrace.services.agent.turns import Branch, RecordedTurn, current_branch
from headrace.services.base.clock import now
from headrace.services.base.types import Observation, TaskView


class Episode:
    """One attempt at a task: its environment, its policies, its reward, and its limits.

    Headrace makes an Episode for each attempt, and passes it to the agent. If a policy or an
    environment fails, or the episode reaches a limit, the request raises a BaseException that is no
    Exception: it passes through the agent's own `except Exception` clauses and ends the coroutine.
    """

    task: TaskView
    """The task: its payload, the agent's options, and its seed."""
    metrics: dict[str, float]
    """Numbers for reports. The agent sets them; they are recorded with the trajectory."""
    rewards: dict[str, float]
    """Named parts of the reward, for reports: summed over the steps, with the judges' scores. The
    one with a role's name is what this role learns from, instead of the episode's reward."""
    turns: dict[str, RecordedTurn]  # by call path
    files: AttemptFiles
    """The files that the environment gave out so far: `files.by_name`."""

    def __init__(self, runtime: EpisodeRuntime, options: Mapping[str, Any]) -> None:
        """`options` are the agent's options in the recipe. The task's own options override them."""
        started = runtime.started
        submitted = started.submitted
        self._runtime = runtime
        self._attempt = runtime.attempt
        self._started = started
        self._conversations: dict[str, Conversation] = {}
        self._rewards: list[float] = []
        self._reward: float | None = None
        self._scores: dict[str, list[float]] = {}
        self._turn_count = self._token_count = 0
        self._actions, self._was_reset = 0, False
        self.turns = {}
        self.files = AttemptFiles()
        self._random: Random | None = None
        self.metrics, self.rewards = {}, {}
        self.task = TaskView(
            number=started.task,
            sample=started.sample,
            payload=json.loads(submitted.payload),
            options={**options, **json.loads(submitted.options)},
            seed=submitted.seed,
        )
        current_branch.set(Branch())
        forgotten.set([])

    @property
    def action_count(self) -> int:
        """How many actions the agent asked of the environment. 0 if it was never reset."""
        return self._actions

    @property
    def random(self) -> Random:
        """Random numbers for the agent: the same again after a crash, others in another attempt."""
        # They take 2.5 kB, and few agents use them.
        self._random = self._random or Random(f"{self._started.seed}/{self._attempt}")
        return self._random

    @property
    def reward(self) -> float | None:
        """The episode's reward, which the agent may set.

        Until then it is the sum of the steps' rewards, rounded once, so ten times 0.1 is 1. If no
        step gave one, it is the mean of the roles' own rewards, or None if no role has one.
        """
        if self._reward is not None:
            return self._reward
        if self._rewards:
            return math.fsum(self._rewards)
        own = [self.rewards[role] for role in self.roles if role in self.rewards]
        return fmean(own) if own else None

    @reward.setter
    def reward(self, value: float) -> None:
        self._reward = float(value)

    @property
    def turns_left(self) -> int:
        """How many more times the agent may ask a policy in this episode."""
        return self._started.submitted.max_turns - self._turn_count

    @property
    def tokens_left(self) -> int:
        """How many more tokens policies may sample in this episode."""
        return self._started.submitted.max_tokens - self._token_count

    @property
    def seconds_left(self) -> float:
        """Seconds until the episode's deadline.

        This is a clock: no request of an agent may depend on it.
        """
        return max(0.0, self._started.deadline / 1000 - now())

    @property
    def roles(self) -> tuple[str, ...]:
        """The names of the roles that policies play in the task."""
        return tuple(self._started.submitted.roles)

    def sampling(self, role: str = "policy") -> Sampling:
        """Returns how a role's tokens are sampled. Raises KeyError if the task has no such role."""
        return self._started.submitted.roles[role].sampling

    @must_await
    async def reset(self) -> Observation:
        """Starts the environment, and returns its first observation.

        Call it once, before the first step. Raises ValueError if the task has no environment.
        """
        self._was_reset = True
        return await self._act("reset", self._started.submitted.payload)

    @must_await
    async def step(self, action: str) -> Observation:
        """Does an action in the environment, and returns what the environment answers.

        The reward of the step is added to the episode's, and to that of the newest turn before it.
        After a `gather` this is the newest one of the last branch that has a turn. Raises
        RuntimeError before the first `reset`.
        """
        if not self._was_reset:
            raise RuntimeError(
                "episode.step was called before episode.reset, so there is no environment yet: "
                "begin with `observation = await episode.reset()`"
            )
        return await self._act("step", json.dumps({"action": action}))

    @must_await
    async def score(self, judge: str, payload: Mapping[str, Any]) -> float:
        """Asks the judge, an environment of the recipe, to score `payload`. Returns the score.

        `payload` consists of JSON values. A score does not change the episode's reward; set
        `episode.reward` to make it count. It is recorded in `rewards` under the judge's name;
        several scores of one judge are summed. Raises NoScore if the judge answers without a finite
        score. The attempt fails if the judge doesn't answer within its `score_s` of the recipe.
        """
        call, content = current_branch.get().next(), json.dumps(payload, sort_keys=True)
        request = action_requested(
            self._started, self._attempt, call, "score", content, judge=judge
        )
        answer = await self._runtime.ask_environment(request)
        score = answer.reward
        if score is None or not math.isfinite(score):
            raise NoScore(f"the judge {judge!r} answered without a score: {score}")
        self.files.add(answer, f"{judge}/")
        scores = self._scores.setdefault(judge, [])
        scores.append(score)
        # `fsum` is exact: the sum is the same in whatever order parallel scores arrive.
        self.rewards[judge] = math.fsum(scores)
        return score

    @must_await
    async def generate(
        self,
        text: str = "",
        *,
        role: str = "policy",
        max_tokens: int | None = None,
        demonstration: str | None = None,
        json_schema: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Appends `text` to the role's own conversation, and returns the policy's answer.

        See `Conversation.generate`. Raises KeyError if the task has no such role.
        """
        return await self.conversation(role).generate(
            text, max_tokens=max_tokens, demonstration=demonstration, json_schema=json_schema
        )

    @must_await
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
        """Appends new messages to the role's own conversation, and returns the policy's answer.

        See `Conversation.chat`. Raises KeyError if the task has no such role.
        """
        return await self.conversation(role).chat(
            messages,
            tools=tools,
            max_tokens=max_tokens,
            demonstration=demonstration,
            json_schema=json_schema,
        )

    def conversation(self, role: str = "policy") -> Conversation:
        """Returns the role's own conversation, the one that `generate` and `chat` continue.

        Raises KeyError if the task has no such role.
        """
        if role not in self._conversations:
            self._started.submitted.roles[role]
            self._conversations[role] = self.new_conversation(role)
        return self._conversations[role]

    def new_conversation(self, role: str = "policy") -> Conversation:
        """Returns an empty conversation with the role's policy, beside the role's own."""
        return Conversation(self._ask, role)

    @must_await
    async def gather(self, *branches: Callable[[], Coroutine[Any, Any, Any]]) -> list[Any]:
        """Runs coroutine functions at the same time. Returns their results in the order given.

        Use it instead of `asyncio.gather`: after a crash, each branch gets its own answers again.
        If one raises, the others are cancelled. If one reaches a limit, the episode ends at once:
        an answer that another branch still waits for is not in the trajectory.
        """
        here = current_branch.get()
        inner = here.split(len(branches))

        async def run(branch: Branch, coroutine: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
            current_branch.set(branch)
            with exits_contained():
                return await coroutine()

        tasks = [asyncio.create_task(run(*one)) for one in zip(inner, branches, strict=True)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            here.join(inner)

    async def _act(self, kind: Literal["reset", "step"], payload: str) -> Observation:
        check_awaited()
        here = current_branch.get()
        after = here.last_turn
        index, self._actions = self._actions, self._actions + 1
        asking = self._runtime.ask_environment(
            action_requested(self._started, self._attempt, here.next(), kind, payload, index=index)
        )
        answer = await asking
        self._note_reward(answer, after)
        self.files.add(answer)
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
            self.turns[after].add_reward(answer.reward)

    async def _ask(self, conversation: Conversation, prompt: Prompt) -> Generation:
        check_awaited()
        if self.turns_left <= 0:
            raise EpisodeStopped("turn_limit")
        left = self.tokens_left
        if left <= 0:
            raise EpisodeStopped("token_limit")
        here = current_branch.get()
        request = generation_requested(
            self._started, self._attempt, here.next(), conversation, prompt, max_tokens=left
        )
        self._turn_count += 1
        asked, before = Asked.of(request), request.sampling.json_before
        asking = self._runtime.ask_policy(request)
        del request, prompt  # they may have 100 KiB
        answer = await asking
        if answer.finish == "overflow" and not answer.tokens:
            raise EpisodeStopped("overflow")  # The prompt itself is too long.
        if asked.demonstrated and answer.logprobs:
            raise RuntimeError(
                f"the inference worker {answer.worker} ignores demonstrations: it is too old. "
                "Update it"
            )
        if not answer.text.startswith(before[: len(answer.text)]):
            raise RuntimeError(
                f"the answer of the inference worker {answer.worker} does not begin with "
                f"{before!r}: the worker is too old to force tool calls. Update it"
            )
        sampled = packed.unpack_i32(answer.tokens)
        turn = self.turns[asked.call] = conversation.append(asked, answer)
        most = min(left, self.sampling(conversation.role).max_tokens)
        if asked.pinned and self._started.submitted.purpose == "train":
            # Its tokens are as old as the version that the task names.
            turn.turn = turn.turn.model_copy(update={"trainable": False})
        turn.cut = answer.finish == "length" and asked.sampling.max_tokens == most
        self._token_count += len(sampled)
        here.last_turn = asked.call
        if answer.finish == "overflow":
            raise EpisodeStopped("overflow")
        finish: Literal["stop", "length"] = "length" if answer.finish == "length" else "stop"
        return Generation(answer.text, tuple(sampled), finish)


Agent = Callable[[Episode], Awaitable[None]]
"""An agent: a coroutine function that plays one episode, as this module's docstring describes."""
