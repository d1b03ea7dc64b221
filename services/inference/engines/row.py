"""A sequence in flight: what an engine's thread keeps for each prompt that it continues."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.errors import InfrastructureError
from headrace.services.inference.engine import EngineOutput, EnginePrompt, Finish
from headrace.services.models.json_schema import GrammarState


@dataclass(slots=True, eq=False, weakref_slot=True)
class Row:
    """A sequence in flight."""

    prompt: EnginePrompt
    future: asyncio.Future[EngineOutput]
    limit: int
    """Maximum tokens to draw."""
    at_limit: Literal["length", "overflow"]
    """The finish reason at that limit."""
    grammar: GrammarState | None = None
    """The grammar state of its JSON schema, if it follows one."""
    on_token: Callable[[int], None] | None = None
    """Called in the engine's thread with each drawn token."""
    generator: Any = None
    """The torch engine's random generator, if the prompt has a seed."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kv_version: int | None = None
    """The oldest version that computed a part of its KV cache."""
    cached_tokens: int = 0
    cancelled: bool = False

    @property
    def position(self) -> int:
        """Index of its last token, counted from the start of the prompt."""
        return len(self.prompt.tokens) + len(self.tokens) - 1

    def add(self, token: int, logprob: float, version: int) -> Finish | None:
        """Adds a drawn token. Returns the finish reason if the sequence ends with it."""
        if not math.isfinite(logprob):
            raise InfrastructureError(
                "not_finite",
                f"version {version} of policy {self.prompt.policy!r} drew a token of logprob "
                f"{logprob}: its weights have diverged",
            )
        if self.kv_version is None:
            self.kv_version = version
        if self.grammar is not None:
            self.grammar.accept(token)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if self.on_token is not None:
            self.on_token(token)
        if token in self.prompt.stop_ids:
            return "stop"
        return self.at_limit if len(self.tokens) == self.limit else None

    def output(self, finish: Finish) -> EngineOutput:
        """The tokens drawn so far, with a finish reason."""
        mixed = bool(self.versions) and self.kv_version != self.versions[-1]
        return EngineOutput(
            self.tokens, self.logprobs, self.versions, finish, mixed, self.cached_tokens
        )


Outcome = tuple[Row, EngineOutput | InfrastructureError]
