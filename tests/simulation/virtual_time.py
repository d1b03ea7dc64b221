"""An asyncio loop whose time jumps: no timer is waited for, and a run repeats by its seed.

When nothing is ready the clock goes on to the next timer. What is ready at one moment runs in an
order of the seed's own. What would run in a thread runs in the loop, a moment later. A loop with
neither anything ready nor a timer can never go on: that raises Deadlock.

What runs belongs to a process (`OWNER`), which may be frozen: nothing of it runs until it thaws,
as after SIGSTOP. Each process has a wall clock of its own, which may be wrong.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from functools import partial
from random import Random
from typing import Any, Protocol, TypeVar

BEGIN_S = 1_700_000_000.0
"""The wall clock when a loop starts, in epoch seconds."""
THREAD_S = 0.005
"""Mean virtual seconds that work in a thread takes."""

T = TypeVar("T")


class Deadlock(Exception):
    """Everything waits, and nothing will ever happen."""


class Owner(Protocol):
    """A process, as its loop sees it."""

    clock_error_s: float
    """What its wall clock shows too much."""
    life: int
    """Which of its lives it is in. The threads of a former one do nothing any more."""

    def work_s(self) -> float:
        """Seconds that its next work in a thread of its own takes."""

    def own(self, task: asyncio.Task[Any]) -> None:
        """Told of each task that is part of it."""


OWNER: ContextVar[Owner | None] = ContextVar("simulation_owner", default=None)


class _Task(asyncio.Task[T]):
    """A task whose place in a set repeats: by its number, not by its address."""

    def __init__(
        self,
        number: int,
        work: Coroutine[Any, Any, T] | Generator[Any, None, T],
        **options: Any,
    ) -> None:
        self.number = number
        super().__init__(work, **options)

    def __hash__(self) -> int:
        return self.number


class _Future(asyncio.Future[Any]):
    """As `_Task`."""

    number: int

    def __hash__(self) -> int:
        return self.number


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the module's text. `random` is the run's one source of chance."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self._now = 0.0
        self._frozen: dict[Owner, list[asyncio.Handle]] = {}
        self._made = 0
        super().__init__()
        self.set_task_factory(self._make_task)

    def create_future(self) -> asyncio.Future[Any]:
        """As asyncio's own."""
        future = _Future(loop=self)
        self._made += 1
        future.number = self._made
        return future

    def _make_task(
        self, _: Any, work: Coroutine[Any, Any, T] | Generator[Any, None, T], **options: Any
    ) -> _Task[T]:
        self._made += 1
        task = _Task(self._made, work, loop=self, **options)
        owner = OWNER.get()
        if owner is not None:
            owner.own(task)
        return task

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def wall_time(self) -> float:
        """Epoch seconds: what `headrace.services.base.clock` takes for the time."""
        owner = OWNER.get()
        return BEGIN_S + self._now + (owner.clock_error_s if owner is not None else 0.0)

    def freeze(self, owner: Owner) -> None:
        """Stops all that belongs to a process."""
        self._frozen.setdefault(owner, [])

    def thaw(self, owner: Owner) -> None:
        """Lets it run on."""
        self._ready.extend(self._frozen.pop(owner, ()))  # type: ignore[attr-defined]

    def set_default_executor(self, executor: Any) -> None:
        """Ignores it: nothing runs in a thread, so none must be waited for at the end."""

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Runs the function in the loop, as if in a thread: it takes a while, and its effect lies
        somewhere within. `executor` None is quick; one of a process's own is its long work."""
        future: asyncio.Future[T] = self.create_future()
        owner = OWNER.get()
        long = executor is not None and owner is not None
        seconds = owner.work_s() if long and owner else self.random.expovariate(1 / THREAD_S)
        before = seconds * self.random.random()
        life = owner.life if owner is not None else 0

        def work() -> None:
            if owner is not None and owner.life != life:
                return
            try:
                settle = partial(future.set_result, func(*args))
            except Exception as error:  # whatever it raises is for who awaits it
                settle = partial(future.set_exception, error)
            self.call_later(seconds - before, lambda: None if future.done() else settle())

        self.call_later(before, work)
        return future

    def _run_once(self) -> None:
        """As asyncio's own, without files: no one talks to the world outside."""
        scheduled, ready = self._scheduled, self._ready  # type: ignore[attr-defined]
        while scheduled and (scheduled[0]._cancelled or scheduled[0]._when <= self._now):
            self._take(heapq.heappop(scheduled))
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            if not scheduled:
                raise Deadlock(f"at {self._now:.3f} s nothing is ready, and no timer is set")
            self._now = scheduled[0]._when
            return
        handles = list(ready)
        ready.clear()
        if len(handles) > 1:
            self.random.shuffle(handles)
        for handle in handles:
            if handle._cancelled:
                continue
            if self._frozen:
                owner = handle._context.get(OWNER)
                if owner in self._frozen:
                    self._frozen[owner].append(handle)
                    continue
            handle._run()

    def _take(self, timer: Any) -> None:
        timer._scheduled = False
        if timer._cancelled:
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
        else:
            self._ready.append(timer)  # type: ignore[attr-defined]


def loop() -> VirtualTimeLoop:
    """The loop that runs."""
    running = asyncio.get_running_loop()
    assert isinstance(running, VirtualTimeLoop)
    return running


def run(main: Callable[[], Coroutine[Any, Any, T]], seed: int = 0) -> T:
    """Runs a coroutine function to its end in virtual time."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(seed)) as runner:
        return runner.run(main())
