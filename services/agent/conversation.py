"""A conversation with one policy: the texts, the answers, and the token ids of both."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.schemas import packed
from headrace.schemas.events import GenerationCompleted, GenerationRequested, Sampling, Turn
from headrace.services.agent.awaiting import must_await
from headrace.services.agent.turns import RecordedTurn


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer of a policy."""

    text: str
    """The answer as text, without the stop token."""
    tokens: tuple[int, ...]
    """The ids that were sampled, the stop token included."""
    finish: Literal["stop", "length"]
    """`stop`: the policy ended its answer; `length`: the answer reached `max_tokens`."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is appended to a conversation, and what the answer must look like."""

    text: str = ""
    chat: str = ""
    """Instead of `text`: messages and tools, as JSON, for the model's own chat template."""
    max_tokens: int | None = None
    demonstration: str | None = None
    json_schema: Mapping[str, Any] | None = None
    around: tuple[str, str] = ("", "")
    """The texts that the answer has before and after the JSON of `json_schema`."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What must be known of a prompt while the policy answers. It has not the prompt's tokens."""

    call: str
    policy: str
    sampling: Sampling
    demonstrated: bool
    pinned: bool

    @classmethod
    def of(cls, request: GenerationRequested) -> Asked:
        """Returns it for a request."""
        demonstrated, pinned = request.demonstration is not None, request.pinned is not None
        return cls(request.call, request.policy, request.sampling, demonstrated, pinned)


Ask = Callable[["Conversation", Prompt], Awaitable[Generation]]
"""Appends a prompt and the policy's answer to a conversation. Returns the answer."""


@dataclass(eq=False)
class Conversation:
    """A conversation with one policy, kept as token ids that are only ever appended to.

    No text is tokenized twice, so training sees exactly the ids that the policy saw and sampled.
    `Episode.conversation` and `Episode.new_conversation` make conversations.
    """

    ask: Ask
    role: str
    """The role that the policy plays in the task."""
    parts: list[bytes] = field(default_factory=list)
    """All ids so far, in order, packed (i32[]): those of the prompts and those that were sampled.
    The turns have the same objects, so a conversation takes no memory of its own for them."""
    last_call: str | None = None
    """Call path of the newest turn; None while the conversation is empty."""

    @property
    def tokens(self) -> list[int]:
        """All ids so far, in a new list, which takes about 40 bytes for each of them."""
        return packed.unpack_i32(self.packed_tokens)

    @property
    def packed_tokens(self) -> bytes:
        """All ids so far, packed."""
        return b"".join(self.parts)

    @property
    def length(self) -> int:
        """How many ids there are so far."""
        return sum(map(packed.count, self.parts))

    @must_await
    async def generate(
        self,
        text: str = "",
        *,
        max_tokens: int | None = None,
        demonstration: str | None = None,
        json_schema: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Appends `text`, and then the policy's answer to it, which is returned.

        - `max_tokens` limits the answer, to at least 1 token. The recipe's sampling and the tokens
          that the episode has left limit it, too.
        - `json_schema` makes the answer JSON that follows this JSON schema. If the limit cuts the
          answer, it is a beginning of such JSON. The sampling needs a stop token.
        - `demonstration` is the answer that the policy should give. The policy is not asked:
          training teaches it this answer, whatever the episode's reward. A stop token of the
          sampling is added at the end. If the sampling could not draw the text, the attempt fails.

        The episode ends, by an exception that an agent must not catch, if it has no turns or tokens
        left, or if the conversation no longer fits into the model's context. Raises ValueError if
        `max_tokens` is less than 1.
        """
        return await self.ask(self, Prompt(text, "", max_tokens, demonstration, json_schema))

    @must_await
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
        """Appends messages by the model's own chat template, and then the policy's answer.

        - `messages` are the new messages only, each with `role` and `content`. Earlier ones stay
          the ids that they were; the policy's own answers are among them already.
        - `tools` describes tools as chat templates take them. The template shows them only at the
          beginning of a conversation.
        - `around` is a pair of texts that the answer has before and after the JSON of
          `json_schema`: with the right tags the JSON is a tool call.

        The answer is plain text: if the policy calls a tool, the text contains the call as the
        policy spells it. The same holds for `demonstration`. The other arguments, and the ways in
        which the episode can end, are those of `generate`.
        """
        tree = {"messages": list(messages)} | ({"tools": list(tools)} if tools else {})
        chat = json.dumps(tree, sort_keys=True, ensure_ascii=False)
        form = json_schema, around
        asking = self.ask(self, Prompt("", chat, max_tokens, demonstration, *form))
        del messages, tree, chat  # they may be large, and the answer may take long
        return await asking

    def fork(self) -> Conversation:
        """Returns a copy that continues from here. Neither sees what the other appends."""
        return Conversation(self.ask, self.role, list(self.parts), self.last_call)

    def append(self, asked: Asked, answer: GenerationCompleted) -> RecordedTurn:
        """Appends the ids of a prompt and its answer. Returns the turn. The runtime calls this."""
        packed.unpack_i32(answer.prompt_added)  # raises ValueError if it is no array
        self.parts += (answer.prompt_added, answer.tokens)
        turn = Turn(
            call=asked.call,
            policy=asked.policy,
            role=self.role,
            context=answer.prompt_added,
            tokens=answer.tokens,
            logprobs=answer.logprobs,
            versions=answer.versions,
            kv=answer.kv,
            finish=answer.finish,
            text=answer.text,
            demonstrated=asked.demonstrated,
        )
        oldest = packed.oldest(answer.versions)
        parent, self.last_call = self.last_call, asked.call
        return RecordedTurn(
            turn, parent, self.length, -1 if oldest is None else oldest, asked.sampling
        )
