"""Runs a recipe on this machine: broker, namespace, services, to the run's end, and all away again.

The children start first: they import while the broker starts. A run whose namespace has one that
is unfinished goes on with it; the log is the state.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from schemas.recipe import Recipe
from schemas.topics import Topics
from services.apply import apply, find_run, lags
from services.connect import Connection, connect
from services.errors import (
    CheckFailed,
    DependencyError,
    HeadraceError,
    Interrupted,
    UsageError,
)
from services.log import EventLog
from services.run.children import child_specs
from services.run.life import RunLife, enter
from services.run.processes import Preloader
from services.run.progress import Check, Progress, violations
from services.run.report import Summary
from services.run.stack import Stack
from services.run.supervisor import Supervisor
from services.run.view import Status, View
from services.run.watch import follow_progress
from services.settings import Where, write_resolved

END_S = 30.0
"""From `ending` to `ended`, at most."""
INTERRUPTED_END_S = 5.0
"""The same, after Ctrl-C."""
LAG_INTERVAL_S = 2.0
MOST_RUNS = 10_000
"""Names `<name>-2`, `<name>-3`, … that are tried for a new run."""
TICK_S = 0.5
"""How often the clock is looked at where no event comes."""
INTERRUPT = "interrupt"
"""The reason of a run that Ctrl-C or SIGTERM ended."""


@dataclass
class RunOptions:
    """What `headrace run` was asked for, beside recipe and place."""

    checks: Sequence[Check] = ()
    metrics_port: int = 0
    """The first child serves its metrics here, the next on the port after it; 0 serves none."""


@dataclass
class Run:
    """One `headrace run`."""

    recipe: Recipe
    where: Where
    options: RunOptions
    status: Status
    view: View
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by Ctrl-C or SIGTERM: the run ends in order."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def execute(self) -> Summary:
        """Runs to the end, however it comes. Raises what failed the run."""
        launch = new_launch_folder(self.where.state)
        path = write_resolved(self.recipe, self.where.state)
        specs = child_specs(self.recipe, path, self.options.metrics_port)
        preloader = Preloader(path, [spec.command for spec in specs], on_change=self.view.note)
        supervisor = Supervisor(specs, launch, preloader=preloader, on_change=self.view.note)
        stack = Stack(self.where, on_progress=self._phase, on_restart=self.view.note)
        self._on_signals(supervisor)
        try:
            await supervisor.start()
            place = await stack.up(self.interrupted.is_set)
            return await self._run_on(place, supervisor, stack)
        finally:
            self.status.phase = "ending the processes"
            await supervisor.stop()
            self.status.phase = "stopping the local stack"
            await stack.down()

    def _on_signals(self, supervisor: Supervisor) -> None:
        """Ctrl-C ends the run in order; a second one at once."""

        def on_signal() -> None:
            if self.interrupted.is_set():
                supervisor.kill()
                # What is left is the local stack, whose guard sees this process end.
                os._exit(Interrupted.exit_code)
            self.view.note("ending in order; Ctrl-C again ends at once")
            self.interrupted.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)

    async def _run_on(self, place: Where, supervisor: Supervisor, stack: Stack) -> Summary:
        async with connect(place, f"run-{os.getpid()}") as connection:
            self._phase("preparing the namespace")
            namespace = await self._choose_namespace(connection)
            log = await connection.writing_log(self._topics(namespace))
            if self.interrupted.is_set():
                raise Interrupted("interrupted before the run began")
            life = await apply(log, self.recipe)
            self._settle_logs(supervisor, namespace)
            supervisor.place(replace(place, namespace=namespace).to_json())
            self.status.name, self.status.progress = namespace, Progress(self.recipe)
            self._phase("running")
            async with self._following(log, self.status.progress, supervisor, stack, place) as all_:
                reason = await self._until_stop(life, self.status.progress, supervisor, all_)
                await self._end(log, life, self.status.progress, reason, all_)
                supervisor.release()
                await enter(log, "ended", self.recipe, reason)
            summary = Summary.of(self.status, namespace, reason, self.status.progress)
        return summary

    def _topics(self, namespace: str) -> Topics:
        return Topics(namespace, tuple(self.recipe.policies), self.recipe.partitions)

    async def _choose_namespace(self, connection: Connection) -> str:
        """The recipe's own name, or the next one after it that has no run that has ended."""
        first = self.where.namespace or self.recipe.name
        for number in range(1, MOST_RUNS):
            name = first if number == 1 else f"{first}-{number}"
            life = await find_run(connection.log(self._topics(name)))
            if life is None or life.ended is None:
                if life is not None:
                    self.view.note(f"going on with the unfinished run of namespace {name}")
                elif number > 1:
                    self.view.note(f"the run of {first} has ended: this one is {name}")
                return name
        raise UsageError(f"no free name after {first}: give another --namespace")

    def _settle_logs(self, supervisor: Supervisor, namespace: str) -> None:
        """Moves the children's logs to the namespace's folder; those of earlier commands stay."""
        logs = self.where.folder(namespace).absolute() / "logs"
        logs.parent.mkdir(parents=True, exist_ok=True)
        if logs.exists():
            number = next(n for n in range(1, MOST_RUNS) if not Path(f"{logs}-{n}").exists())
            logs.rename(f"{logs}-{number}")
        supervisor.logs.rename(logs)
        supervisor.logs = self.status.logs = logs

    @asynccontextmanager
    async def _following(
        self, log: EventLog, progress: Progress, supervisor: Supervisor, stack: Stack, place: Where
    ) -> AsyncIterator[list[asyncio.Task[None]]]:
        """What runs beside the children. Any of these that ends, ends the run with its error."""
        tasks = [
            asyncio.create_task(supervisor.watch(), name="children"),
            asyncio.create_task(stack.watch(place), name="stack"),
            asyncio.create_task(follow_progress(log, progress, self._changed.set), name="progress"),
            asyncio.create_task(self._follow_lags(log), name="lags"),
        ]
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow_lags(self, log: EventLog) -> None:
        while True:
            with suppress(DependencyError):  # the broker may be on its way up again
                self.status.lags = await lags(log.broker, log.topics)
            await asyncio.sleep(LAG_INTERVAL_S)

    async def _until_stop(
        self,
        life: RunLife,
        progress: Progress,
        supervisor: Supervisor,
        beside: Sequence[asyncio.Task[None]],
    ) -> str:
        """Waits for the stop rule, or Ctrl-C. Why the run ends.

        Not before the whole log is read. The end that an earlier command recorded stays the end.
        """
        if life.ending is not None:
            await self._first_of((self._changed,), beside)
            return life.ending.reason
        events = (self._changed, self.interrupted)
        await self._first_of(events, beside)
        while not self.interrupted.is_set():
            self._show(supervisor)
            reason = progress.stop_reason(
                seconds=time.time() - life.started_at, exhausted="source" in supervisor.finished
            )
            if reason is not None:
                return reason
            self._changed.clear()
            await self._first_of(events, beside, timeout_s=TICK_S)
        return INTERRUPT

    async def _first_of(
        self,
        events: Sequence[asyncio.Event],
        beside: Sequence[asyncio.Task[None]],
        timeout_s: float | None = None,
    ) -> None:
        """Waits for an event or the time. Raises what ended a task of `beside`."""
        waits = [asyncio.create_task(event.wait()) for event in events]
        try:
            await asyncio.wait(
                [*waits, *beside], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for wait in waits:
                wait.cancel()
        for task in beside:
            if task.done():
                task.result()
                raise HeadraceError(
                    f"{task.get_name()} ended before the run: see {self.status.logs}"
                )

    async def _end(
        self,
        log: EventLog,
        life: RunLife,
        progress: Progress,
        reason: str,
        beside: Sequence[asyncio.Task[None]],
    ) -> None:
        """Writes `ending`, and waits until every task has ended, bounded."""
        self._phase(f"ending: {reason}")
        if life.ending is None:
            await enter(log, "ending", self.recipe, reason)
        began = time.monotonic()
        while not progress.drained:
            interrupted = self.interrupted.is_set()
            left_s = began + (INTERRUPTED_END_S if interrupted else END_S) - time.monotonic()
            if left_s <= 0:
                open_tasks = progress.submitted - progress.tasks_ended
                self.view.note(f"{open_tasks} tasks have not ended in time: going on without")
                return
            self._changed.clear()
            events = (self._changed,) if interrupted else (self._changed, self.interrupted)
            await self._first_of(events, beside, timeout_s=left_s)

    def _show(self, supervisor: Supervisor) -> None:
        self.status.restarts = supervisor.restarts
        self.status.processes = supervisor.alive()
        self.view.refresh()

    def _phase(self, phase: str) -> None:
        self.status.phase = phase
        self.view.note(phase)

    def judge(self, summary: Summary) -> None:
        """Raises Interrupted after Ctrl-C, CheckFailed where a check does not hold."""
        if summary.reason == INTERRUPT:
            raise Interrupted("interrupted: the run was ended before its stop rule held")
        assert self.status.progress is not None
        failed = violations(self.options.checks, summary.measures(self.status.progress))
        if failed:
            raise CheckFailed("; ".join(failed))


def new_launch_folder(state: Path) -> Path:
    """Where children log until the namespace is known. Sweeps away what dead launches left."""
    launches = state.absolute() / "launches"
    for folder in launches.glob("*"):
        try:
            os.kill(int(folder.name), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except PermissionError:
            continue  # another user's process lives under that number
    folder = launches / str(os.getpid())
    folder.mkdir(parents=True, exist_ok=True)
    return folder
