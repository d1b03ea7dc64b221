"""Turns a GenerationRequested into its answer: tokenizes, generates, and reports failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

from headrace.errors import InfrastructureError
from headrace.schemas import packed
from headrace.schemas.events import Failure, GenerationCompleted, GenerationRequested
from headrace.services.base import clock
from headrace.services.inference.demonstration import demonstrate
from headrace.services.inference.engine import Engine, EngineOutput, EnginePrompt, ScorePrompt
from headrace.services.inference.engine_slots import Slot, Slots
from headrace.services.inference.inference_metrics import PolicyMetrics
from headrace.services.inference.score_prompt import score_prompt, scoring
from headrace.services.inference.tokenizer import Tokenizer
from headrace.services.worker.limits.shared_limits import Permits

LOAD_WAIT_S = 60.0
"""Most seconds that a prompt waits for its `minimum` version. It waits for at most a quarter of the
time that its episode has left."""

NEWEST = 64
"""The mean time of a generation is that of about so many of the newest ones."""


@dataclass(eq=False)
class ServedPolicy:
    """One policy that this worker serves."""

    name: str
    engine: Engine
    slots: Slots
    tokenizer: Tokenizer
    worker_id: str
    permits: Permits | None = None
    """What its calls need, if the policy has limits."""
    version: int = -1
    """The version that the engine draws with; -1 before the first load."""
    run_s: float = 0.0
    """Mean time of the newest generations in seconds, without waiting; 0 before the first one."""
    behind: int = 0
    """Prompts that wait until the engine has the version that they ask for."""
    metrics: PolicyMetrics = field(init=False)

    def __post_init__(self) -> None:
        if self.permits is not None:
            self.permits.listen(self.slots.notify)
        self.metrics = PolicyMetrics(self.name)
        self._loaded = asyncio.Event()
        self._published = -1
        self._measured = 0
        self._given_up = -1
        """The newest published version for which a prompt waited in vain: no other prompt waits for
        it."""

    def share(self) -> float:
        """Returns how many calls the limits allow this worker at the same time."""
        return inf if self.permits is None else self.permits.share()

    def on_published(self, version: int) -> None:
        """Notes that a version was published. The engine may load it later, or never."""
        self._published = max(self._published, version)

    def on_loaded(self, version: int) -> None:
        """Notes that the engine draws with another version from now on."""
        self.version = version
        self.slots.notify()
        self._loaded.set()
        self._loaded = asyncio.Event()

    def is_behind(self, request: GenerationRequested) -> bool:
        """Whether a request should wait until the engine has the version that it asks for."""
        newest = max(self.version, self._given_up)
        return request.pinned is None and newest < request.minimum

    async def catch_up(self, request: GenerationRequested) -> None:
        """Waits until the engine has the version that a request asks for, but not for long."""
        left_s = request.expires_at / 1000 - clock.now()
        self.behind += 1
        try:
            async with asyncio.timeout(min(LOAD_WAIT_S, max(0.0, left_s / 4))):
                while self.is_behind(request):
                    await self._loaded.wait()
                return
        except TimeoutError:
            pass
        finally:
            self.behind -= 1
        # Any team may ask for any version. One that does not exist must not end all waiting.
        self._given_up = max(self._given_up, min(request.minimum, self._published))

    async def complete(
        self, request: GenerationRequested, slot: Slot, queue_s: float
    ) -> GenerationCompleted | None:
        """Answers a request. A failure is an answer too. Returns None if the engine was closed.

        Raises LeaseOver if the worker must not go on: the request is to be answered again.
        """
        began = asyncio.get_running_loop().time()
        prompt: EnginePrompt | ScorePrompt
        added: list[int] = []
        try:
            if request.pinned is not None and request.pinned != self.version:
                raise InfrastructureError(
                    "version_unavailable",
                    f"the request is pinned to version {request.pinned}, but the worker serves "
                    f"version {self.version}",
                )
            if request.kind == "score":
                prompt = score_prompt(request, self.tokenizer)
                score = partial(scoring(self.engine).score, prompt)
                generation = await self._in_time(score, request.expires_at, slot)
            elif request.demonstration is None:
                prompt, added = self._prompt(request)
                generate = partial(self.engine.generate, prompt)
                generation = await self._in_time(generate, request.expires_at, slot)
            else:
                prompt, added = self._prompt(request)
                demonstrated = self.tokenizer.encode_demonstration(
                    request.demonstration, request.sampling.stop
                )
                context = self.engine.capacity().context
                generation = demonstrate(prompt, demonstrated, context)
        except InfrastructureError as error:
            return self.failed(request, error, queue_s)
        except ValueError as error:
            failure = Failure(origin="operator", code="bad_tokens", message=str(error))
            return self._failed(request, failure, queue_s)
        if generation.finish == "interrupted":
            return None
        run_s = asyncio.get_running_loop().time() - began
        return self._answer(request, prompt, added, generation, (queue_s, run_s))

    def _prompt(self, request: GenerationRequested) -> tuple[EnginePrompt, list[int]]:
        """Returns the prompt and the ids of its new text. Raises ValueError if it is invalid."""
        sampling = request.sampling
        context = packed.unpack_i32(request.tokens)
        added = self._added(request, context)
        prompt = EnginePrompt(
            policy=self.name,
            tokens=context + added,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop_ids=(
                *packed.unpack_i32(sampling.stop_ids),
                *self.tokenizer.stop_ids(sampling.stop),
            ),
            allowed=packed.unpack_i32(sampling.allowed),
            seed=sampling.seed,
            json_schema=sampling.json_schema,
            around=(sampling.json_before, sampling.json_after),
            priority=request.priority,
        )
        return prompt, added

    def _added(self, request: GenerationRequested, context: Sequence[int]) -> list[int]:
        """Returns the ids of the new text. Raises ValueError if it can't be tokenized."""
        if request.chat and request.text:
            raise ValueError("a request may append text or messages, not both")
        if request.chat:
            return self.tokenizer.chat(request.chat, context)
        return self.tokenizer.encode_content(request.text) if request.text else []

    async def _in_time(
        self, work: Callable[[], Awaitable[EngineOutput]], expires_at: int, slot: Slot
    ) -> EngineOutput:
        left_s = expires_at / 1000 - clock.now()
        if left_s <= 0:
            raise InfrastructureError("expired", f"{-left_s:.1f} s ago", retryable=False)
        try:
            async with asyncio.timeout(left_s), slot.permitted():
                slot.start()
                return await work()
        except TimeoutError:
            raise InfrastructureError("expired", "in the engine", retryable=False) from None

    def _answer(
        self,
        request: GenerationRequested,
        prompt: EnginePrompt | ScorePrompt,
        added: list[int],
        generation: EngineOutput,
        times: tuple[float, float],
    ) -> GenerationCompleted:
        assert generation.finish != "interrupted"
        tokens = generation.tokens
        stops = prompt.stop_ids if isinstance(prompt, EnginePrompt) else ()
        shown = tokens[:-1] if tokens and tokens[-1] in stops else tokens
        queue_s, run_s = times
        self.metrics.answered(generation.finish)
        self.metrics.prompt_tokens.inc(len(prompt.tokens))
        counter = self.metrics.generated_tokens if tokens else self.metrics.scored_tokens
        counter.inc(len(generation.logprobs))
        self.metrics.queue_seconds.observe(queue_s)
        self.metrics.run_seconds.observe(run_s)
        if request.demonstration is None:
            self._measured = min(self._measured + 1, NEWEST)
            self.run_s += (run_s - self.run_s) / self._measured
        return self._completed(
            request,
            queue_s,
            finish=generation.finish,
            prompt_added=packed.pack_i32(added),
            tokens=packed.pack_i32(tokens),
            text=self.tokenizer.decode(shown),
            logprobs=packed.pack_f32(generation.logprobs),
            versions=packed.pack_spans(generation.versions),
            kv="mixed" if generation.mixed else "fresh",
            prompt_tokens=len(prompt.tokens),
            cached_tokens=generation.cached_tokens,
            run_ms=int(run_s * 1000),
        )

    def failed(
        self, request: GenerationRequested, error: InfrastructureError, queue_s: float
    ) -> GenerationCompleted:
        """Returns the answer to a request that the infrastructure can't serve."""
        failure = Failure(
            origin="infrastructure",
            code=error.code,
            message=error.message,
            retryable=error.retryable,
        )
        return self._failed(request, failure, queue_s)

    def _failed(
        self, request: GenerationRequested, failure: Failure, queue_s: float
    ) -> GenerationCompleted:
        self.metrics.answered(failure.code)
        return self._completed(request, queue_s, finish="failed", failure=failure)

    def _completed(
        self, request: GenerationRequested, queue_s: float, **fields: Any
    ) -> GenerationCompleted:
        """Returns the answer to a request: the fields that every answer has, and `fields`."""
        return GenerationCompleted(
            task=request.task,
            sample=request.sample,
            attempt=request.attempt,
            call=request.call,
            digest=request.digest,
            policy=self.name,
            worker=self.worker_id,
            queue_ms=int(queue_s * 1000),
            **fields,
        )
