"""Runs a recipe on this machine: starts broker, namespace and services, and stops them at the end.

The child processes start first, so that they import while the broker starts. If the namespace has
an unfinished run, it continues, because the log holds all state. So Ctrl-C only pauses a run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing, suppress
from dataclasses import replace

from rich.console import Console

from headrace.errors import CheckFailed, DependencyError, HeadraceError, Interrupted
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import TASKS
from headrace.services.base.concurrency import until_first
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import WHOLE, read_events
from headrace.services.namespace.apply import lags
from headrace.services.namespace.cluster_config import ClusterConfig, write_resolved
from headrace.services.namespace.connect import connect
from headrace.services.namespace.run_life import RunLife, enter, follow_life
from headrace.services.operate.autoscale.local_pool import LocalPool
from headrace.services.operate.check.checking import check_in_child
from headrace.services.operate.dashboard_child import show_dashboard
from headrace.services.operate.gateway_watch import watch_of_gateway
from headrace.services.operate.processes import Preloader
from headrace.services.operate.run.children import child_specs, scaled_specs, services_of
from headrace.services.operate.run.live_view import Status, make_view
from headrace.services.operate.run.log_notes import LogNotes
from headrace.services.operate.run.open_run import open_run
from headrace.services.operate.run.progress import Check, Progress, violations
from headrace.services.operate.run.report import Summary, command_line
from headrace.services.operate.run.run_stack import RunStack
from headrace.services.operate.run.supervisor import Supervisor, new_launch_folder
from headrace.services.operate.run.watch import follow_progress
from headrace.services.operate.up_down.run_lock import only_run
from headrace.services.operate.verify.running_count import RestartCounts

QUIET_END_S = 60.0
"""Seconds in which no task ends, after which an ending run no longer waits for the open ones."""
END_S = 300.0
"""Most seconds from `ending` to `ended`."""
INTERRUPTED_END_S = 5.0
"""The same after Ctrl-C."""
LAG_INTERVAL_S, LOG_INTERVAL_S = 2.0, 1.0
TICK_S = 0.5
"""Seconds between two checks of the stop rule if no event arrives."""


class LocalRun:
    """One `headrace run`."""

    def __init__(
        self,
        recipe: Recipe,
        cluster: ClusterConfig,
        *,
        quiet: bool,
        checks: Sequence[Check] = (),
        metrics_port: int = 0,
        services: Collection[str] | None = None,
        end: str | None = None,
        check: bool = False,
        on_interrupt: str = "stopping",
        dashboard: bool = False,
        roles: Sequence[str] = (),
    ) -> None:
        """The first child serves its metrics on `metrics_port`, as `child_specs` has it.

        Only these `services` are started, by default all. With `end`, the run ends at once for this
        reason. With `check`, the parts of the recipe are tried before the namespace is created.
        `on_interrupt` says to people what Ctrl-C does. With `dashboard`, a dashboard runs beside.
        With `roles`, the local stack is secure, as `local.up` says.
        """
        self.interrupted = asyncio.Event()
        """Set by Ctrl-C or SIGTERM. The run then pauses."""
        self.progress = Progress(recipe, since=time.time())
        self._reason, self._on_interrupt = end, on_interrupt
        self._life = RunLife()
        self._read_past = asyncio.Event()
        """Set once the whole log is read, so that rules are never checked on a part of it."""
        self._recipe = recipe
        self._cluster = cluster
        self._checks = checks
        self._changed = asyncio.Event()
        self._beside: list[asyncio.Task[None]] = []
        """The tasks that run beside the children. If one ends, its error ends the run."""
        self._path = path = write_resolved(recipe, cluster.state)
        self._check, self._dashboard = check, dashboard
        self._whole = services is None and end is None
        self._services = services_of(recipe) if services is None else services
        specs = child_specs(recipe, path, metrics_port, services)
        invites = end is None and any(spec.name == "gateway" for spec in specs)
        gateway = watch_of_gateway() if invites else None
        self._status = Status(cluster.namespace or recipe.name, gateway=gateway)
        self._view = make_view(self._status, Console(stderr=True, quiet=quiet))
        say = self._view.say
        self._counts = RestartCounts(say)
        preloader = Preloader(path, [spec.command for spec in specs], on_change=say)
        self._sources = {spec.name for spec in specs if spec.may_end}
        logs = new_launch_folder(cluster.state)
        self._supervisor = Supervisor(specs, logs, preloader=preloader, on_change=say)
        scaled = scaled_specs(recipe, path, metrics_port) if services is None else []
        self._pool = LocalPool(self._supervisor, scaled, say)
        self._stack = RunStack(cluster, self._phase, say, roles)

    async def execute(self) -> Summary:
        """Runs until the run ends or is paused. Raises the error that failed it."""
        with closing(self._view):
            self._on_signals()
            try:
                await self._supervisor.start()
                async with self._checking() as checked:
                    cluster = await self._stack.up(
                        lambda: self.interrupted.is_set() or _failed(checked)
                    )
                    return await self._run_on(cluster, checked)
            finally:
                self._status.phase = "ending the processes"
                await self._supervisor.stop()
                self._status.phase = "stopping the local stack"
                await self._stack.down()

    @asynccontextmanager
    async def _checking(self) -> AsyncIterator[asyncio.Future[None]]:
        """Tries the recipe's parts in a child process, while the broker starts.

        Yields when that is done, or has failed. Its error is raised even if it made others.
        """
        checked = asyncio.ensure_future(
            check_in_child(self._path, self._supervisor.begin, self._view.say)
            if self._check
            else asyncio.sleep(0)
        )
        try:
            yield checked
        except Interrupted:
            if _failed(checked):
                await checked
            raise
        finally:
            checked.cancel()
            await asyncio.gather(checked, return_exceptions=True)

    def _on_signals(self) -> None:
        """Lets Ctrl-C pause the run cleanly, and a second Ctrl-C stop all processes at once."""

        def on_signal() -> None:
            if self.interrupted.is_set():
                self._supervisor.kill()
                self._view.say("stopped at once")
                # Only the local stack is left, and its guard stops it when this process ends.
                os._exit(Interrupted.exit_code)
            self._view.say(f"{self._on_interrupt}; press Ctrl-C again to stop at once")
            self.interrupted.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)

    async def _run_on(self, cluster: ClusterConfig, checked: asyncio.Future[None]) -> Summary:
        async with connect(cluster, f"run-{os.getpid()}") as connection, AsyncExitStack() as stack:
            self._phase("preparing the namespace")
            passed = asyncio.ensure_future(self._passed(checked))
            wanted, say = self._cluster.namespace, self._view.say
            log, self._life = await open_run(
                connection, cluster, self._recipe, wanted, self._services, self._stack, passed, say
            )
            namespace = log.topics.namespace
            if self._whole:
                stack.enter_context(only_run(self._cluster.folder(namespace)))
            self._supervisor.settle_logs(self._cluster.folder(namespace).absolute())
            self._status.logs = self._supervisor.logs
            cluster = replace(cluster, namespace=namespace, schema_ids=connection.registry.known)
            self._supervisor.send_cluster(cluster.to_json())
            self._status.name, self._status.progress = namespace, self.progress
            self._phase("running")
            async with self._following(log, cluster):
                reason = await self._until_stop()
                if reason is not None:
                    await self._end(log, reason)
                    self._supervisor.release()
                    await enter(log, "ended", self._recipe, reason)
            return Summary.of(self._status, namespace, reason, self.progress)

    async def _passed(self, checked: asyncio.Future[None]) -> None:
        await until_first(_result(checked), self.interrupted.wait())
        if self.interrupted.is_set():
            raise Interrupted("interrupted before the run began")

    @asynccontextmanager
    async def _following(self, log: EventLog, cluster: ClusterConfig) -> AsyncIterator[None]:
        work = {
            "children": self._supervisor.watch(),
            "stack": self._stack.watch(cluster),
            "progress": follow_progress(log, self.progress, self._on_progress, self._counts.add),
            "run": self._follow_life(log),
            "lags": self._follow_lags(log),
            "logs": self._follow_logs(),
            "scaling": self._pool.follow(log, self._recipe),
        }
        work |= {"dashboard": show_dashboard(cluster, self._view.say)} if self._dashboard else {}
        if self._status.gateway is not None:
            work["gateway"] = self._status.gateway.follow(self._view.say)
        self._beside = [asyncio.create_task(one, name=name) for name, one in work.items()]
        try:
            yield
        finally:
            for task in self._beside:
                task.cancel()
            await asyncio.gather(*self._beside, return_exceptions=True)

    def _on_progress(self) -> None:
        self._read_past.set()
        self._changed.set()

    async def _follow_life(self, log: EventLog) -> None:
        """Notices if another process ends the run, for example `headrace end`."""
        async for self._life in follow_life(log):
            if self._life.ended is not None:
                self._supervisor.release()
            self._changed.set()

    async def _follow_lags(self, log: EventLog) -> None:
        while True:
            with suppress(DependencyError):  # The broker may be restarting.
                self._status.lags = await lags(log.broker, log.topics)
            await asyncio.sleep(LAG_INTERVAL_S)

    async def _follow_logs(self) -> None:
        notes = LogNotes()
        while True:
            for line in await asyncio.to_thread(notes.news, self._supervisor.logs):
                self._view.say(line)
            await asyncio.sleep(LOG_INTERVAL_S)

    async def _until_stop(self) -> str | None:
        """Waits for the stop rule, an end by another process, or Ctrl-C.

        Returns why the run ends, or None if it pauses. Returns an end only after it has read the
        whole log. If an end is recorded already, that end stays.
        """
        ending = self._life.ending is not None
        await self._first_of(self._read_past, *(() if ending else (self.interrupted,)))
        idle_s = self.progress.idle_s(self._life.started_at, self._status.began_at())
        while True:
            if self._life.ending is not None:
                return self._life.ending.reason
            if self.interrupted.is_set():
                return None
            self._show()
            if (message := self.progress.endings.hopeless()) is not None:
                raise HeadraceError(
                    f"{message}. The run stops, and the same command continues it: correct what "
                    "failed first"
                )
            reason = self._reason or self.progress.stop_reason(
                seconds=time.time() - self._life.started_at - idle_s,
                exhausted="source" in self._supervisor.finished,
            )
            if reason is not None:
                return reason
            self._changed.clear()
            await self._first_of(self._changed, self.interrupted, timeout_s=TICK_S)

    async def _first_of(self, *events: asyncio.Event, timeout_s: float | None = None) -> None:
        """Waits for an event or the timeout. Raises the error that ended a task beside."""
        waits = [asyncio.create_task(event.wait()) for event in events]
        try:
            await asyncio.wait(
                [*waits, *self._beside], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for wait in waits:
                wait.cancel()
        for task in self._beside:
            if task.done():
                task.result()
                if self._life.ended is None:
                    raise HeadraceError(
                        f"the task {task.get_name()!r} ended before the run: see the logs in "
                        f"{self._status.logs}"
                    )

    async def _end(self, log: EventLog, reason: str) -> None:
        """Writes `ending`, then waits a bounded time until every task has ended."""
        self._phase(f"ending: {reason}")
        if self._life.ending is None:
            await enter(log, "ending", self._recipe, reason)
        began = changed = time.monotonic()
        ended = self.progress.tasks_ended
        while not await self._all_ended(log) and self._life.ended is None:
            interrupted = self.interrupted.is_set()
            if self.progress.tasks_ended != ended:
                ended, changed = self.progress.tasks_ended, time.monotonic()
            until = began + (INTERRUPTED_END_S if interrupted else END_S)
            left_s = min(until, changed + QUIET_END_S) - time.monotonic()
            if left_s <= 0:
                open_tasks = self.progress.submitted - self.progress.tasks_ended
                self._view.say(f"{open_tasks} tasks did not end in time: ending without them")
                return
            self._changed.clear()
            events = (self._changed,) if interrupted else (self._changed, self.interrupted)
            await self._first_of(*events, timeout_s=min(left_s, TICK_S))

    async def _all_ended(self, log: EventLog) -> bool:
        """Whether every task has ended, and the sources of this command submit no more."""
        if not self.progress.drained or not self._sources <= self._supervisor.finished:
            return False
        # What they submitted last may not have been read yet.
        unread = {log.topics.partition(TASKS): (self.progress.newest_task + 1, WHOLE[1])}
        async with aclosing(read_events(log, unread)) as events:
            return await anext(events, None) is None

    def _show(self) -> None:
        for line in self.progress.endings.news():
            self._view.say(line)
        self._status.restarts = self._counts.on_restarts(self._supervisor.restarts)
        self._status.processes = self._supervisor.alive()
        self._view.refresh()

    def _phase(self, phase: str) -> None:
        self._status.phase = phase
        self._view.say(phase)

    def judge(self, summary: Summary) -> None:
        """Raises Interrupted if the run is paused, and CheckFailed if a check does not hold."""
        if summary.paused:
            raise Interrupted(
                f"the run is paused: `{command_line()}` continues it, and "
                f"`headrace end --namespace {summary.namespace}` ends it for good"
            )
        failed = violations(self._checks, summary.measures(self.progress))
        if failed:
            raise CheckFailed("; ".join(failed))


async def _result(done: asyncio.Future[None]) -> None:
    await done


def _failed(done: asyncio.Future[None]) -> bool:
    return done.done() and not done.cancelled() and done.exception() is not None
