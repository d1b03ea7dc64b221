"""An engine that asks a server with OpenAI's API, for teams that run a fleet of their own.

Prompts go to `/completions` as token ids; token ids and logprobs come back. The server's
version changes only through `weights_url`, or never.

What it does not do: scores, JSON schemas, adapters, and exact versions of tokens that are drawn
while weights change. Such an answer has the oldest version that may have drawn a token of it, for
all of its tokens, and is marked as mixed.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from headrace.errors import InfrastructureError, UsageError
from headrace.schemas.recipe.resources.engine_settings import OpenaiOptions, engine_options
from headrace.services.inference.engine import (
    Capacity,
    Engine,
    EngineOutput,
    EnginePrompt,
    EngineSetup,
    Finish,
    Weights,
    check_prompt,
)
from headrace.services.inference.engines.openai.completion import (
    PROBE_TOKENS,
    completion_body,
    read_completion,
    require_usable,
)
from headrace.services.inference.engines.openai.completion_client import CompletionClient
from headrace.services.models.torch_models import read_config
from headrace.services.models.weights import weights_digest


class OpenaiEngine(Engine):
    """An Engine whose model runs in a server of yours."""

    def __init__(self, setup: EngineSetup) -> None:
        """Raises UsageError for wrong options, or if the policy's weights are an adapter."""
        self._options = engine_options(OpenaiOptions, setup.options)
        if setup.adapters:
            raise UsageError("the engine `openai` takes whole weights: remove `lora`")
        self._vocabulary = int(read_config(setup.model).vocab_size)
        self._client = CompletionClient(self._options)
        self._setup = setup
        self._context = 0
        self._running = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._prompts = 0
        self._policies: dict[str, int] = {}
        """The version that is acknowledged, by policy."""
        self._changing = False
        """Whether a version was announced that is not acknowledged: the server may serve it."""
        self._tasks: set[asyncio.Task[EngineOutput]] = set()
        self._closed = False

    def capacity(self) -> Capacity:
        free = 0 if self._closed else max(0, self._setup.slots - self._running)
        return Capacity(free, self._context)

    async def generate(self, prompt: EnginePrompt) -> EngineOutput:
        self._require_open()
        if prompt.policy not in self._policies:
            raise InfrastructureError("no_weights", f"no weights of policy {prompt.policy!r} yet")
        check_prompt(prompt, self._vocabulary)
        if prompt.json_schema:
            raise ValueError(
                "json_schema: the engine `openai` can't follow a schema as the trainer computes "
                "it: use torch or vllm"
            )
        async with self._slot(prompt.priority):
            self._require_open()
            task = asyncio.create_task(self._continue(prompt))
            self._tasks.add(task)
            try:
                return await task
            except asyncio.CancelledError:
                if not self._closed:
                    raise
                return EngineOutput([], [], [], "interrupted")
            finally:
                task.cancel()
                self._tasks.discard(task)

    async def load(self, weights: Weights) -> None:
        """Announces a version, and returns when the server serves it.

        Without `weights_url` the first version is taken as the one that the server has, and
        another one raises UsageError. The first load also tries what the server can do.
        """
        self._require_open()
        known = self._policies.get(weights.policy)
        # Read in any case: damaged weights must not reach the server.
        digest = await asyncio.to_thread(weights_digest, weights.path)
        if self._options.weights_url is not None:
            await self._announce(weights, digest)
        elif known not in (None, weights.version):
            raise UsageError(
                f"the server of policy {weights.policy!r} serves one fixed version, {known}, and "
                f"version {weights.version} was published: set engine.options.weights_url"
            )
        if not self._context:
            await self._probe(weights.policy)
        self._policies[weights.policy] = weights.version
        self._changing = False

    async def close(self, drain_s: float) -> None:
        self._closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=drain_s)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._client.close()

    def _require_open(self) -> None:
        if self._closed:
            raise InfrastructureError("engine_closed", "the engine is closed: it takes no prompts")

    @asynccontextmanager
    async def _slot(self, priority: int) -> AsyncIterator[None]:
        """Holds a slot. If prompts wait for one, the highest priority goes first."""
        if self._running >= self._setup.slots:
            self._prompts += 1
            free: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (-priority, self._prompts, free))
            try:
                await free
            except asyncio.CancelledError:
                if free.done() and not free.cancelled():
                    self._free()
                raise
        else:
            self._running += 1
        try:
            yield
        finally:
            self._free()

    def _free(self) -> None:
        """Gives a slot to the first prompt that still waits, or frees it."""
        while self._waiting:
            free = heapq.heappop(self._waiting)[2]
            if not free.done():
                free.set_result(None)
                return
        self._running -= 1

    async def _continue(self, prompt: EnginePrompt) -> EngineOutput:
        room = self._context - len(prompt.tokens)
        limit = min(prompt.max_tokens, room)
        if limit < 1:
            return EngineOutput([], [], [], "overflow")
        version, changing = self._policies[prompt.policy], self._changing
        found = read_completion(
            await self._client.complete(self._body(prompt, limit)),
            *(prompt, limit, self._vocabulary),
        )
        after = self._policies[prompt.policy]
        mixed = changing or self._changing or after != version
        cut: Finish = "overflow" if prompt.max_tokens > room else "length"
        finish: Finish = "stop" if found.stopped else cut
        versions = [version] * len(found.tokens)
        return EngineOutput(
            found.tokens, found.logprobs, versions, finish, mixed, found.cached_tokens
        )

    def _body(self, prompt: EnginePrompt, limit: int) -> dict[str, Any]:
        return completion_body(self._options.served_model, prompt, limit) | self._options.extra

    async def _announce(self, weights: Weights, digest: bytes) -> None:
        """Posts a version. Raises InfrastructureError unless the answer names the same version."""
        if others := sorted(set(self._policies) - {weights.policy}):
            raise UsageError(
                f"the policies {others[0]!r} and {weights.policy!r} have the same weights_url: "
                "give each a server of its own"
            )
        self._changing = True
        answer = await self._client.announce(
            {
                "policy": weights.policy,
                "version": weights.version,
                "path": str(weights.path),
                "digest": digest.hex(),
            }
        )
        if answer.get("version") != weights.version:
            raise InfrastructureError(
                "engine_failed",
                f"{self._options.weights_url} was asked to serve version {weights.version}, and "
                f'answered {answer!r:.200}: it must answer {{"version": {weights.version}}}',
            )

    async def _probe(self, policy: str) -> None:
        """Finds the context and tries one prompt. Raises UsageError if it can't use the server."""
        context = self._options.context or await self._served_context()
        prompt = EnginePrompt(policy, [0], PROBE_TOKENS, temperature=0.5, allowed=(1,))
        try:
            answer = await self._client.complete(self._body(prompt, PROBE_TOKENS))
        except InfrastructureError as error:
            if error.retryable:
                raise
            raise UsageError(f"the server of the engine `openai`: {error.message}") from error
        require_usable(answer, replace(prompt, stop_ids=()), self._vocabulary)
        self._context = context

    async def _served_context(self) -> int:
        models = await self._client.models()
        names = [one.get("id") for one in models]
        for one in models:
            if one.get("id") == self._options.served_model:
                context = one.get("max_model_len")
                if isinstance(context, int) and context > 0:
                    return context
                raise UsageError(
                    f"{self._options.url} does not say how long the context of "
                    f"{self._options.served_model!r} is: set engine.options.context"
                )
        raise UsageError(
            f"{self._options.url} has no model {self._options.served_model!r}; it has {names}: set "
            "engine.options.served_model"
        )
