"""A conversation with one policy: what is said to it, what it answers, and the ids of both."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.schemas import packed
from headrace.schemas.events import GenerationCompleted, GenerationRequested, Turn
from headrace.services.agent.turns import RecordedTurn


@dataclass(frozen=True, slots=True)
class Generation:
    """What the policy said."""

    text: str
    tokens: tuple[int, ...]
    finish: Literal["stop", "length"]
    """`length`: `max_tokens` was reached."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a policy is told, and what its answer must be."""

    text: str = ""
    chat: str = ""
    """In place of `text`: messages and tools, as JSON, for the model's own chat template."""
    max_tokens: int | None = None
    demonstration: str | None = None
    json_schema: Mapping[str, Any] | None = None
    around: tuple[str, str] = ("", "")
    """What comes before the JSON, and after it."""


Ask = Callable[["Conversation", Prompt], Awaitable[Generation]]
"""Has a policy go on with a context, which it lengthens."""


@dataclass(eq=False)
class Conversation:
    """A conversation with one policy as append-only token ids: never retokenized, forkable."""

    ask: Ask
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
        return await self.ask(self, Prompt(text, "", max_tokens, demonstration, json_schema))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        demonstration: str | None = None,
        json_schema: Mapping[str, Any] | None = None,
        around: tuple[str, str] = ("", ""),
    ) -> Generation:
        """Appends new messages by the model's own chat template, and what the policy says to them.

        Only what is new: what was said before stays as the ids that it was. `tools` are told of in
        an empty context alone. The policy's answer is text, tool calls included as it spells them;
        so is a `demonstration` of it, and `json_schema` binds it, as in `generate`; what is
        `around` the JSON, before and after it, makes it a call.
        """
        tree = {"messages": list(messages)} | ({"tools": list(tools)} if tools else {})
        chat = json.dumps(tree, sort_keys=True, ensure_ascii=False)
        form = json_schema, around
        return await self.ask(self, Prompt("", chat, max_tokens, demonstration, *form))

    def fork(self) -> Conversation:
        """A second continuation from here; neither sees the other's tokens."""
        return Conversation(self.ask, self.role, list(self.tokens), self.last_call)

    def append(
        self, request: GenerationRequested, answer: GenerationCompleted, sampled: Sequence[int]
    ) -> RecordedTurn:
        """Goes on with an answer, whose tokens are `sampled`. The turn that it makes."""
        self.tokens += packed.unpack_i32(answer.prompt_added)
        self.tokens += sampled
        turn = Turn(
            call=request.call,
            policy=request.policy,
            role=self.role,
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
        recorded = RecordedTurn(
            turn,
            self.last_call,
            len(self.tokens),
            -1 if oldest is None else oldest,
            request.sampling,
        )
        self.last_call = request.call
        return recorded
