"""A sequence in the making: what an engine's thread keeps of each prompt that it continues."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.errors import InfrastructureError
from headrace.services.inference.engine import EngineOutput, EnginePrompt
from headrace.services.models.json_schema import GrammarState

Finish = Literal["stop", "length", "overflow", "interrupted"]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Row:
    """A sequence in the making."""

    prompt: EnginePrompt
    future: asyncio.Future[EngineOutput]
    limit: int
    """Most tokens to draw."""
    at_limit: Literal["length", "overflow"]
    """How it finishes there."""
    grammar: GrammarState | None = None
    """Where it stands in its JSON schema, if it follows one."""
    generator: Any = None
    """The torch engine's, of a prompt with a seed of its own."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kv_version: int | None = None
    """The oldest version that computed part of its KV cache."""
    cached_tokens: int = 0
    cancelled: bool = False

    @property
    def position(self) -> int:
        """Index of its last token: prompt and drawn ones."""
        return len(self.prompt.tokens) + len(self.tokens) - 1

    def add(self, token: int, logprob: float, version: int) -> Finish | None:
        """Takes a drawn token; says whether, and how, the sequence ends with it."""
        if not math.isfinite(logprob):
            raise InfrastructureError(
                "not_finite",
                f"policy {self.prompt.policy!r} version {version} drew a token of logprob "
                f"{logprob}: its weights have diverged",
            )
        if self.kv_version is None:
            self.kv_version = version
        if self.grammar is not None:
            self.grammar.accept(token)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.prompt.stop_ids:
            return "stop"
        return self.at_limit if len(self.tokens) == self.limit else None

    def generation(self, finish: Finish) -> EngineOutput:
        """What it is so far."""
        mixed = bool(self.versions) and self.kv_version != self.versions[-1]
        return EngineOutput(
            self.tokens, self.logprobs, self.versions, finish, mixed, self.cached_tokens
        )


Outcome = tuple[Row, EngineOutput | InfrastructureError]
