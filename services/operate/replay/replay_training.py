"""Trains on the batches of a replay's namespace, with the trainer's own loop, in this process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from types import ModuleType

from headrace.errors import Interrupted
from headrace.schemas.events import PolicyPublished
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import POLICIES
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import CaughtUp, follow_events
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.run_life import enter
from headrace.services.operate.serve.process_setup import limit_threads
from headrace.services.worker.service_context import ServiceContext

OnVersion = Callable[[PolicyPublished], None]


async def train(
    log: EventLog,
    recipe: Recipe,
    cluster: ClusterConfig,
    policy: str,
    *,
    until: int,
    skipped: Collection[int] = (),
    on_version: OnVersion,
) -> None:
    """Trains `policy` on the batches of `log` up to version `until`, as `serve trainer` does.

    Calls `on_version` with each published version. The trainer does not train on the versions in
    `skipped`. Raises Interrupted after Ctrl-C, which stops the trainer cleanly.
    """
    limit_threads(recipe, "trainer", policy)  # before torch is imported
    trainer = await asyncio.to_thread(_import_trainer)
    context = ServiceContext(
        log,
        recipe,
        cluster.open_blobs(),
        f"replay-{socket.gethostname()}-{os.getpid()}",
        cluster.folder(log.topics.namespace),
        asyncio.Event(),
        asyncio.Event(),
    )
    training = asyncio.create_task(trainer.run(context, policy, skipped))
    following = asyncio.create_task(_follow(log, policy, until, on_version))
    async with _ctrl_c() as interrupted:
        try:
            await asyncio.wait(
                {training, following, interrupted}, return_when=asyncio.FIRST_COMPLETED
            )
            context.stopping.set()
            await training
            if following.done():
                following.result()
            else:
                raise Interrupted(
                    f"interrupted: namespace {log.topics.namespace} keeps what was replayed so far"
                )
        finally:
            for task in (training, following):
                task.cancel()
            await asyncio.gather(training, following, return_exceptions=True)


def _import_trainer() -> ModuleType:
    from headrace.trainer import service

    return service


@asynccontextmanager
async def ended_after(log: EventLog, recipe: Recipe, reason: str) -> AsyncIterator[None]:
    """Records at the end that the run of the namespace has ended, since nothing more will come."""
    try:
        yield
    except (Interrupted, asyncio.CancelledError):
        await enter(log, "ended", recipe, f"{reason}, interrupted")
        raise
    await enter(log, "ended", recipe, reason)


async def _follow(log: EventLog, policy: str, until: int, on_version: OnVersion) -> None:
    """Passes the policy's publications to `on_version` and returns after version `until`."""
    async with aclosing(follow_events(log, {log.topics.partition(POLICIES): "first"})) as items:
        async for item in items:
            if isinstance(item, CaughtUp) or not isinstance(item.event, PolicyPublished):
                continue
            if item.event.policy == policy:
                on_version(item.event)
                if item.event.version >= until:
                    return


@asynccontextmanager
async def _ctrl_c() -> AsyncIterator[asyncio.Task[bool]]:
    """Yields a task that is done after Ctrl-C or SIGTERM, while the event loop keeps running."""
    loop, pressed = asyncio.get_running_loop(), asyncio.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        loop.add_signal_handler(number, pressed.set)
    waiting = asyncio.create_task(pressed.wait())
    try:
        yield waiting
    finally:
        waiting.cancel()
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
