"""An engine that answers by rule: for tests and benchmarks, with next to no overhead.

Every token's logprob is 0, and its version that of the weights loaded last.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

from headrace.errors import InfrastructureError, UsageError
from headrace.services.inference.engine import (
    Capacity,
    EngineOutput,
    EnginePrompt,
    EngineSetup,
    Weights,
    check_prompt,
)
from headrace.services.models.weights import weights_digest

OPTIONS = ("tokens", "text", "count", "delay_ms", "fail_every")


class ScriptedEngine:
    """An Engine that draws the same tokens again and again.

    Options: `tokens`, the ids it draws in turn ([0]), or `text`, which the model's tokenizer makes
    ids of; `count`, after how many it stops (at the prompt's `max_tokens`); `delay_ms` before each
    token (0); `fail_every`, n to fail each nth prompt (never). Of a prompt with `allowed` ids that
    lack the next one, it draws the first of them.
    """

    def __init__(self, setup: EngineSetup) -> None:
        options = dict(setup.options)
        if unknown := sorted(set(options) - set(OPTIONS)):
            raise UsageError(f"the scripted engine has no option {unknown}; it has {OPTIONS}")
        self._setup = setup
        config = _config(setup)
        self._context = int(config["max_position_embeddings"])
        self._vocabulary = int(config["vocab_size"])
        self._tokens = _tokens(setup)
        self._count: int | None = options.get("count")
        self._delay_s = options.get("delay_ms", 0) / 1000
        self._fail_every: int = options.get("fail_every", 0)
        self._versions: dict[str, int] = {}
        self._prompts = 0
        self._in_flight = 0
        self._closed = False
        self._interrupt = asyncio.Event()
        self._idle = asyncio.Event()
        self._slots = asyncio.Semaphore(setup.slots)

    def capacity(self) -> Capacity:
        """See Engine."""
        free = 0 if self._closed else max(0, self._setup.slots - self._in_flight)
        return Capacity(free, self._context)

    async def generate(self, prompt: EnginePrompt) -> EngineOutput:
        """See Engine."""
        if self._closed:
            raise InfrastructureError("engine_closed", "the engine takes no prompts any more")
        if prompt.policy not in self._versions:
            raise InfrastructureError("no_weights", f"no weights of policy {prompt.policy!r} yet")
        check_prompt(prompt, self._vocabulary)
        if prompt.json_schema:
            raise ValueError("json_schema: the scripted engine says what it is told to")
        self._prompts += 1
        if self._fail_every and self._prompts % self._fail_every == 0:
            raise InfrastructureError("scripted", f"prompt {self._prompts} was to fail")
        self._in_flight += 1
        try:
            async with self._slots:
                return await self._continue(prompt)
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def load(self, weights: Weights) -> None:
        """See Engine. The file must be sound; whose it is, doesn't matter."""
        await asyncio.to_thread(weights_digest, weights.path)
        self._versions[weights.policy] = weights.version

    async def close(self, drain_s: float) -> None:
        """See Engine."""
        self._closed = True
        if self._in_flight:
            self._idle.clear()
            try:
                await asyncio.wait_for(self._idle.wait(), drain_s)
            except TimeoutError:
                self._interrupt.set()
                await self._idle.wait()

    async def _continue(self, prompt: EnginePrompt) -> EngineOutput:
        room = self._context - len(prompt.tokens)
        limit = min(prompt.max_tokens, room)
        finish: Literal["stop", "length", "overflow", "interrupted"]
        finish = "overflow" if prompt.max_tokens > room else "length"
        tokens: list[int] = []
        versions: list[int] = []
        while len(tokens) < limit:
            if self._delay_s and await self._interrupted():
                finish = "interrupted"
                break
            token = self._tokens[len(tokens) % len(self._tokens)]
            if prompt.allowed and token not in prompt.allowed:
                token = prompt.allowed[0]
            tokens.append(token)
            versions.append(self._versions[prompt.policy])
            if token in prompt.stop_ids or len(tokens) == self._count:
                finish = "stop"
                break
        mixed = bool(versions) and versions[0] != versions[-1]
        return EngineOutput(tokens, [0.0] * len(tokens), versions, finish, mixed)

    async def _interrupted(self) -> bool:
        """Waits for the delay; True at once where the engine is closed meanwhile."""
        try:
            async with asyncio.timeout(self._delay_s):
                await self._interrupt.wait()
        except TimeoutError:
            return False
        return True


def _config(setup: EngineSetup) -> dict[str, Any]:
    try:
        config = json.loads((setup.model / "config.json").read_text("utf-8"))
        return {key: config[key] for key in ("vocab_size", "max_position_embeddings")}
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{setup.model} has no usable config.json: {error!r}") from error


def _tokens(setup: EngineSetup) -> list[int]:
    """The ids to draw. UsageError where the options name none, or both kinds."""
    tokens, text = setup.options.get("tokens"), setup.options.get("text")
    if tokens is not None and text is not None:
        raise UsageError("the scripted engine takes `tokens` or `text`, not both")
    if text is not None:
        # Imported here: the library is needed for `text` alone.
        from headrace.services.inference.tokenizer import Tokenizer

        tokens = Tokenizer(setup.model).encode(text)
    tokens = [0] if tokens is None else list(tokens)
    if not tokens:
        raise UsageError("the scripted engine needs at least one token to draw")
    return tokens
