"""Answers prompts by an engine: what is between a GenerationRequested and its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from schemas import packed
from schemas.events import Failure, GenerationCompleted, GenerationRequested
from services import clock
from services.errors import InfrastructureError
from services.inference import metrics
from services.inference.engine import Engine, Generation, Prompt

RECHECK_S = 1.0
"""An engine's capacity is asked again after this long, should it change by itself."""


class Codec(Protocol):
    """Text to token ids and back (`tokenizer.Tokenizer`)."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class BadPrompt(ValueError):
    """The request can never be answered: its writer must change it."""


class Slots:
    """The slots of one engine, handed out one by one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._taken = 0
        self._freed = asyncio.Event()

    async def take(self) -> Callable[[], None]:
        """Waits for a free slot; returns what gives it back, once."""
        while not self._free():
            self._freed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), RECHECK_S)
        self._taken += 1
        given = False

        def give_back() -> None:
            nonlocal given
            if not given:
                given = True
                self._taken -= 1
                self._freed.set()

        return give_back

    def _free(self) -> bool:
        capacity = self._engine.capacity()
        # A slot may be taken and its prompt not yet in the engine: both counts bind.
        return capacity.context > 0 and capacity.free_slots > 0 and self._taken < self._limit(
            capacity.free_slots
        )

    def _limit(self, free: int) -> int:
        return free + self._running

    @property
    def _running(self) -> int:
        return 0
