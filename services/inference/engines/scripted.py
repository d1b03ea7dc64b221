"""An engine with fixed answers, for tests and benchmarks. It has almost no overhead.

The logprob of every token is 0, and its version is that of the weights loaded last.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

from headrace.errors import InfrastructureError, UsageError
from headrace.schemas.recipe.resources.engine_settings import ScriptedOptions, engine_options
from headrace.services.inference.engine import (
    Capacity,
    Engine,
    EngineOutput,
    EnginePrompt,
    EngineSetup,
    Finish,
    ScorePrompt,
    Weights,
    check_prompt,
    check_score,
)
from headrace.services.models.weights import weights_digest


class ScriptedEngine(Engine):
    """An Engine that repeats the same tokens, for tests and benchmarks.

    If a prompt does not allow the next id, the engine draws the prompt's first `allowed` id.
    """

    def __init__(self, setup: EngineSetup) -> None:
        options = engine_options(ScriptedOptions, setup.options)
        self._setup = setup
        config = _config(setup)
        self._context = int(config["max_position_embeddings"])
        self._vocabulary = int(config["vocab_size"])
        self._tokens = _tokens(setup, options)
        self._count = options.count
        self._delay_s = options.delay_ms / 1000
        self._fail_every = options.fail_every
        self._versions: dict[str, int] = {}
        self._prompts = 0
        self._in_flight = 0
        self._closed = False
        self._interrupt = asyncio.Event()
        self._idle = asyncio.Event()
        self._slots = asyncio.Semaphore(setup.slots)

    def capacity(self) -> Capacity:
        free = 0 if self._closed else max(0, self._setup.slots - self._in_flight)
        return Capacity(free, self._context)

    async def generate(self, prompt: EnginePrompt) -> EngineOutput:
        self._require_served(prompt.policy)
        check_prompt(prompt, self._vocabulary)
        _require_free(prompt.json_schema)
        return await self._in_slot(self._continue(prompt))

    async def score(self, prompt: ScorePrompt) -> EngineOutput:
        self._require_served(prompt.policy)
        check_score(prompt, self._vocabulary)
        for run in prompt.runs:
            _require_free(run.json_schema)
        return await self._in_slot(self._score(prompt))

    def _require_served(self, policy: str) -> None:
        if self._closed:
            raise InfrastructureError("engine_closed", "the engine is closed: it takes no prompts")
        if policy not in self._versions:
            raise InfrastructureError("no_weights", f"no weights of policy {policy!r} yet")

    async def _in_slot(self, work: Coroutine[Any, Any, EngineOutput]) -> EngineOutput:
        self._prompts += 1
        if self._fail_every and self._prompts % self._fail_every == 0:
            work.close()
            raise InfrastructureError(
                "scripted", f"prompt {self._prompts} fails, as the option `fail_every` asks"
            )
        self._in_flight += 1
        try:
            async with self._slots:
                return await work
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def load(self, weights: Weights) -> None:
        """The file must be a valid safetensors file of any model."""
        await asyncio.to_thread(weights_digest, weights.path)
        self._versions[weights.policy] = weights.version

    async def close(self, drain_s: float) -> None:
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
        finish: Finish = "overflow" if prompt.max_tokens > room else "length"
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

    async def _score(self, prompt: ScorePrompt) -> EngineOutput:
        if len(prompt.tokens) > self._context:
            return EngineOutput([], [], [], "overflow")
        if self._delay_s and await self._interrupted():
            return EngineOutput([], [], [], "interrupted")
        count = sum(run.count for run in prompt.runs)
        return EngineOutput([], [0.0] * count, [self._versions[prompt.policy]] * count, "stop")

    async def _interrupted(self) -> bool:
        """Waits for the delay. Returns True at once if the engine is closed meanwhile."""
        try:
            async with asyncio.timeout(self._delay_s):
                await self._interrupt.wait()
        except TimeoutError:
            return False
        return True


def _require_free(json_schema: str) -> None:
    if json_schema:
        raise ValueError(
            "json_schema: the scripted engine can't follow a schema: use torch or vllm"
        )


def _config(setup: EngineSetup) -> dict[str, Any]:
    try:
        config = json.loads((setup.model / "config.json").read_text("utf-8"))
        return {key: config[key] for key in ("vocab_size", "max_position_embeddings")}
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{setup.model} has no usable config.json: {error!r}") from error


def _tokens(setup: EngineSetup, options: ScriptedOptions) -> list[int]:
    """The ids to draw."""
    if options.text is None:
        return list(options.tokens or (0,))
    # Imported here because only `text` needs the library.
    from headrace.services.inference.tokenizer import Tokenizer

    return Tokenizer(setup.model).encode(options.text)
