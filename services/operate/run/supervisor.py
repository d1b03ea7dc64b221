"""Keeps a run's child processes alive, and ends them all, whatever happens to this process.

A child that dies is started again after 0.5, 1, 2, 4, then 8 s. Exit codes 2 (usage) and 4 (records
lost) fail the run at once, and so does the fifth death of one child within 60 s, because a restart
would not help. Each child holds the reading end of a pipe. The first line of the pipe says where
broker and registry are. The pipe ends when this process ends, even by `kill -9`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import HeadraceError, RecordsLost, UsageError
from headrace.services.base.files import describe_log, private, private_folder
from headrace.services.namespace.lookup import MOST_RUNS
from headrace.services.operate.processes import (
    ENDED_UNSEEN,
    NEVER_BORN,
    Preloader,
    Process,
    signal_process,
    spawn,
)


@dataclass(frozen=True)
class ChildSpec:
    """A child process to keep alive."""

    name: str
    command: tuple[str, ...]
    """Its command line. Every `{parent_fd}` is replaced with the number of its pipe."""
    may_end: bool = False
    """Whether exit code 0 means that its work is complete."""


@dataclass(frozen=True)
class RestartRule:
    """When a dead child is started again, in seconds."""

    first_delay_s: float = 0.5
    longest_delay_s: float = 8.0
    window_s: float = 60.0
    deaths: int = 5
    """This many deaths within the window fail the run."""

    def delay_s(self, deaths: int) -> float:
        """Returns the seconds before the restart after this many deaths within the window."""
        return min(self.longest_delay_s, self.first_delay_s * 2.0 ** (deaths - 1))


@dataclass
class _Child:
    spec: ChildSpec
    process: Process | None = None
    pipe: int | None = None
    deaths: deque[float] = field(default_factory=deque)
    leaving: bool = False
    """It was asked to drain. It is not started again."""

    @property
    def running(self) -> Process | None:
        """Its process, if that has not ended."""
        process = self.process
        return process if process is not None and process.returncode is None else None

    def hang_up(self) -> None:
        """Closes its pipe."""
        if self.pipe is not None:
            os.close(self.pipe)
            self.pipe = None


class Supervisor:
    """Starts, watches and ends the children.

    Each child's output is appended to `<name>.log` in the folder `logs`. `on_change` receives one
    line for each change of a child. With a `preloader`, children are forked from it; the supervisor
    starts and ends it.
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
        """Names of the children that may end and have ended."""
        self._rule = rule or RestartRule()
        self._preloader = preloader
        self._on_change = on_change
        self._children = [_Child(spec) for spec in specs]
        self._cluster: str | None = None
        self._stopping = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()
        """Set when a child was added."""

    async def start(self) -> None:
        """Starts every child. They import what they need while they wait for `send_cluster`.

        With a preloader, they start after it has imported what they need.
        """
        if self._preloader is not None:
            await self._preloader.open(lambda: self.logs)
        for child in self._children:
            await self._launch(child)
        for child in self._children:
            self._begin_to_keep(child)

    async def add(self, spec: ChildSpec) -> None:
        """Starts one more child, and keeps it alive."""
        if self._stopping.is_set():
            return
        child = _Child(spec)
        self._children.append(child)
        await self._launch(child)
        self._begin_to_keep(child)
        self._news.set()
        self._on_change(f"{spec.name} was started")

    def drain(self, name: str) -> None:
        """Asks a child to finish what it has and to end. Call it again until the child has ended:
        a child that has just been started may not have heard it."""
        for child in self._children:
            if child.spec.name == name:
                if not child.leaving:
                    self._on_change(f"{name} drains")
                child.leaving = True
                if process := child.running:
                    signal_process(process, signal.SIGUSR1)

    def names(self, *, leaving: bool) -> list[str]:
        """Returns the names of the children that were asked to drain, or of all others."""
        return [child.spec.name for child in self._children if child.leaving == leaving]

    def _begin_to_keep(self, child: _Child) -> None:
        task = asyncio.create_task(self._keep(child), name=f"keep {child.spec.name}")
        self._keepers.append(task)

    async def begin(self, command: Sequence[str], parent: int, log: int) -> Process:
        """Starts a process, which is not kept alive, as the children are started.

        `parent` is the pipe whose number replaces `{parent_fd}`. It writes to `log`.
        """
        forked = self._preloader and self._preloader.fork(command, parent, log)
        return forked or await spawn(command, parent, log)

    def send_cluster(self, line: str) -> None:
        """Sends the cluster's configuration to every child, and to every child started later."""
        if "\n" in line:
            raise ValueError("the cluster's configuration must be one line")
        self._cluster = line
        for child in self._children:
            self._send(child)

    def settle_logs(self, folder: Path) -> None:
        """Moves the children's logs into the namespace's folder. Logs of earlier commands stay."""
        logs = folder / "logs"
        private_folder(folder)
        if logs.exists():
            number = next(n for n in range(1, MOST_RUNS) if not Path(f"{logs}-{n}").exists())
            logs.rename(f"{logs}-{number}")
        self.logs.rename(logs)
        self.logs = logs

    async def watch(self) -> None:
        """Returns when all children have ended. Raises as soon as one can't be kept alive."""
        while True:
            for task in [task for task in self._keepers if task.done()]:
                task.result()
                self._keepers.remove(task)
            if not self._keepers:
                return
            self._news.clear()
            news = asyncio.create_task(self._news.wait())
            try:
                await asyncio.wait([*self._keepers, news], return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()

    def release(self) -> None:
        """From now on a child may end. It is not started again."""
        self._stopping.set()

    async def stop(self, drain_s: float = 10.0) -> None:
        """Asks every child to end, and kills what has not ended after `drain_s` seconds."""
        self.release()
        if self._preloader is not None:
            await self._preloader.close()  # no process starts from now on
        for child in self._children:
            child.hang_up()
            if process := child.running:
                signal_process(process, signal.SIGTERM)
        waits = [
            asyncio.create_task(child.process.wait())
            for child in self._children
            if child.process is not None
        ]
        if waits:
            _, late = await asyncio.wait(waits, timeout=drain_s)
            if late:
                for child in self._children:
                    if child.running is not None:
                        self._on_change(f"{child.spec.name} did not end in time and was killed")
                self.kill()
            await asyncio.wait(waits)
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    def kill(self) -> None:
        """Kills every child and the processes that it started."""
        self.release()
        for child in self._children:
            child.hang_up()
            if (process := child.running) and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def alive(self) -> int:
        """Returns the number of running children."""
        return sum(child.running is not None for child in self._children)

    async def _keep(self, child: _Child) -> None:
        while True:
            assert child.process is not None
            code = await child.process.wait()
            child.hang_up()
            if self._stopping.is_set():
                return
            if child.leaving:
                self._children.remove(child)
                self._on_change(f"{child.spec.name} {_ended(code)} after its drain")
                return
            if code == 0 and child.spec.may_end:
                self.finished.add(child.spec.name)
                return
            if code != NEVER_BORN:
                delay_s = self._judge_death(child, code)
                self._on_change(f"{child.spec.name} {_ended(code)}: started again in {delay_s:g} s")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), delay_s)
                    return
                self.restarts += 1
            await self._launch(child)

    def _judge_death(self, child: _Child, code: int) -> float:
        """Returns the seconds before the restart. Raises if a restart would not help."""
        name, now = child.spec.name, time.monotonic()
        log = self.logs / f"{name}.log"
        if code == UsageError.exit_code:
            raise UsageError(f"{name} refused to go on; {describe_log(log)}")
        if code == RecordsLost.exit_code:
            raise RecordsLost(f"{name} needs records that are gone; {describe_log(log)}")
        child.deaths.append(now)
        while child.deaths[0] < now - self._rule.window_s:
            child.deaths.popleft()
        if len(child.deaths) >= self._rule.deaths:
            raise HeadraceError(
                f"{name} {_ended(code)}, {len(child.deaths)} times within "
                f"{self._rule.window_s:g} s; {describe_log(log)}"
            )
        return self._rule.delay_s(len(child.deaths))

    async def _launch(self, child: _Child) -> None:
        reading, writing = os.pipe()
        try:
            private_folder(self.logs)
            with open(self.logs / f"{child.spec.name}.log", "ab", opener=private) as log:
                child.process = await self.begin(child.spec.command, reading, log.fileno())
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        child.pipe = writing
        self._send(child)

    def _send(self, child: _Child) -> None:
        if self._cluster is not None and child.pipe is not None:
            # A line fits the pipe's buffer. If the child has already died, `_keep` handles it.
            with contextlib.suppress(BrokenPipeError):
                os.write(child.pipe, f"{self._cluster}\n".encode())


def new_launch_folder(state: Path) -> Path:
    """Creates the folder of logs until the namespace is known. Deletes those of dead processes."""
    launches = state.absolute() / "launches"
    for folder in launches.glob("*"):
        try:
            os.kill(int(folder.name), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except PermissionError:
            continue  # A process of another user has this number.
    folder = launches / str(os.getpid())
    private_folder(folder)
    return folder


def _ended(code: int) -> str:
    if code == ENDED_UNSEEN:
        return "ended after its preloader died"
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"
