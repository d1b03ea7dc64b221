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
import hashlib
import json
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, Protocol

from schemas import packed
from schemas.events import (
    ActionRequested,
    EnvironmentUse,
    EpisodeStarted,
    GenerationCompleted,
    GenerationRequested,
    ObservationRecorded,
    Sampling,
    Turn,
)
from services.clock import now
from services.types import Observation, TaskView


@dataclass(frozen=True, slots=True)
class Generation:
    """What the policy said."""

    text: str
    tokens: tuple[int, ...]
    finish: Literal["stop", "length"]
    """`length`: `max_tokens` was reached."""


class NoScore(Exception):
    """A judge answered without a score. An agent that lets it pass fails its attempt."""


class EpisodeStopped(BaseException):
    """Ends the agent's coroutine from inside: a limit is reached. Not an Exception: let it pass."""

    def __init__(self, ending: Literal["turn_limit", "token_limit", "overflow"]) -> None:
        super().__init__(ending)
        self.ending = ending


@contextmanager
def exits_contained() -> Iterator[None]:
    """Makes an exit of the agent's code an error: as SystemExit a task would end the process."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as exit:
        raise RuntimeError(f"the agent's code raised {type(exit).__name__}: {exit}") from exit


class Runtime(Protocol):
    """What an Episode stands on: requests out, first recorded answers in."""

    started: EpisodeStarted
    attempt: int

    async def ask_policy(self, request: GenerationRequested) -> GenerationCompleted: ...

    async def ask_environment(self, request: ActionRequested) -> ObservationRecorded: ...


@dataclass(slots=True)
class _Branch:
    """Numbers the requests of one line of control: "1", "2", under gather "2.1.1"."""

    prefix: str = ""
    calls: int = 0
    last_turn: str | None = None
    """Call of its newest turn: a step's reward belongs to it."""

    def next(self) -> str:
        self.calls += 1
        return f"{self.prefix}{self.calls}"


_branch: ContextVar[_Branch] = ContextVar("headrace_branch")


@dataclass(frozen=True, slots=True)
class _Form:
    """What an answer must be."""

    max_tokens: int | None
    demonstration: str | None
    json_schema: Mapping[str, Any] | None


@dataclass(eq=False)
class Context:
    """A conversation with one policy as append-only token ids: never retokenized, forkable."""

    episode: Episode
    role: str
    tokens: list[int] = field(default_factory=list)
    """All ids so far, sampled ones included."""
    last_call: str | None = None

    async def generate(
        self,
        text: str = "",
        *,
        max_tokens: int | None = None,
        demonstration: str | None = None,
        json_schema: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Appends `text`, and what the policy says to it.

        With `json_schema` it can say nothing but JSON that follows the schema, or a beginning of
        it where `max_tokens` cuts it; the sampling needs a stop token.

        With `demonstration` the policy isn't asked: this is what it should have said, and training
        teaches it that, whatever the episode's reward. The end of a turn (a stop token of the
        sampling) is added. One that the sampling could not draw fails the attempt.
        """
        form = _Form(max_tokens, demonstration, json_schema)
        return await self.episode._generate(self, text, "", form)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        demonstration: str | None = None,
        json_schema: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Appends new messages by the model's own chat template, and what the policy says to them.

        Only what is new: what was said before stays as the ids that it was. `tools` are told of in
        an empty context alone. The policy's answer is text, tool calls included as it spells them;
        so is a `demonstration` of it, and `json_schema` binds it, as in `generate`.
        """
        tree = {"messages": list(messages)} | ({"tools": list(tools)} if tools else {})
        chat = json.dumps(tree, sort_keys=True, ensure_ascii=False)
        form = _Form(max_tokens, demonstration, json_schema)
        return await self.episode._generate(self, "", chat, form)

    def fork(self) -> Context:
        """A second continuation from here; neither sees the other's tokens."""
        return Context(self.episode, self.role, list(self.tokens), self.last_call)


@dataclass(eq=False, slots=True)
class RecordedTurn:
    """A turn and the call that it continues, before turns are put in order."""

    turn: Turn
    parent: str | None
    length: int
    """Tokens of the sequence that ends with this turn, its context included."""
    oldest_version: int
    sampling: Sampling


class Episode:
    """One try at a task. See the module's text for what an agent's code must hold to."""

    def __init__(self, runtime: Runtime, options: Mapping[str, Any]) -> None:
        started = runtime.started
        submitted = started.submitted
        self._runtime = runtime
        self._attempt = runtime.attempt
        self._started = started
        self._contexts: dict[str, Context] = {}
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
        _branch.set(_Branch())

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
        use = EnvironmentUse(use=judge)
        observation = await self._act("score", json.dumps(payload, sort_keys=True), use)
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

    def context(self, role: str = "policy") -> Context:
        """The role's own context, one an episode. KeyError for a role that the task lacks."""
        if role not in self._contexts:
            self._started.submitted.roles[role]
            self._contexts[role] = Context(self, role)
        return self._contexts[role]

    def new_context(self, role: str = "policy") -> Context:
        """A fresh, empty context beside the role's own."""
        return Context(self, role)

    async def gather(self, *branches: Callable[[], Coroutine[Any, Any, Any]]) -> list[Any]:
        """Runs coroutine functions at the same time, with call paths that replay."""
        path = _branch.get().next()

        async def run(index: int, branch: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
            _branch.set(_Branch(f"{path}.{index}."))
            with exits_contained():
                return await branch()

        tasks = [asyncio.create_task(run(i, branch)) for i, branch in enumerate(branches, 1)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _act(
        self,
        kind: Literal["reset", "step", "score"],
        payload: str,
        environment: EnvironmentUse | None = None,
    ) -> Observation:
        submitted = self._started.submitted
        use = environment or submitted.environment
        if use is None:
            raise ValueError("this task has no environment: set tasks.environment in the recipe")
        after = _branch.get().last_turn
        index = 0 if kind == "score" else self._actions
        request = ActionRequested(
            task=self._started.task,
            sample=self._started.sample,
            attempt=self._attempt,
            call=_branch.get().next(),
            index=index,
            kind=kind,
            environment=use,
            payload=payload,
            artifacts=submitted.artifacts if kind == "reset" else (),
            seed=submitted.seed,
            expires_at=self._started.deadline,
            digest=_meaning(kind, str(index), use.model_dump_json(), payload),
        )
        if kind != "score":
            self._actions += 1
        answer = await self._runtime.ask_environment(request)
        if kind != "score":
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

    async def _generate(self, context: Context, text: str, chat: str, form: _Form) -> Generation:
        submitted = self._started.submitted
        left = self.tokens_left
        if self._turn_count >= submitted.max_turns:
            raise EpisodeStopped("turn_limit")
        if left <= 0:
            raise EpisodeStopped("token_limit")
        use = submitted.roles[context.role]
        changes: dict[str, Any] = {
            "max_tokens": min(left, use.sampling.max_tokens, form.max_tokens or left)
        }
        if form.json_schema is not None:
            changes["json_schema"] = json.dumps(form.json_schema, ensure_ascii=False)
        sampling = use.sampling.model_copy(update=changes)
        tokens = packed.pack_i32(context.tokens)
        meant: list[str | bytes] = [use.policy, str(use.version), _told(sampling), tokens, text]
        # Only what there is: a request that was sent before these fields were must mean the same.
        if chat or form.demonstration is not None:
            meant.append(chat)
        if form.demonstration is not None:
            meant.append(form.demonstration)
        request = GenerationRequested(
            task=self._started.task,
            sample=self._started.sample,
            attempt=self._attempt,
            call=_branch.get().next(),
            policy=use.policy,
            pinned=use.version,
            tokens=tokens,
            text=text,
            chat=chat,
            demonstration=form.demonstration,
            sampling=sampling,
            priority=submitted.priority,
            expires_at=self._started.deadline,
            digest=_meaning(*meant),
        )
        self._turn_count += 1
        answer = await self._runtime.ask_policy(request)
        if answer.finish == "overflow":
            raise EpisodeStopped("overflow")
        if form.demonstration is not None and answer.logprobs:
            raise RuntimeError(
                f"worker {answer.worker} draws where it is told what to say: renew it"
            )
        return self._record(context, request, answer)

    def _record(
        self, context: Context, request: GenerationRequested, answer: GenerationCompleted
    ) -> Generation:
        sampled = packed.unpack_i32(answer.tokens)
        context.tokens += packed.unpack_i32(answer.prompt_added)
        context.tokens += sampled
        self._token_count += len(sampled)
        turn = Turn(
            call=request.call,
            policy=request.policy,
            role=context.role,
            context=answer.prompt_added,
            tokens=answer.tokens,
            logprobs=answer.logprobs,
            versions=answer.versions,
            kv=answer.kv,
            finish=answer.finish,
            text=answer.text,
            demonstrated=request.demonstration is not None,
        )
        oldest = packed.oldest(answer.versions)
        self.turns[request.call] = RecordedTurn(
            turn,
            context.last_call,
            len(context.tokens),
            -1 if oldest is None else oldest,
            request.sampling,
        )
        _branch.get().last_turn = context.last_call = request.call
        finish: Literal["stop", "length"] = "length" if answer.finish == "length" else "stop"
        return Generation(answer.text, tuple(sampled), finish)


def _told(sampling: Sampling) -> str:
    return sampling.model_dump_json(exclude=set() if sampling.json_schema else {"json_schema"})


def _meaning(*parts: str | bytes) -> bytes:
    """Digest of what a request asks: two requests of one id must mean the same."""
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()[:16]


Agent = Callable[[Episode], Awaitable[None]]
"""An agent: see the module's text."""
