"""Continuous batching with transformers: any causal language model, on CPU or one GPU.

One thread runs the models, of every policy one. Between two steps it takes what has come in:
prompts join, cancelled ones leave, weights change. The asyncio loop never waits for torch.

It doesn't guarantee: prefix caching, paged memory, models with sliding-window or linear
attention (refused), or the same draw for the same seed in another batch.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from services.errors import BlobError, HeadraceError, InfrastructureError, UsageError
from services.inference.engine import (
    Capacity,
    EngineSetup,
    Generation,
    Prompt,
    Weights,
    check_prompt,
)
from services.inference.torch_batch import Outcome, PolicyBatch, Row

logger = logging.getLogger(__name__)

TURN_TOKENS = 16_384
"""Most prompt tokens read between two steps: long prompts must not starve what is under way."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Change:
    """New weights of a policy, checked; `batch` is new for a policy's first."""

    policy: str
    version: int
    batch: PolicyBatch
    state: Mapping[str, Tensor]
    future: asyncio.Future[None]


class TorchEngine:
    """An Engine on transformers. Making it reads the configuration, and may block.

    Options: `context`, in tokens, where it shall be shorter than the model's own.
    """

    def __init__(self, setup: EngineSetup) -> None:
        if unknown := sorted(set(setup.options) - {"context"}):
            raise UsageError(f"the torch engine has no option {unknown}; it has: context")
        if setup.dtype not in DTYPES:
            raise UsageError(f"no dtype {setup.dtype!r} for the torch engine: {sorted(DTYPES)}")
        self._setup = setup
        self._config = _config(setup)
        self._context = _context(setup, self._config)
        self._vocabulary = int(self._config.vocab_size)
        self._device = _device(setup.device)
        self._batches: dict[str, PolicyBatch] = {}
        self._in_flight: set[asyncio.Future[Generation]] = set()
        self._loading = asyncio.Lock()
        self._changing: asyncio.Future[None] | None = None
        self._closed = False
        self._death: HeadraceError | None = None
        self._inbox: queue.SimpleQueue[Row | _Change | None] = queue.SimpleQueue()
        self._waiting: deque[Row] = deque()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def capacity(self) -> Capacity:
        free = 0 if self._closed else self._setup.slots - len(self._in_flight)
        return Capacity(free_slots=max(0, free), context=self._context)

    async def generate(self, prompt: Prompt) -> Generation:
        if self._closed:
            raise InfrastructureError("engine_closed", "the engine takes no prompts any more")
        if self._death is not None:
            raise self._death
        if prompt.policy not in self._batches:
            raise InfrastructureError("no_weights", f"no weights of policy {prompt.policy!r} yet")
        check_prompt(prompt, self._vocabulary)
        room = self._context - len(prompt.tokens)
        if room <= 0:
            return Generation([], [], [], "overflow")
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        row = Row(
            prompt,
            future,
            limit=min(prompt.max_tokens, room),
            at_limit="length" if prompt.max_tokens <= room else "overflow",
        )
        if prompt.seed is not None and prompt.temperature:
            row.generator = torch.Generator(self._device).manual_seed(prompt.seed)
        self._in_flight.add(future)
        self._put(row)
        try:
            return await future
        finally:
            row.cancelled = True
            self._in_flight.discard(future)

    async def load(self, weights: Weights) -> None:
        async with self._loading:
            known = self._batches.get(weights.policy)
            batch, state = await asyncio.to_thread(self._read, weights, known)
            if self._closed:
                raise InfrastructureError("engine_closed", "the engine takes no weights any more")
            if self._death is not None:
                raise self._death
            self._changing = asyncio.get_running_loop().create_future()
            self._put(_Change(weights.policy, weights.version, batch, state, self._changing))
            await self._changing
            self._batches[weights.policy] = batch

    async def close(self, drain_s: float) -> None:
        self._closed = True
        if self._in_flight:
            await asyncio.wait(list(self._in_flight), timeout=drain_s)
        if self._thread is not None:
            self._inbox.put(None)
            await asyncio.to_thread(self._thread.join)

    def _put(self, item: Row | _Change) -> None:
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            # A daemon: a process that ends without close() must not hang on it.
            self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
            self._thread.start()
        self._inbox.put(item)

    def _read(
        self, weights: Weights, batch: PolicyBatch | None
    ) -> tuple[PolicyBatch, dict[str, Tensor]]:
        try:
            state = load_file(weights.path)
        except (OSError, SafetensorError) as error:
            raise BlobError(f"{weights.path} is no readable safetensors file: {error}") from error
        if batch is None:
            batch = PolicyBatch(self._model())
        batch.check(state)
        return batch, state

    def _model(self) -> Any:
        make: Any = AutoModelForCausalLM.from_config
        dtype = DTYPES[self._setup.dtype]
        return make(self._config, dtype=dtype, attn_implementation="sdpa").to(self._device)

    def _die(self, reason: str) -> None:
        """Whoever waits for the thread learns that it is gone: a new process must take over."""
        self._death = HeadraceError(f"the torch engine's thread ended: {reason}")
        for future in (*self._in_flight, self._changing):
            if future is not None and not future.done():
                future.set_exception(self._death)

    # From here on: the engine's thread.

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            # The thread's last boundary: if it ended in silence, all would wait for ever.
            logger.exception("the engine's thread ended")
            self._call(self._die, f"{type(error).__name__}: {error}")

    def _work(self) -> None:
        torch.set_num_threads(self._setup.threads)
        running: dict[str, PolicyBatch] = {}
        with torch.inference_mode():
            while self._take(running):
                self._post(self._turn(running))
        left = [*self._waiting, *(row for batch in running.values() for row in batch.rows)]
        self._post([(row, row.generation("interrupted")) for row in left])

    def _take(self, running: dict[str, PolicyBatch]) -> bool:
        """Takes all that has come in; waits only where there is nothing else to do."""
        idle = not self._waiting and not any(batch.rows for batch in running.values())
        while True:
            try:
                item = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            idle = False
            if item is None:
                return False
            if isinstance(item, Row):
                self._waiting.append(item)
            else:
                self._change(item, running)

    def _change(self, change: _Change, running: dict[str, PolicyBatch]) -> None:
        try:
            change.batch.load(change.state, change.version)
        except RuntimeError as error:
            failure = InfrastructureError("engine_failed", f"can't take over weights: {error}")
            self._call(_reject, (change.future, failure))
        else:
            running[change.policy] = change.batch
            self._call(_resolve, change.future)

    def _turn(self, running: Mapping[str, PolicyBatch]) -> list[Outcome]:
        """Reads the prompts that have room and draws one token of everything."""
        for batch in running.values():
            batch.drop_cancelled()
        joining = self._join(self._setup.slots - sum(len(batch.rows) for batch in running.values()))
        outcomes: list[Outcome] = []
        for policy, batch in running.items():
            prompts = [row for row in joining if row.prompt.policy == policy]
            try:
                outcomes += batch.decode()
                outcomes += batch.prefill(prompts)
            except Exception as error:
                # A step's boundary: whatever torch raises (out of memory, a broken kernel)
                # reaches those who wait, and the engine serves on.
                logger.exception("policy %s: a step failed", policy)
                failure = InfrastructureError("engine_failed", f"{type(error).__name__}: {error}")
                rows = {id(row): row for row in (*batch.take_all(), *prompts)}
                outcomes += [(row, failure) for row in rows.values()]
        return outcomes

    def _join(self, free: int) -> list[Row]:
        joining: list[Row] = []
        tokens = 0
        while self._waiting and len(joining) < free and tokens < TURN_TOKENS:
            row = self._waiting.popleft()
            if not row.cancelled:
                joining.append(row)
                tokens += len(row.prompt.tokens)
        return joining

    def _post(self, outcomes: Sequence[Outcome]) -> None:
        if outcomes:
            self._call(_deliver, outcomes)

    def _call(self, function: Any, argument: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, argument)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _reject(refused: tuple[asyncio.Future[None], Exception]) -> None:
    future, error = refused
    if not future.done():
        future.set_exception(error)


def _deliver(outcomes: Sequence[Outcome]) -> None:
    for row, outcome in outcomes:
        if row.future.done():
            continue
        if isinstance(outcome, Generation):
            row.future.set_result(outcome)
        else:
            row.future.set_exception(outcome)


def _config(setup: EngineSetup) -> Any:
    try:
        config = AutoConfig.from_pretrained(setup.model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"{setup.model} has no usable config.json: {error}") from error
    if not hasattr(config, "vocab_size"):
        raise UsageError(f"{setup.model} is no plain language model: no vocab_size in config.json")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (
        getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    ):
        raise UsageError(
            f"{setup.model}: the torch engine serves models of full attention only, not "
            f"{sorted(kinds)}; use another engine"
        )
    return config


def _context(setup: EngineSetup, config: Any) -> int:
    longest = getattr(config, "max_position_embeddings", None)
    wanted = setup.options.get("context", longest)
    if not isinstance(wanted, int) or wanted < 1:
        raise UsageError(
            f"{setup.model}: the torch engine's option `context` is {wanted!r}; give a number of "
            "tokens, needed where config.json has no max_position_embeddings"
        )
    return wanted if longest is None else min(wanted, int(longest))


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"no device {name!r} here: {error}") from error
