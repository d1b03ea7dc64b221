"""Trains on the batches of a fresh namespace, by the trainer's own loop, in this process."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

from schemas.events import PolicyPublished
from schemas.recipe import Recipe
from schemas.topics import POLICIES
from services.context import ServiceContext
from services.errors import Interrupted
from services.kafka.broker import Partition
from services.log import EventLog
from services.reader import CaughtUp, EventReader
from services.run.life import enter
from services.serve import SERVICES, ServeOptions, set_threads
from services.settings import Where

OnVersion = Callable[[PolicyPublished], None]


async def train(
    log: EventLog,
    recipe: Recipe,
    where: Where,
    policy: str,
    *,
    until: int,
    skipped: Collection[int] = (),
    on_version: OnVersion,
) -> None:
    """Trains `policy` on the batches of `log`, up to version `until`, as `serve trainer` does.

    `on_version` is told of each version. `skipped` are those that are not trained on. Interrupted
    on Ctrl-C, which stops it in order.
    """
    set_threads(recipe, ServeOptions("trainer", policy))  # before torch is imported
    trainer = await asyncio.to_thread(importlib.import_module, SERVICES["trainer"])
    context = ServiceContext(
        log,
        recipe,
        where.open_blobs(),
        f"replay-{socket.gethostname()}-{os.getpid()}",
        where.folder(log.topics.namespace),
        asyncio.Event(),
        asyncio.Event(),
    )
    training: asyncio.Task[None] = asyncio.create_task(trainer.run(context, policy, skipped))
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
                raise Interrupted(f"interrupted: {log.topics.namespace} is left as it stands")
        finally:
            for task in (training, following):
                task.cancel()
            await asyncio.gather(training, following, return_exceptions=True)


@asynccontextmanager
async def ended_after(log: EventLog, recipe: Recipe, reason: str) -> AsyncIterator[None]:
    """Writes at the end that the namespace's run has ended: nothing more will come."""
    try:
        yield
    except (Interrupted, asyncio.CancelledError):
        await enter(log, "ended", recipe, f"{reason}, interrupted")
        raise
    await enter(log, "ended", recipe, reason)


async def _follow(log: EventLog, policy: str, until: int, on_version: OnVersion) -> None:
    """Hands on the policy's publications; returns at version `until`."""
    reader = EventReader(log, {Partition(log.topics.name(POLICIES), 0): "first"})
    try:
        async for item in reader:
            if isinstance(item, CaughtUp) or not isinstance(item.event, PolicyPublished):
                continue
            if item.event.policy == policy:
                on_version(item.event)
                if item.event.version >= until:
                    return
    finally:
        await reader.aclose()


@asynccontextmanager
async def _ctrl_c() -> AsyncIterator[asyncio.Task[bool]]:
    """A task that is done once Ctrl-C or SIGTERM has come; the loop goes on meanwhile."""
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
