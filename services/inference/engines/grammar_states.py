"""Compiles JSON schemas for an engine in bounded time, while the engine serves other prompts.

Most schemas compile in milliseconds, but combinations multiply: twenty alternatives of texts with
different lengths take seconds over a large vocabulary, and hundreds never end. The text of a schema
does not show this, and a thread can't be stopped. So a schema that takes too long is refused, and
refused at once if it comes again. The number of abandoned compilations is limited.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

from headrace.errors import InfrastructureError, UsageError
from headrace.services.base.concurrency import in_daemon_thread
from headrace.services.inference.engine import EnginePrompt, ScoredRun
from headrace.services.models.json_schema import GrammarState, Schemas

logger = logging.getLogger(__name__)

COMPILE_S = 10.0
"""Maximum time to compile a schema."""
ABANDONED = 2
"""Maximum of abandoned compilations that still run, each with a core and memory of its own."""
REMEMBERED = 100
"""Slow schemas to remember, of up to 65,536 characters each. The oldest are forgotten."""


class GrammarCompiler:
    """Compiles the schemas of one model's prompts. Belongs to one asyncio loop."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """`folder` has the model's tokenizer, which is read when the first schema comes."""
        self._folder = folder
        self._vocabulary = vocabulary
        self._schemas: Schemas | None = None
        self._one_at_a_time = asyncio.Lock()
        self._too_slow: dict[tuple[str, tuple[str, str]], None] = {}
        self._abandoned: set[asyncio.Future[GrammarState]] = set()
        self._beginning: set[asyncio.Future[GrammarState]] = set()

    async def begin(self, prompt: EnginePrompt | ScoredRun) -> GrammarState:
        """Returns the grammar state at the start of a prompt's answer.

        Raises ValueError if the schema is invalid or takes more than COMPILE_S to compile, and
        InfrastructureError if too many abandoned compilations still run. If the caller is
        cancelled, its compilation goes on to its end or its time limit.
        """
        task = asyncio.create_task(self._begin(prompt))
        self._beginning.add(task)
        task.add_done_callback(partial(_forget, self._beginning))
        return await asyncio.shield(task)

    async def _begin(self, prompt: EnginePrompt | ScoredRun) -> GrammarState:
        async with self._one_at_a_time:
            schema = prompt.json_schema, prompt.around
            if schema in self._too_slow:
                raise _too_slow()
            if len(self._abandoned) >= ABANDONED:
                raise InfrastructureError(
                    "schemas_busy", "JSON schemas that take too long are still being compiled"
                )
            if self._schemas is None:
                make = partial(Schemas, self._folder, self._vocabulary)
                try:
                    self._schemas = await asyncio.wrap_future(in_daemon_thread(make, "json-schema"))
                except UsageError as error:  # prompts without a schema can still be served
                    raise ValueError(str(error)) from error
            begin = partial(self._schemas.begin, prompt.json_schema, prompt.stop_ids, prompt.around)
            grammar = asyncio.wrap_future(in_daemon_thread(begin, "json-schema"))
            done, _ = await asyncio.wait([grammar], timeout=COMPILE_S)
            if done:
                return grammar.result()
            self._abandon(schema, grammar)
            raise _too_slow()

    def _abandon(
        self, schema: tuple[str, tuple[str, str]], grammar: asyncio.Future[GrammarState]
    ) -> None:
        logger.warning("refused a JSON schema of %d characters: too slow", len(schema[0]))
        self._too_slow[schema] = None
        if len(self._too_slow) > REMEMBERED:
            del self._too_slow[next(iter(self._too_slow))]
        self._schemas = None  # the abandoned thread still uses it
        self._abandoned.add(grammar)
        grammar.add_done_callback(partial(_forget, self._abandoned))


def _forget(kept: set[asyncio.Future[GrammarState]], ended: asyncio.Future[GrammarState]) -> None:
    kept.discard(ended)
    if not ended.cancelled():
        ended.exception()  # marks the error as retrieved: the caller may have been cancelled


def _too_slow() -> ValueError:
    return ValueError(
        f"json_schema takes more than {COMPILE_S:g} s to compile: use fewer alternatives, fewer "
        "optional properties, or tighter bounds on lengths"
    )
