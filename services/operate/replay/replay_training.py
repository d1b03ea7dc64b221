"""Trains on the batches of a replay's namespace, with the trainer's own loop, in this process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from importlib import import_module

from headrace.errors import Interrupted
from headrace.schemas.events import PolicyPublished
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import POLICIES
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import CaughtUp, follow_events
from headrace.services.models.blob_owners import owner_name
from headrace.services.namespace.run_life import enter
from headrace.services.operate.replay.recording import Recording
from headrace.services.operate.serve.process_setup import limit_threads
from headrace.services.worker.service_context import ServiceContext


async def train(
    recording: Recording,
    log: EventLog,
    recipe: Recipe,
    policy: str,
    *,
    until: int,
    skipped: Collection[int] = (),
) -> list[PolicyPublished]:
    """Trains `policy` on the batches of `log` up to version `until`, as `serve trainer` does.

    Returns what the trainer published. It does not train on the versions in `skipped`. Raises
    Interrupted after Ctrl-C, which stops the trainer cleanly.
    """
    limit_threads(recipe, "trainer", policy)  # before torch is imported
    trainer = await asyncio.to_thread(import_module, "headrace.trainer.service")
    cluster, stopping = recording.cluster, asyncio.Event()
    namespace, cluster_id = log.topics.namespace, await log.broker.cluster_id()
    context = ServiceContext(
        log,
        recipe,
        cluster.open_blobs(owner_name(cluster_id, namespace)),
        f"replay-{socket.gethostname()}-{os.getpid()}",
        cluster.cluster_folder(namespace, cluster_id),
        stopping,
        asyncio.Event(),
    )
    following = asyncio.create_task(_follow(recording, log, policy, until))
    following.add_done_callback(lambda _: stopping.set())
    try:
        with _set_on_signals(stopping):
            await trainer.run(context, policy, skipped)
        if not following.done():
            raise Interrupted(f"interrupted: namespace {namespace} keeps what was replayed so far")
        return following.result()
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _follow(
    recording: Recording, log: EventLog, policy: str, until: int
) -> list[PolicyPublished]:
    """Reads the policy's publications up to version `until`, and reports the progress."""
    found: list[PolicyPublished] = []
    async with aclosing(follow_events(log, {log.topics.partition(POLICIES): "first"})) as items:
        async for item in items:
            if isinstance(item, CaughtUp) or not isinstance(item.event, PolicyPublished):
                continue
            if item.event.policy == policy:
                found.append(item.event)
                recording.progress("versions trained", item.event.version, until)
                if item.event.version >= until:
                    break
    return found


@contextmanager
def _set_on_signals(stopping: asyncio.Event) -> Iterator[None]:
    """Sets `stopping` on Ctrl-C or SIGTERM, while the event loop keeps running."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        loop.add_signal_handler(number, stopping.set)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


@asynccontextmanager
async def ended_after(log: EventLog, recipe: Recipe, reason: str) -> AsyncIterator[None]:
    """Records at the end that the run of the namespace has ended, since nothing more will come."""
    try:
        yield
    except (Interrupted, asyncio.CancelledError):
        await enter(log, "ended", recipe, f"{reason}, interrupted")
        raise
    await enter(log, "ended", recipe, reason)
