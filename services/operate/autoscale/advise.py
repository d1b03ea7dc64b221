"""Exports how many inference workers a run needs: lines, gauges, and a command of the operator."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client import Gauge

from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.resources.worker_settings import Autoscale
from headrace.services.base.concurrency import until_first
from headrace.services.log.event_log import EventLog
from headrace.services.namespace.run_life import follow_life
from headrace.services.operate.autoscale.autoscaler import Scaling
from headrace.services.operate.autoscale.follow_scaling import follow_scaling
from headrace.services.operate.options import say

logger = logging.getLogger(__name__)

HOOK_S = 60.0
"""Most seconds that the hook may take."""
HOOK_AGAIN_S = 5.0
"""Seconds until a hook that failed is run again."""

WANTED = Gauge("headrace_workers_wanted", "Inference workers that the run needs.", ["namespace"])
WORKERS = Gauge("headrace_workers", "Inference workers that report.", ["namespace"])
WAIT = Gauge(
    "headrace_trainer_wait", "Share of its time that the trainer waits for batches.", ["namespace"]
)
USED = Gauge("headrace_workers_used", "Share of the pool's work that is used.", ["namespace"])


@dataclass(frozen=True)
class Advice:
    """A number of workers, and why."""

    namespace: str
    scaling: Scaling

    def __str__(self) -> str:
        found = self.scaling
        return f"{self.namespace}: {found.wanted} wanted, {found.workers} report: {found.reason}"

    def tree(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {"namespace": self.namespace, **asdict(self.scaling)}


async def advise(
    log: EventLog,
    recipe: Recipe,
    settings: Autoscale,
    hook: str | None,
    show: Callable[[Advice], None],
) -> None:
    """Follows a run until it ends, or until SIGTERM. Raises DependencyError if the log is gone."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    hooks = Hooks(hook, log.topics.namespace)
    work = _follow(log, recipe, settings, hooks, show)
    await until_first(work, hooks.run(), _until_ended(log), stopping.wait())


async def _follow(
    log: EventLog,
    recipe: Recipe,
    settings: Autoscale,
    hooks: Hooks,
    show: Callable[[Advice], None],
) -> None:
    shown: tuple[int, int, bool] | None = None
    async with aclosing(follow_scaling(log, recipe, settings)) as scalings:
        async for scaling in scalings:
            _export(log.topics.namespace, scaling)
            hooks.on_scaling(scaling)
            news = scaling.wanted, scaling.workers, scaling.busy is not None
            if news != shown and (news[2] or shown is None or news[:2] != shown[:2]):
                shown = news
                show(Advice(log.topics.namespace, scaling))


def _export(namespace: str, scaling: Scaling) -> None:
    WANTED.labels(namespace).set(scaling.wanted)
    WORKERS.labels(namespace).set(scaling.workers)
    if scaling.wait is not None and scaling.used is not None:
        WAIT.labels(namespace).set(scaling.wait)
        USED.labels(namespace).set(scaling.used)


async def _until_ended(log: EventLog) -> None:
    async with aclosing(follow_life(log)) as lives:
        async for life in lives:
            if life.ended is not None:
                say(f"{log.topics.namespace}: the run has ended ({life.ended.reason})")
                return


class Hooks:
    """Runs the operator's command if another number is wanted. The newest number counts."""

    def __init__(self, command: str | None, namespace: str) -> None:
        """Without a `command` nothing is run."""
        self._command = command
        self._namespace = namespace
        self._newest: Scaling | None = None
        self._news = asyncio.Event()

    def on_scaling(self, scaling: Scaling) -> None:
        """Notes what is wanted now. What is there at first is no change."""
        if not scaling.heard:
            return
        known = self._newest
        self._newest = scaling
        if known is not None and known.wanted != scaling.wanted:
            self._news.set()

    async def run(self) -> None:
        """Runs the command for each change, and again until it has succeeded, without end."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._command is None or self._newest is None:
                continue
            if not await self._succeeds(self._command, self._newest):
                with suppress(TimeoutError):
                    async with asyncio.timeout(HOOK_AGAIN_S):
                        await self._news.wait()
                self._news.set()

    async def _succeeds(self, command: str, scaling: Scaling) -> bool:
        variables = {
            "HEADRACE_WANTED": str(scaling.wanted),
            "HEADRACE_WORKERS": str(scaling.workers),
            "HEADRACE_NAMESPACE": self._namespace,
            "HEADRACE_REASON": scaling.reason,
        }
        process = await asyncio.create_subprocess_shell(
            command,
            env={**os.environ, **variables},
            start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(HOOK_S):
                code = await process.wait()
        except TimeoutError:
            logger.warning("the hook took more than %g s and is killed", HOOK_S)
            return False
        finally:
            with suppress(ProcessLookupError):  # its children, too
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if code:
            logger.warning("the hook exited with %d, and is run again", code)
        return code == 0
