"""An asyncio loop whose time jumps: no timer is waited for, and a run repeats by its seed.

When nothing is ready the clock goes on to the next timer. What is ready at one moment runs in an
order of the seed's own. What would run in a thread runs at once, in the loop. A loop with neither
anything ready nor a timer can never go on: that raises Deadlock.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, TypeVar

BEGIN_S = 1_700_000_000.0
"""The wall clock when a loop starts, in epoch seconds."""

T = TypeVar("T")


class Deadlock(Exception):
    """Everything waits, and nothing will ever happen."""


class _Selector(selectors.DefaultSelector):
    """Looks at the files without waiting, and lets the clock jump instead."""

    jump: Callable[[float | None], None]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found and timeout != 0:
            self.jump(timeout)
        return found


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the module's text. `random` is the run's one source of chance."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self._now = 0.0
        selector = _Selector()
        selector.jump = self._jump
        super().__init__(selector)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def wall_time(self) -> float:
        """Epoch seconds: what `services.clock` takes for the time."""
        return BEGIN_S + self._now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Runs the function at once: threads would make runs differ."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # whatever it raises is for who awaits it
            future.set_exception(error)
        return future

    def _run_once(self) -> None:
        if len(self._ready) > 1:  # type: ignore[has-type]
            ready = list(self._ready)  # type: ignore[has-type]
            self.random.shuffle(ready)
            self._ready = type(self._ready)(ready)  # type: ignore[has-type]
        super()._run_once()  # type: ignore[misc]

    def _jump(self, timeout: float | None) -> None:
        if timeout is None:
            raise Deadlock(f"at {self._now:.3f} s nothing is ready, and no timer is set")
        self._now += timeout


def run(main: Callable[[], Coroutine[Any, Any, T]], seed: int = 0) -> T:
    """Runs a coroutine function to its end in virtual time."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(seed)) as runner:
        return runner.run(main())
