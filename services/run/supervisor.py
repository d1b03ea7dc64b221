"""Keeps a run's child processes alive, and ends them all, whatever happens to this process.

A child dead before its time is started again after 0.5, 1, 2, 4, then 8 s. Exit codes 2 (usage)
and 4 (records lost) fail the run at once, and so does the fifth death of one child within 60 s: a
restart would not help. Each child holds the reading end of a pipe. Its first line says where
broker and registry are; its end says that this process is gone, by `kill -9` too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.errors import HeadraceError, RecordsLost, UsageError
from services.run.processes import ENDED_UNSEEN, NEVER_BORN, Preloader, Process, spawn

LOG_LINES = 20
"""Lines of a dead child's log that its error shows."""
_TAIL_BYTES = 16_384


@dataclass(frozen=True)
class ChildSpec:
    """A child to be kept alive."""

    name: str
    command: tuple[str, ...]
    """Its arguments; every `{parent_fd}` becomes the number of its pipe."""
    may_end: bool = False
    """True where exit code 0 means that its work is done."""


@dataclass(frozen=True)
class RestartRule:
    """When a dead child is started again, in seconds."""

    first_delay_s: float = 0.5
    longest_delay_s: float = 8.0
    window_s: float = 60.0
    deaths: int = 5
    """So many within the window fail the run."""

    def delay_s(self, deaths: int) -> float:
        """Seconds before the restart after so many deaths within the window."""
        return min(self.longest_delay_s, self.first_delay_s * 2.0 ** (deaths - 1))


@dataclass
class _Child:
    spec: ChildSpec
    process: Process | None = None
    pipe: int | None = None
    deaths: deque[float] = field(default_factory=deque)


class Supervisor:
    """Starts the children, watches them, ends them.

    `logs` is the folder of `<name>.log`, appended to. `on_change` is told, in one line, what
    happened to a child. With a `preloader`, whose life is the supervisor's to keep, children are
    forked from it.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        logs: Path,
        *,
        rule: RestartRule | None = None,
        preloader: Preloader | None = None,
        on_change: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.logs = logs
        self.restarts = 0
        self.finished: set[str] = set()
        """Children that may end, and did."""
        self._rule = rule or RestartRule()
        self._preloader = preloader
        self._on_change = on_change
        self._children = [_Child(spec) for spec in specs]
        self._place: str | None = None
        self._stopping = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Starts every child. They load what they need while they wait for `place`.

        With a preloader they are asked for here, and begin once it has imported.
        """
        if self._preloader is not None:
            await self._preloader.open(lambda: self.logs)
        for child in self._children:
            await self._launch(child)
        self._keepers = [
            asyncio.create_task(self._keep(child), name=f"keep {child.spec.name}")
            for child in self._children
        ]

    def place(self, line: str) -> None:
        """Tells every child, and every one started from here on, where the run is."""
        if "\n" in line:
            raise ValueError("the place is one line")
        self._place = line
        for child in self._children:
            self._tell(child)

    async def watch(self) -> None:
        """Returns when all children have ended; raises as soon as one can't be kept alive."""
        if self._keepers:
            await asyncio.gather(*self._keepers)

    def release(self) -> None:
        """From here on a child that ends has ended in order."""
        self._stopping.set()

    async def stop(self, drain_s: float = 10.0) -> None:
        """Asks every child to end, and kills what has not ended after `drain_s` seconds."""
        self.release()
        if self._preloader is not None:
            await self._preloader.close()  # from here on nobody is born
        for child in self._children:
            self._hang_up(child)
            self._signal(child, signal.SIGTERM)
        waits = [
            asyncio.create_task(child.process.wait())
            for child in self._children
            if child.process is not None
        ]
        if waits:
            _, late = await asyncio.wait(waits, timeout=drain_s)
            if late:
                self.kill()
            await asyncio.wait(waits)
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    def kill(self) -> None:
        """Kills every child and what it started, now."""
        self.release()
        for child in self._children:
            self._hang_up(child)
            process = child.process
            if process is not None and process.returncode is None and process.pid is not None:
                self._on_change(f"{child.spec.name} did not end in time: killed")
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def alive(self) -> int:
        """How many children run now."""
        return sum(
            child.process is not None and child.process.returncode is None
            for child in self._children
        )

    async def _keep(self, child: _Child) -> None:
        while True:
            if child.process is None:
                await self._launch(child)
            assert child.process is not None
            code = await child.process.wait()
            self._hang_up(child)
            if self._stopping.is_set():
                return
            if code == NEVER_BORN:
                child.process = None
                continue
            if code == 0 and child.spec.may_end:
                self.finished.add(child.spec.name)
                return
            delay_s = self._judge_death(child, code)
            self._on_change(f"{child.spec.name} {_ended(code)}: started again in {delay_s:g} s")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)
            if self._stopping.is_set():
                return
            child.process = None
            self.restarts += 1

    def _judge_death(self, child: _Child, code: int) -> float:
        """The delay before the restart. Raises where a restart would not help."""
        name, now = child.spec.name, time.monotonic()
        if code == UsageError.exit_code:
            raise UsageError(f"{name} refuses to start{self._last_lines(name)}")
        if code == RecordsLost.exit_code:
            raise RecordsLost(f"{name} needs records that are gone{self._last_lines(name)}")
        child.deaths.append(now)
        while child.deaths[0] < now - self._rule.window_s:
            child.deaths.popleft()
        if len(child.deaths) >= self._rule.deaths:
            raise HeadraceError(
                f"{name} {_ended(code)}, {len(child.deaths)} times within "
                f"{self._rule.window_s:g} s{self._last_lines(name)}"
            )
        return self._rule.delay_s(len(child.deaths))

    def _last_lines(self, name: str) -> str:
        path = self.logs / f"{name}.log"
        lines = last_lines(path, LOG_LINES)
        return f"; the last lines of {path}:\n" + "\n".join(f"  {line}" for line in lines)

    async def _launch(self, child: _Child) -> None:
        reading, writing = os.pipe()
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            with (self.logs / f"{child.spec.name}.log").open("ab") as log:
                command = child.spec.command
                if self._preloader is not None:
                    child.process = self._preloader.fork(command, reading, log.fileno())
                if child.process is None:
                    child.process = await spawn(command, reading, log.fileno())
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        child.pipe = writing
        self._tell(child)

    def _tell(self, child: _Child) -> None:
        if self._place is not None and child.pipe is not None:
            # A line fits the pipe's buffer, and a child that died already is the keeper's matter.
            with contextlib.suppress(BrokenPipeError):
                os.write(child.pipe, f"{self._place}\n".encode())

    def _hang_up(self, child: _Child) -> None:
        if child.pipe is not None:
            os.close(child.pipe)
            child.pipe = None

    def _signal(self, child: _Child, number: signal.Signals) -> None:
        if child.process is not None and child.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(number)


def headrace_command(*arguments: str) -> tuple[str, ...]:
    """The command line of this Headrace, in this interpreter."""
    from services import cli  # not a part of this module's work, and it imports all commands

    return (sys.executable, "-m", cli.__name__, *arguments)


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a log, at most `count` of its last 16 KiB; none where it is absent."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return text.splitlines()[-count:]


def _ended(code: int) -> str:
    if code == ENDED_UNSEEN:
        return "ended after its preloader"
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"
