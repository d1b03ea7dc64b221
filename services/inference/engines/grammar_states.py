"""Begins what follows a JSON schema, for an engine: in bounded time, beside what is under way.

Most schemas compile in milliseconds, a few are made of what multiplies: twenty alternatives of
texts of differing lengths take seconds over a large vocabulary, and hundreds for ever. Nothing
about a schema's text tells them apart, and a thread can't be ended: so one that takes too long is
refused, and known from then on, and what was given up is limited in number.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from headrace.errors import InfrastructureError, UsageError
from headrace.services.inference.engine import EnginePrompt
from headrace.services.models.json_schema import GrammarState, Schemas

logger = logging.getLogger(__name__)

T = TypeVar("T")
COMPILE_S = 10.0
"""Longest that one may take."""
GIVEN_UP = 2
"""Most that were given up and may still be at it, each on a core and in memory of its own."""
REMEMBERED = 100
"""Schemas known to take too long, each of up to 65,536 characters; the oldest are forgotten."""


class GrammarCompiler:
    """Those of one model. Belongs to one asyncio loop."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """`folder` has the model's tokenizer. Nothing is read before the first schema comes."""
        self._folder = folder
        self._vocabulary = vocabulary
        self._schemas: Schemas | None = None
        self._one_at_a_time = asyncio.Lock()
        self._too_long: dict[tuple[str, tuple[str, str]], None] = {}
        self._given_up: set[asyncio.Future[GrammarState]] = set()
        self._beginning: set[asyncio.Task[GrammarState]] = set()

    async def begin(self, prompt: EnginePrompt) -> GrammarState:
        """The beginning of an answer.

        ValueError where its schema can't be followed, or takes over COMPILE_S to compile;
        InfrastructureError where none can be compiled now. A cancelled caller leaves its
        compilation, which goes on to its end or its bound.
        """
        task = asyncio.create_task(self._begin(prompt))
        self._beginning.add(task)
        task.add_done_callback(self._begun)
        return await asyncio.shield(task)

    async def _begin(self, prompt: EnginePrompt) -> GrammarState:
        async with self._one_at_a_time:
            schema = prompt.json_schema, prompt.around
            if schema in self._too_long:
                raise _too_long()
            if len(self._given_up) >= GIVEN_UP:
                raise InfrastructureError(
                    "schemas_busy", "JSON schemas that take too long are still being compiled"
                )
            if self._schemas is None:
                try:
                    self._schemas = await _in_thread(
                        lambda: Schemas(self._folder, self._vocabulary)
                    )
                except UsageError as error:  # other prompts are served all the same
                    raise ValueError(str(error)) from error
            begin = self._schemas.begin
            grammar = _in_thread(lambda: begin(prompt.json_schema, prompt.stop_ids, prompt.around))
            done, _ = await asyncio.wait([grammar], timeout=COMPILE_S)
            if done:
                return grammar.result()
            self._give_up(schema, grammar)
            raise _too_long()

    def _give_up(
        self, schema: tuple[str, tuple[str, str]], grammar: asyncio.Future[GrammarState]
    ) -> None:
        logger.warning("a JSON schema of %d characters takes too long", len(schema[0]))
        self._too_long[schema] = None
        if len(self._too_long) > REMEMBERED:
            del self._too_long[next(iter(self._too_long))]
        self._schemas = None  # the thread has it to itself
        self._given_up.add(grammar)
        grammar.add_done_callback(self._ended)

    def _ended(self, grammar: asyncio.Future[GrammarState]) -> None:
        self._given_up.discard(grammar)
        grammar.exception()  # nobody else asks

    def _begun(self, task: asyncio.Task[GrammarState]) -> None:
        self._beginning.discard(task)
        if not task.cancelled():
            task.exception()  # a cancelled caller doesn't ask


def _too_long() -> ValueError:
    return ValueError(
        f"json_schema: it takes over {COMPILE_S:g} s to compile; fewer alternatives, optional "
        "properties, and bounds on lengths make it quicker"
    )


def _in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """As `asyncio.to_thread`, but no process waits for it at its end."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="json-schema", daemon=True).start()
    return asyncio.wrap_future(outcome)
