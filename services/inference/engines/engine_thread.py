"""The common part of engines that run a model in a thread of their own.

One thread runs the models of all policies. Between two steps it accepts what came in meanwhile:
new prompts join, cancelled prompts leave, and weights change. The asyncio loop never waits for the
model.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import queue
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.errors import BlobError, HeadraceError, InfrastructureError
from headrace.services.inference.engine import (
    AdapterWeights,
    Capacity,
    Engine,
    EngineOutput,
    EnginePrompt,
    EngineSetup,
    ScoredRun,
    ScorePrompt,
    Weights,
    check_prompt,
    check_score,
)
from headrace.services.inference.engines.grammar_states import GrammarCompiler
from headrace.services.inference.engines.row import AnyRow, Outcome, Row, ScoreRow
from headrace.services.models.json_schema import GrammarState

logger = logging.getLogger(__name__)

CLOSE_S = 15.0
"""How long the end of the thread may take. A process can end although a step hangs in it."""


@dataclass(frozen=True, slots=True)
class WeightsChange:
    """New weights of a policy, read and checked. `state` is what the engine's `_read` returned."""

    weights: Weights
    state: Any
    future: asyncio.Future[None]


class ThreadedEngine(Engine):
    """An Engine whose model runs in a thread. Subclasses define a step and the form of weights."""

    name: ClassVar[str]
    """The engine's name in messages."""
    prefill_tokens: ClassVar[int]
    """Maximum prompt tokens that join in one step, unless a single prompt is longer."""
    score_room: ClassVar[int] = 0
    """Tokens of the context that a score leaves free."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self._context = 0
        """Maximum tokens of a sequence. Subclasses set it and `_vocabulary` in `__init__`."""
        self._vocabulary = 0
        self._policies: dict[str, AdapterWeights | None] = {}
        """The policies that have weights. None if these are a whole model."""
        self._grammars: GrammarCompiler | None = None
        self._in_flight: set[asyncio.Future[EngineOutput]] = set()
        self._loading = asyncio.Lock()
        self._changing: asyncio.Future[None] | None = None
        self._closed = False
        self._death: HeadraceError | None = None
        self._dying = threading.Lock()
        self._died = asyncio.Event()
        self._inbox: queue.SimpleQueue[AnyRow | WeightsChange | None] = queue.SimpleQueue()
        self._waiting: list[tuple[int, int, AnyRow]] = []
        """A heap, ordered by priority and then by arrival."""
        self._arrivals = itertools.count()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def capacity(self) -> Capacity:
        free = 0 if self._closed else self._setup.slots - len(self._in_flight)
        return Capacity(free_slots=max(0, free), context=self._context)

    async def generate(
        self, prompt: EnginePrompt, on_token: Callable[[int], None] | None = None
    ) -> EngineOutput:
        """As `Engine.generate`. `on_token` is called in the engine's thread with each token."""
        check_prompt(prompt, self._vocabulary)
        grammar = await self._grammar(prompt)
        self._require_served(prompt.policy)
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
            on_token=on_token,
        )
        return await self._outcome_of(row)

    async def score(self, prompt: ScorePrompt) -> EngineOutput:
        """As `ScoringEngine.score`."""
        check_score(prompt, self._vocabulary)
        grammars = [await self._grammar(run) for run in prompt.runs]
        self._require_served(prompt.policy)
        if len(prompt.tokens) > self._context - self.score_room:
            return EngineOutput([], [], [], "overflow")
        future: asyncio.Future[EngineOutput] = asyncio.get_running_loop().create_future()
        return await self._outcome_of(ScoreRow(prompt, future, grammars))

    async def load(self, weights: Weights) -> None:
        async with self._loading:
            self._check_kind(weights)
            state = await asyncio.to_thread(self._read, weights)
            self._require_alive("weights")
            self._changing = asyncio.get_running_loop().create_future()
            self._put(WeightsChange(weights, state, self._changing))
            await self._changing
            self._policies[weights.policy] = weights.adapter

    async def close(self, drain_s: float) -> None:
        self._closed = True
        if self._in_flight:
            await asyncio.wait(list(self._in_flight), timeout=drain_s)
        if self._thread is not None:
            self._inbox.put(None)
            await asyncio.to_thread(self._thread.join, CLOSE_S)
            if self._thread.is_alive():
                logger.error(
                    "the %s engine has not ended within %g s: it ends with the process",
                    *(self.name, CLOSE_S),
                )

    async def failed(self) -> None:
        """As `FailingEngine.failed`."""
        self._loop = asyncio.get_running_loop()
        if self._death is None:  # From here on the loop hears of it.
            await self._died.wait()
            assert self._death is not None
        raise self._death

    async def _grammar(self, prompt: EnginePrompt | ScoredRun) -> GrammarState | None:
        """Returns the grammar state at the start of an answer, if it has to follow a schema."""
        if not prompt.json_schema:
            return None
        self._grammars = self._grammars or GrammarCompiler(self._setup.model, self._vocabulary)
        return await self._grammars.begin(prompt)

    async def _outcome_of(self, row: AnyRow) -> EngineOutput:
        self._in_flight.add(row.future)
        self._put(row)
        try:
            return await row.future
        finally:
            row.cancelled = True
            self._in_flight.discard(row.future)

    def _require_served(self, policy: str) -> None:
        self._require_alive("prompts")
        if policy not in self._policies:
            raise InfrastructureError("no_weights", f"no weights of policy {policy!r} yet")

    def _require_alive(self, what: str) -> None:
        if self._closed:
            raise InfrastructureError("engine_closed", f"the engine is closed: it takes no {what}")
        if self._death is not None:
            raise self._death

    def _check_kind(self, weights: Weights) -> None:
        was = self._policies.get(weights.policy, weights.adapter)
        if was != weights.adapter:
            raise BlobError(
                f"version {weights.version} of policy {weights.policy!r} is "
                f"{_describe(weights.adapter)}, but the versions before it are {_describe(was)}. "
                "A worker serves only one kind: restart it"
            )

    def _put(self, item: AnyRow | WeightsChange) -> None:
        self._loop = asyncio.get_running_loop()
        self._start()
        self._inbox.put(item)

    def _start(self) -> None:
        if self._thread is None:
            # A daemon thread does not block the exit of a process that never calls close().
            self._thread = threading.Thread(
                target=self._run, name=f"{self.name}-engine", daemon=True
            )
            self._thread.start()

    @abstractmethod
    def _read(self, weights: Weights) -> Any:
        """Reads what `_change` needs. Raises BlobError if the weights do not fit the model.

        It runs in a thread of its own, one call at a time.
        """

    def _fail_all(self) -> None:
        """Fails all waiting callers: only a new process can go on."""
        self._died.set()
        for future in (*self._in_flight, self._changing):
            if future is not None:
                _settle(future, self._death)

    def _die(self, reason: str) -> None:
        """Ends the engine, whose first reason counts. Any thread may call this."""
        with self._dying:
            if self._death is None:
                self._death = HeadraceError(
                    f"the {self.name} engine can't go on: {reason}. Restart the worker"
                )
                logger.error("%s", self._death)  # Another engine may delay the worker's end.
        self._call(self._fail_all)

    # The methods below run in the engine's thread.

    @abstractmethod
    def _change(self, change: WeightsChange) -> None:
        """Swaps weights. Raises InfrastructureError if that fails; then the old weights stay."""

    @abstractmethod
    def _rows(self) -> list[AnyRow]:
        """The rows that have joined and not ended."""

    @abstractmethod
    def _drop_cancelled(self) -> None:
        """Frees the rows of cancelled prompts."""

    @abstractmethod
    def _advance(self, joining: list[AnyRow]) -> list[Outcome]:
        """Adds new rows, draws one token for every row, and returns the rows that ended.

        Also scores the sequences among the new rows.
        """

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            # If the thread ended silently, all callers would wait for ever.
            logger.exception("the thread of the %s engine ended", self.name)
            own = isinstance(error, HeadraceError)
            self._die(str(error) if own else f"{type(error).__name__}: {error}")

    def _work(self) -> None:
        while self._read_inbox():
            self._drop_cancelled()
            joining = self._join(self._setup.slots - len(self._rows()))
            self._post(self._advance(joining))
        left = [*(row for _, _, row in self._waiting), *self._rows()]
        self._post([(row, row.output("interrupted")) for row in left])

    def _read_inbox(self) -> bool:
        """Reads all that came in. Waits only if no row is in flight. Returns False to end."""
        idle = not self._waiting and not self._rows()
        while True:
            try:
                item = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            idle = False
            if item is None:
                return False
            if isinstance(item, Row | ScoreRow):
                heapq.heappush(self._waiting, (-item.prompt.priority, next(self._arrivals), item))
                continue
            failure = None
            try:
                self._change(item)
            except InfrastructureError as error:
                failure = error
            self._call(_settle, item.future, failure)

    def _join(self, free: int) -> list[AnyRow]:
        joining: list[AnyRow] = []
        tokens = 0
        while self._waiting and len(joining) < free and tokens < self.prefill_tokens:
            _, _, row = heapq.heappop(self._waiting)
            if not row.cancelled:
                joining.append(row)
                tokens += len(row.prompt.tokens)
        return joining

    def _post(self, outcomes: Sequence[Outcome]) -> None:
        if outcomes:
            self._call(_deliver, outcomes)

    def _call(self, function: Any, *arguments: Any) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def _describe(adapter: AdapterWeights | None) -> str:
    if adapter is None:
        return "a whole model"
    base = adapter.digest.hex()
    return f"an adapter of base {base}, rank {adapter.rank}, alpha {adapter.alpha}"


def _deliver(outcomes: Sequence[Outcome]) -> None:
    for row, outcome in outcomes:
        _settle(row.future, outcome)


def _settle(future: asyncio.Future[Any], outcome: Any) -> None:
    """Ends a future with a result or an error, unless it was cancelled."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
