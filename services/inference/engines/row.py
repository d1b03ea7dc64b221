"""A sequence in flight: what an engine's thread keeps for each prompt that it continues."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.errors import InfrastructureError
from headrace.services.inference.engine import EngineOutput, EnginePrompt, Finish, ScorePrompt
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


@dataclass(slots=True, eq=False, weakref_slot=True)
class ScoreRow:
    """A sequence to score."""

    prompt: ScorePrompt
    future: asyncio.Future[EngineOutput]
    grammars: Sequence[GrammarState | None]
    """The grammar state at the start of each run, if it follows a JSON schema."""
    kv_version: int | None = None
    """As in Row."""
    cancelled: bool = False

    def output(self, finish: Finish) -> EngineOutput:
        """No scores, with a finish reason."""
        return EngineOutput([], [], [], finish)

    def scored(self, logprobs: list[float], version: int) -> EngineOutput:
        """The scores by a version. Raises InfrastructureError if one is not finite."""
        wrong = next((one for one in logprobs if not math.isfinite(one)), None)
        if wrong is not None:
            raise InfrastructureError(
                "not_finite",
                f"version {version} of policy {self.prompt.policy!r} gave a token the logprob "
                f"{wrong}: its masks exclude the token, or its weights have diverged",
                retryable=False,
            )
        mixed = self.kv_version not in (None, version)
        return EngineOutput([], logprobs, [version] * len(logprobs), "stop", mixed)


AnyRow = Row | ScoreRow
Outcome = tuple[AnyRow, EngineOutput | InfrastructureError]
