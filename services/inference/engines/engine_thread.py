"""What engines share that run a model in a thread of their own: all that lies around its steps.

One thread runs the models, of every policy one. Between two steps it takes what has come in:
prompts join, cancelled ones leave, weights change. The asyncio loop never waits for the model.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.errors import BlobError, HeadraceError, InfrastructureError
from headrace.services.inference.engine import (
    Capacity,
    EngineOutput,
    EnginePrompt,
    EngineSetup,
    Weights,
    check_prompt,
)
from headrace.services.inference.engines.grammar_states import GrammarCompiler
from headrace.services.inference.engines.row import Outcome, Row

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Change:
    """New weights of a policy, read and checked; `state` is the engine's own."""

    weights: Weights
    state: Any
    future: asyncio.Future[None]


class ThreadedEngine(ABC):
    """An Engine whose model runs in a thread. An engine says how to step, and what weights are."""

    name: ClassVar[str]
    """As messages and the thread call it."""
    turn_tokens: ClassVar[int]
    """Most prompt tokens that join between two steps, unless one prompt is longer."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self._context = 0
        """Most tokens of a sequence. An engine sets both before it takes prompts."""
        self._vocabulary = 0
        self._policies: dict[str, tuple[object, ...]] = {}
        """Those that have weights, and of what kind these are."""
        self._grammars: GrammarCompiler | None = None
        self._in_flight: set[asyncio.Future[EngineOutput]] = set()
        self._loading = asyncio.Lock()
        self._changing: asyncio.Future[None] | None = None
        self._closed = False
        self._death: HeadraceError | None = None
        self._inbox: queue.SimpleQueue[Row | Change | None] = queue.SimpleQueue()
        self._waiting: list[tuple[int, int, Row]] = []
        """A heap: by priority, then in the order of arrival."""
        self._arrivals = itertools.count()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def capacity(self) -> Capacity:
        """See Engine."""
        free = 0 if self._closed else self._setup.slots - len(self._in_flight)
        return Capacity(free_slots=max(0, free), context=self._context)

    async def generate(self, prompt: EnginePrompt) -> EngineOutput:
        """See Engine."""
        check_prompt(prompt, self._vocabulary)
        grammar = None
        if prompt.json_schema:
            self._grammars = self._grammars or GrammarCompiler(self._setup.model, self._vocabulary)
            grammar = await self._grammars.begin(prompt)
        if self._closed:
            raise InfrastructureError("engine_closed", "the engine takes no prompts any more")
        if self._death is not None:
            raise self._death
        if prompt.policy not in self._policies:
            raise InfrastructureError("no_weights", f"no weights of policy {prompt.policy!r} yet")
        room = self._context - len(prompt.tokens)
        if room <= 0:
            return EngineOutput([], [], [], "overflow")
        future: asyncio.Future[EngineOutput] = asyncio.get_running_loop().create_future()
        row = Row(
            prompt,
            future,
            limit=min(prompt.max_tokens, room),
            at_limit="length" if prompt.max_tokens <= room else "overflow",
            grammar=grammar,
        )
        self._in_flight.add(future)
        self._put(row)
        try:
            return await future
        finally:
            row.cancelled = True
            self._in_flight.discard(future)

    async def load(self, weights: Weights) -> None:
        """See Engine."""
        async with self._loading:
            self._check_kind(weights)
            state = await asyncio.to_thread(self._read, weights)
            if self._closed:
                raise InfrastructureError("engine_closed", "the engine takes no weights any more")
            if self._death is not None:
                raise self._death
            self._changing = asyncio.get_running_loop().create_future()
            self._put(Change(weights, state, self._changing))
            await self._changing
            self._policies[weights.policy] = _kind(weights)

    async def close(self, drain_s: float) -> None:
        """See Engine."""
        self._closed = True
        if self._in_flight:
            await asyncio.wait(list(self._in_flight), timeout=drain_s)
        if self._thread is not None:
            self._inbox.put(None)
            await asyncio.to_thread(self._thread.join)

    def _check_kind(self, weights: Weights) -> None:
        """BlobError where a policy's weights are of another kind than before."""
        was = self._policies.get(weights.policy, kind := _kind(weights))
        if was != kind:
            raise BlobError(
                f"version {weights.version} of policy {weights.policy!r} is "
                f"{_named(kind)}, but those before it are {_named(was)}: a worker serves "
                f"one of them, start it anew"
            )

    def _put(self, item: Row | Change) -> None:
        self._loop = asyncio.get_running_loop()
        self._start()
        self._inbox.put(item)

    def _start(self) -> None:
        if self._thread is None:
            # A daemon: a process that ends without close() must not hang on it.
            self._thread = threading.Thread(
                target=self._run, name=f"{self.name}-engine", daemon=True
            )
            self._thread.start()

    @abstractmethod
    def _read(self, weights: Weights) -> Any:
        """What `_change` needs of the weights. BlobError where they do not fit the model.

        Called in a thread of its own, of which there is one at a time.
        """

    def _die(self, reason: str) -> None:
        """Whoever waits for the thread learns that it is gone: a new process must take over."""
        self._death = HeadraceError(f"the {self.name} engine's thread ended: {reason}")
        for future in (*self._in_flight, self._changing):
            if future is not None and not future.done():
                future.set_exception(self._death)

    # From here on: the engine's thread.

    @abstractmethod
    def _change(self, change: Change) -> None:
        """Takes over weights. InfrastructureError where it can't, and the old ones stay."""

    @abstractmethod
    def _under_way(self) -> list[Row]:
        """The rows that have joined and not ended."""

    @abstractmethod
    def _drop_cancelled(self) -> None:
        """Frees the rows of what nobody waits for."""

    @abstractmethod
    def _turn(self, joining: list[Row]) -> list[Outcome]:
        """Takes new rows in and draws one token of everything; says what has ended."""

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            # The thread's last boundary: if it ended in silence, all would wait for ever.
            logger.exception("the engine's thread ended")
            self._call(self._die, f"{type(error).__name__}: {error}")

    def _work(self) -> None:
        while self._take():
            self._drop_cancelled()
            joining = self._join(self._setup.slots - len(self._under_way()))
            self._post(self._turn(joining))
        left = [*(row for _, _, row in self._waiting), *self._under_way()]
        self._post([(row, row.generation("interrupted")) for row in left])

    def _take(self) -> bool:
        """Takes all that has come in; waits only where there is nothing else to do."""
        idle = not self._waiting and not self._under_way()
        while True:
            try:
                item = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            idle = False
            if item is None:
                return False
            if isinstance(item, Row):
                heapq.heappush(self._waiting, (-item.prompt.priority, next(self._arrivals), item))
            else:
                self._take_over(item)

    def _take_over(self, change: Change) -> None:
        try:
            self._change(change)
        except InfrastructureError as error:
            self._call(_reject, (change.future, error))
        else:
            self._call(_resolve, change.future)

    def _join(self, free: int) -> list[Row]:
        joining: list[Row] = []
        tokens = 0
        while self._waiting and len(joining) < free and tokens < self.turn_tokens:
            _, _, row = heapq.heappop(self._waiting)
            if not row.cancelled:
                joining.append(row)
                tokens += len(row.prompt.tokens)
        return joining

    def _post(self, outcomes: Sequence[Outcome]) -> None:
        if outcomes:
            self._call(_deliver, outcomes)

    def _call(self, function: Any, argument: Any) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, argument)


def _kind(weights: Weights) -> tuple[object, ...]:
    """What must not change from version to version."""
    one = weights.adapter
    return () if one is None else (one.digest.hex(), one.rank, one.alpha, one.targets)


def _named(kind: tuple[object, ...]) -> str:
    if not kind:
        return "a whole model"
    base, rank, alpha, _ = kind
    return f"an adapter of base {base}, rank {rank}, alpha {alpha}"


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
        if isinstance(outcome, EngineOutput):
            row.future.set_result(outcome)
        else:
            row.future.set_exception(outcome)
