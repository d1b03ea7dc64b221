"""One attempt's model calls, as they come from a client of OpenAI's API.

A request whose messages extend what was said before continues the very token ids of that: nothing
is tokenized twice. Any other begins a branch of its own.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.errors import UsageError
from headrace.schemas import packed
from headrace.services.agent.conversation import Conversation, Generation
from headrace.services.agent.episode import Episode
from headrace.services.agent.gateway.chat_messages import Message, extend, start_of
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

_Form = tuple[Mapping[str, Any] | None, tuple[str, str]]
"""A JSON schema that an answer follows, and what is around the JSON."""
NO_CALLS: tuple[ToolCall, ...] = ()
IN_FLIGHT = 64
"""Most generations of one session at a time."""


class Report(BaseModel):
    """What an agent says of itself. Other keys are left alone."""

    model_config = ConfigDict(allow_inf_nan=False)

    reward: float | None = Field(default=None, strict=True)
    rewards: dict[str, float] = {}
    """Named components of the reward, for reports."""
    metrics: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a recipe has its clients spoken to."""

    tool_calls: Format = "hermes"
    models: Mapping[str, str] = field(default_factory=dict)
    """More names of models, to the agent's role each is."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer."""

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
        """As the client will say it again."""
        calls = [
            {"id": call_id, "type": "function",
             "function": {"name": call.name, "arguments": call.arguments}}
            for call_id, call in zip(self.call_ids(), self.tool_calls, strict=True)
        ]  # fmt: skip
        message: Message = {"role": "assistant", "content": self.content}
        return {**message, "tool_calls": calls} if calls else message

    def call_ids(self) -> list[str]:
        """The ids of its tool calls: no two of an attempt are the same."""
        path = self.call.replace(".", "_")
        return [f"call_{path}_{index}" for index in range(len(self.tool_calls))]


class ChatSession:
    """A client's way into an episode. Made inside the agent's coroutine."""

    def __init__(self, episode: Episode, dialect: Dialect) -> None:
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Raises what ends the attempt: a limit, or a failure of policy or log."""
        self.ended: asyncio.Future[str | None] = self._loop.create_future()
        """Done once a client from outside has said that it is: why it failed, or None."""
        self._heard_at = self._loop.time()
        self._episode = episode
        self._dialect = dialect
        self._answered: dict[bytes, Conversation] = {}
        """By the digest of a conversation that ends with an answer of the policy."""
        self._running: set[asyncio.Task[Generation]] = set()
        self._reserved = 0
        """Tokens that the generations under way may draw."""
        self._freed = asyncio.Event()
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        # Call paths are numbered in the coroutine's own context, whoever asks.
        self._context = contextvars.copy_context()

    @property
    def models(self) -> tuple[str, ...]:
        """Names that a request may give as its model."""
        return (*self._episode.roles, *self._dialect.models)

    @property
    def silent_s(self) -> float:
        """Seconds since a client was last heard of; none while it waits for an answer."""
        return 0.0 if self._open else self._loop.time() - self._heard_at

    def heard(self) -> None:
        """Says that a client was heard of."""
        self._heard_at = self._loop.time()

    def raise_failure(self) -> None:
        """Raises what ended the attempt, if anything did."""
        if self.failed.done():
            self.failed.result()

    async def complete(self, request: ChatRequest) -> list[Choice]:
        """Answers a request. ApiError where it can't, and where the episode can't go on."""
        role = self._dialect.models.get(request.model, request.model)
        if role not in self._episode.roles:
            names = ", ".join(self.models)
            raise ApiError(404, f"no model {request.model!r}; there is {names}", "model_not_found")
        if stops := [
            text for text in request.stop if text not in self._episode.sampling(role).stop
        ]:
            raise bad_request(
                f"stop: {stops[0]!r} ends no generation here; what does is set in the recipe, "
                "policies.<name>.sampling.stop"
            )
        if len(self._running) + request.choices > IN_FLIGHT:
            raise ApiError(429, f"more than {IN_FLIGHT} generations of one episode at a time")
        form = self._form(request)
        context, new, digest = self._place(role, request)
        asks = [self._ask(context.fork(), new, request, form) for _ in range(request.choices)]
        choices = []
        for continued, generation in await asyncio.gather(*asks):
            choice = self._choice(continued, generation, request)
            self._answered[extend(digest, choice.message())] = continued
            choices.append(choice)
        return choices

    def report(self, report: Report) -> None:
        """Takes what the agent says of itself; a later report counts over an earlier one."""
        if report.reward is not None:
            self._episode.reward = report.reward
        self._episode.rewards.update(report.rewards)
        self._episode.metrics.update(report.metrics)

    def undelivered(self, choice: Choice) -> None:
        """Says that nobody heard an answer: it is kept, and nothing is learned from it."""
        recorded = self._episode.turns[choice.call]
        recorded.turn = recorded.turn.model_copy(update={"trainable": False})

    @contextmanager
    def serving(self) -> Iterator[None]:
        """A client's request, from its coming to its answer's delivery."""
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
        """Waits for what is still being asked: its answers belong to the trajectory."""
        await self._idle.wait()

    def close(self) -> None:
        """Gives up what is still being generated."""
        for task in self._running:
            task.cancel()

    def _form(self, request: ChatRequest) -> _Form:
        """What the answer follows. A forced call is no text, which a `response_format` is of."""
        if not request.forced:
            return request.json_schema, ("", "")
        try:
            return forced_call(self._dialect.tool_calls, request.forced)
        except (ValueError, RecursionError) as error:
            raise bad_request(f"tool_choice: {error}") from error

    def _place(
        self, role: str, request: ChatRequest
    ) -> tuple[Conversation, tuple[Message, ...], bytes]:
        """The longest conversation that a request goes on with, what is new, and its digest."""
        digests = [start_of(role, request.tools)]
        for message in request.messages:
            digests.append(extend(digests[-1], message))
        if digests[-1] in self._answered:
            raise bad_request("messages: they end with the answer; say something new after it")
        for said in range(len(request.messages) - 1, 0, -1):
            if (known := self._answered.get(digests[said])) is not None:
                return known, request.messages[said:], digests[-1]
        return self._episode.new_conversation(role), request.messages, digests[-1]

    async def _ask(
        self, context: Conversation, new: tuple[Message, ...], request: ChatRequest, form: _Form
    ) -> tuple[Conversation, Generation]:
        """Has the policy answer, within what the episode's tokens leave to the others."""
        most = await self._reserve(context.role, request.max_tokens)
        tools = () if context.tokens else request.tools
        schema, around = form
        asked = context.chat(new, tools=tools, max_tokens=most, json_schema=schema, around=around)
        task = self._loop.create_task(asked, context=self._context)
        self._running.add(task)
        task.add_done_callback(lambda task: self._done(task, most))
        await asyncio.wait({task})  # which goes on, should the client go away
        return context, self._result(task)

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
            task.exception()  # heard, though the client may be gone

    def _result(self, task: asyncio.Task[Generation]) -> Generation:
        """What was generated. ApiError where that can't be: then the attempt ends."""
        if task.cancelled():
            raise ApiError(503, "the episode has ended, or is beginning anew", "episode_ended")
        error = task.exception()
        if error is None:
            return task.result()
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # heard, though nobody may ask
        if isinstance(error, EpisodeStopped):
            code = "context_length_exceeded" if error.ending == "overflow" else error.ending
            raise bad_request(f"the episode ends: {error.ending}", code)
        raise ApiError(503, f"the attempt has failed: {error}", "attempt_failed")

    def _choice(
        self, context: Conversation, generation: Generation, request: ChatRequest
    ) -> Choice:
        assert context.last_call is not None
        turn = self._episode.turns[context.last_call].turn
        content, calls = generation.text, NO_CALLS
        if request.calls_tools:
            content, calls = parse_tool_calls(generation.text, self._dialect.tool_calls)
        return Choice(
            call=context.last_call,
            content=content,
            tool_calls=calls,
            finish="tool_calls" if calls else generation.finish,
            tokens=generation.tokens,
            logprobs=tuple(packed.unpack_f32(turn.logprobs)),
            prompt_tokens=len(context.tokens) - len(generation.tokens),
        )


def make_dialect(tool_calls: Format, models: Mapping[str, str] | None) -> Dialect:
    """How clients are spoken to. UsageError for an unknown format."""
    if tool_calls not in FORMATS:
        raise UsageError(f"tool_calls: {tool_calls!r} is none of {', '.join(FORMATS)}")
    return Dialect(tool_calls, dict(models or {}))


def describe(episode: Episode) -> dict[str, Any]:
    """The task, as its agent is told of it."""
    task = episode.task
    return {
        "number": task.number,
        "sample": task.sample,
        "payload": dict(task.payload),
        "options": dict(task.options),
        "seed": task.seed,
    }


def read_report(value: Any) -> Report:
    """A report. ValueError where it is none."""
    try:
        return Report.model_validate(value)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise ValueError(f"{key}: {problem['msg']}") from error
