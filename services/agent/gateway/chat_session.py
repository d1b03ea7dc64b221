"""The model calls of one attempt, made by a client of OpenAI's API.

If the messages of a request extend an earlier conversation, the request continues the very token
ids of that conversation: nothing is tokenized twice. Any other request begins a new conversation.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.errors import UsageError
from headrace.schemas import packed
from headrace.schemas.problems import problems_of
from headrace.services.agent.conversation import Conversation, Generation
from headrace.services.agent.episode import Episode
from headrace.services.agent.gateway.chat_messages import (
    Message,
    extend,
    said_by_policy,
    start_of,
)
from headrace.services.agent.gateway.chat_requests import ChatRequest
from headrace.services.agent.gateway.refusals import ApiError, bad_request
from headrace.services.agent.stops import EpisodeStopped
from headrace.services.base.tool_calls import (
    FORMATS,
    Format,
    ToolCall,
    forced_call,
    parse_tool_calls,
)
from headrace.services.base.types import check_names

_Form = tuple[Mapping[str, Any] | None, tuple[str, str]]
"""A JSON schema that an answer follows, and the texts before and after the JSON."""
IN_FLIGHT = 64
"""Largest number of generations of one session at a time, and of its requests."""


class Report(BaseModel):
    """What an agent reports about its episode. Other keys are ignored."""

    model_config = ConfigDict(allow_inf_nan=False)

    reward: float | None = Field(default=None, strict=True)
    rewards: dict[str, float] = {}
    """Named parts of the reward, for reports."""
    metrics: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How the gateway presents a recipe's policies to clients.

    Raises UsageError if the format of tool calls is unknown.
    """

    tool_calls: Format
    models: Mapping[str, str]
    """Maps further names of models to the agent's roles."""

    def __post_init__(self) -> None:
        if self.tool_calls not in FORMATS:
            raise UsageError(
                f"tool_calls: {self.tool_calls!r} is unknown; use {', '.join(FORMATS)}"
            )


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer of a policy."""

    call: str
    """The generation's call path."""
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish: str
    """`stop`, `length` or `tool_calls`."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int

    def message(self) -> Message:
        """Returns the message that the client will send back in its next request."""
        return said_by_policy(self.call, self.content, self.tool_calls)


class ChatSession:
    """Connects clients to an episode. It must be made in the agent's coroutine."""

    def __init__(self, episode: Episode, dialect: Dialect) -> None:
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Raises what ended the attempt: a limit, or a failure of a policy or of the log."""
        self.ended: asyncio.Future[str | None] = self._loop.create_future()
        """Done when an outside client has finished: None, or the reason for its failure."""
        self.uploading = asyncio.Lock()
        """Held while a large request is read: one episode must not keep others from theirs."""
        self._heard_at = self._loop.time()
        self._episode = episode
        self._dialect = dialect
        self._answered: dict[bytes, Conversation] = {}
        """The conversations that end with an answer of the policy, by their digests."""
        self._running: set[asyncio.Task[Generation]] = set()
        self._reserved = 0
        """Tokens that the running generations may sample."""
        self._freed = asyncio.Event()
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        # Requests of all clients are numbered as those of the agent's coroutine.
        self._context = contextvars.copy_context()

    @property
    def models(self) -> tuple[str, ...]:
        """The names that a request may give as its model."""
        return (*self._episode.roles, *self._dialect.models)

    @property
    def silent_s(self) -> float:
        """Seconds since the last request of a client; 0 while a client waits for an answer."""
        return 0.0 if self._open else self._loop.time() - self._heard_at

    def heard(self) -> None:
        """Notes that a client is there."""
        self._heard_at = self._loop.time()

    def raise_failure(self) -> None:
        """Raises what ended the attempt, if anything did."""
        if self.failed.done():
            self.failed.result()

    async def complete(self, request: ChatRequest) -> list[Choice]:
        """Answers a request. Raises ApiError if the request is wrong or the episode has ended."""
        role = self._dialect.models.get(request.model, request.model)
        if role not in self._episode.roles:
            names = ", ".join(self.models)
            raise ApiError(
                404, f"no model {request.model!r}; models are {names}", "model_not_found"
            )
        if stops := [
            text for text in request.stop if text not in self._episode.sampling(role).stop
        ]:
            raise bad_request(
                f"stop: {stops[0]!r} is not in policies.<name>.sampling.stop of the recipe; only "
                "the texts there can stop a generation"
            )
        if len(self._running) + request.choices > IN_FLIGHT:
            raise ApiError(
                429, f"one episode can have {IN_FLIGHT} generations at a time: retry this later"
            )
        form = self._form(request)
        conversation, new, digest = self._find(role, request)
        request = replace(request, messages=())  # what was said is not kept until the answer
        asks = [self._ask(conversation.fork(), new, request, form) for _ in range(request.choices)]
        del new
        choices = []
        for continued, generation in await asyncio.gather(*asks):
            choice = self._choice(continued, generation, request)
            self._answered[extend(digest, choice.message())] = continued
            choices.append(choice)
        return choices

    def report(self, report: Report) -> None:
        """Takes a report of the agent. Its values replace those of earlier reports.

        Raises ValueError if it would give the episode too many names, or too long ones.
        """
        rewards = {**self._episode.rewards, **report.rewards}
        metrics = {**self._episode.metrics, **report.metrics}
        check_names(rewards)
        check_names(metrics)
        if report.reward is not None:
            self._episode.reward = report.reward
        self._episode.rewards = rewards
        self._episode.metrics = metrics

    def undelivered(self, choice: Choice) -> None:
        """Excludes an answer from training, since no client received it. It is still recorded."""
        recorded = self._episode.turns[choice.call]
        recorded.turn = recorded.turn.model_copy(update={"trainable": False})

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Surrounds the handling of a client's request, up to the delivery of the answer.

        Raises ApiError 429 if too many are open: their bodies are in memory.
        """
        if self._open >= IN_FLIGHT:
            raise ApiError(
                429, f"one episode can have {IN_FLIGHT} requests at a time: retry this later"
            )
        self._open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._open -= 1
            self.heard()
            if not self._open:
                self._idle.set()

    async def drain(self) -> None:
        """Waits until no request is open: the answers belong to the trajectory."""
        await self._idle.wait()

    def close(self) -> None:
        """Cancels the generations that still run."""
        for task in self._running:
            task.cancel()

    def _form(self, request: ChatRequest) -> _Form:
        """Returns what the answer must follow: a forced call ignores `response_format`."""
        if not request.forced:
            return request.json_schema, ("", "")
        try:
            return forced_call(self._dialect.tool_calls, request.forced)
        except (ValueError, RecursionError) as error:
            raise bad_request(f"tool_choice: {error}") from error

    def _find(
        self, role: str, request: ChatRequest
    ) -> tuple[Conversation, tuple[Message, ...], bytes]:
        """Finds the longest conversation that a request extends.

        Returns it, the new messages, and the digest of all messages.
        """
        digests = [start_of(role, request.tools)]
        for message in request.messages:
            digests.append(extend(digests[-1], message))
        if digests[-1] in self._answered:
            raise bad_request(
                "messages: the last one is the policy's answer; add something new after it"
            )
        for said in range(len(request.messages) - 1, 0, -1):
            if (known := self._answered.get(digests[said])) is not None:
                return known, request.messages[said:], digests[-1]
        return self._episode.new_conversation(role), request.messages, digests[-1]

    async def _ask(
        self, said: Conversation, new: tuple[Message, ...], request: ChatRequest, form: _Form
    ) -> tuple[Conversation, Generation]:
        """Asks the policy, once the episode has enough tokens left beside those reserved."""
        most = await self._reserve(said.role, request.max_tokens)
        tools = () if said.length else request.tools
        schema, around = form
        asked = said.chat(new, tools=tools, max_tokens=most, json_schema=schema, around=around)
        del new
        task = self._loop.create_task(asked, context=self._context)
        self._running.add(task)
        task.add_done_callback(lambda task: self._done(task, most))
        await asyncio.wait({task})  # the task goes on if the client disconnects
        return said, self._result(task)

    async def _reserve(self, role: str, asked: int | None) -> int:
        most = self._episode.sampling(role).max_tokens
        most = min(most, asked or most)
        while self._reserved and self._episode.tokens_left < self._reserved + most:
            self._freed.clear()
            await self._freed.wait()
        self._reserved += most
        return most

    def _done(self, task: asyncio.Task[Generation], reserved: int) -> None:
        self._running.discard(task)
        self._reserved -= reserved
        self._freed.set()
        if not task.cancelled():
            task.exception()  # retrieved, even if the client is gone

    def _result(self, task: asyncio.Task[Generation]) -> Generation:
        """Returns what was generated. If that failed, ends the attempt and raises ApiError."""
        if task.cancelled():
            raise ApiError(503, "this attempt of the episode has ended", "episode_ended")
        error = task.exception()
        if error is None:
            return task.result()
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # retrieved, even if nothing awaits the future
        if isinstance(error, EpisodeStopped):
            code = "context_length_exceeded" if error.ending == "overflow" else error.ending
            raise bad_request(f"the episode has ended: {error.ending}", code)
        raise ApiError(503, f"the attempt has failed: {error}", "attempt_failed")

    def _choice(self, said: Conversation, generation: Generation, request: ChatRequest) -> Choice:
        assert said.last_call is not None
        turn = self._episode.turns[said.last_call].turn
        # In the format `none` a text never contains calls.
        spelling: Format = self._dialect.tool_calls if request.calls_tools else "none"
        content, calls = parse_tool_calls(generation.text, spelling)
        return Choice(
            call=said.last_call,
            content=content,
            tool_calls=calls,
            finish="tool_calls" if calls else generation.finish,
            tokens=generation.tokens,
            logprobs=tuple(packed.unpack_f32(turn.logprobs)),
            prompt_tokens=said.length - len(generation.tokens),
        )


def check_payload_keys(keys: Sequence[str] | None) -> None:
    """Checks the option `payload` of an agent. Raises UsageError if it is not a list of names."""
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys or ()):
        raise UsageError(f"payload must be a list of keys of the task's payload, not {keys!r}")


def describe(episode: Episode, keys: Sequence[str] | None) -> dict[str, Any]:
    """Returns the task as a client gets it: JSON values, and of the payload only `keys`.

    If `keys` is None, the client gets the whole payload.
    """
    task = asdict(episode.task)
    if keys is not None:
        task["payload"] = {key: task["payload"][key] for key in keys if key in task["payload"]}
    return task


def read_report(value: Any) -> Report:
    """Checks a report. Raises ValueError if a value is wrong."""
    try:
        return Report.model_validate(value)
    except ValidationError as error:
        raise ValueError(problems_of(error)[0]) from error
