"""The trainer's loop: batch n in, version n out, in the order of the log.

It goes on from the newest whole checkpoint, trains silently on the batches up to the newest
published version, and publishes that one again, as `resumed`, where its weights came out
otherwise. A version whose making is cut short leaves no trace: the next process makes it anew.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from headrace.errors import DecodeError, DependencyError, RecordsLost, UnknownSchema
from headrace.schemas.events import BatchAssembled
from headrace.schemas.topics import BATCHES
from headrace.services.log.event_log import Delivery
from headrace.services.log.log_reader import CaughtUp, EventStream, follow_events
from headrace.services.worker.service_context import ServiceContext
from headrace.trainer.checkpoint import Checkpoint, Checkpoints
from headrace.trainer.loader import PreparedBatch, load_batch, unusable_batch
from headrace.trainer.publish import CHECK_S, History, Publisher, Status
from headrace.trainer.sequences import Stopped, UnusableBatch
from headrace.trainer.versions import Stored

if TYPE_CHECKING:
    from headrace.trainer.learner import Learner  # torch, which the loop has no need of

logger = logging.getLogger(__name__)

T = TypeVar("T")

FINISH_S = 4.0
"""How long a version in the making may still take once the process is to stop."""


@dataclass(frozen=True, slots=True)
class _Made:
    """What came of a batch."""

    updates: int
    """Optimizer updates made; 0 leaves the weights as they were."""
    step_s: float
    metrics: dict[str, float]
    skipped: bool


class Trainer:
    """One policy's training, over the life of this process."""

    def __init__(
        self,
        context: ServiceContext,
        publisher: Publisher,
        history: History,
        learner: Learner,
        torch_thread: ThreadPoolExecutor,
    ) -> None:
        settings = context.recipe.policies[publisher.policy].training
        assert settings is not None, "a policy without training has no learner"
        self._settings = settings
        self._context = context
        self._publisher = publisher
        self._history = history
        self._learner = learner
        self._torch_thread = torch_thread
        self._checkpoints = Checkpoints(
            context.state / "checkpoints" / publisher.policy, settings.keep_checkpoints
        )
        self._version = 0
        """The learner's."""
        self._offset = 0
        """Of the batch after it, at the earliest."""
        self._saved = 0
        """Version of the newest checkpoint; version 0 needs none."""
        self._silent = True
        """While it trains what was published before."""
        self._stored: Stored | None = None
        """The newest published weights."""
        self._publishing: asyncio.Task[Stored] | None = None
        """The version that is on its way out, or looked after."""

    async def run(self) -> None:
        """Resumes, then trains one batch after the other until the process is to stop."""
        if self._history.newest is None:
            self._silent = False
            await self._publish("initial")
        else:
            await self._load_checkpoint()
            await self._publish_if_resumed()
        stopping = asyncio.create_task(self._context.stopping.wait())
        partition = self._context.log.topics.partition(BATCHES, self._publisher.policy)
        reader = follow_events(self._context.log, {partition: self._offset or "first"})
        try:
            async with aclosing(_batches(reader)) as batches:
                await self._train_all(batches, stopping)
            await self._save()
        finally:
            stopping.cancel()
            if self._publishing is not None:
                self._publishing.cancel()
                await asyncio.gather(self._publishing, return_exceptions=True)
            await reader.aclose()

    async def _load_checkpoint(self) -> None:
        digests = self._history.digests
        found = await asyncio.to_thread(
            self._checkpoints.newest, lambda c: c.digest in digests.get(c.version, ())
        )
        if found is not None:
            checkpoint, state = found
            await self._in_thread(lambda: self._learner.load(state))
            self._version = self._saved = checkpoint.version
            self._offset = checkpoint.offset
        logger.info("policy %s goes on from version %d", self._publisher.policy, self._version)

    async def _publish_if_resumed(self) -> None:
        """Where it has come to the newest published version: compares, and publishes it again."""
        newest = self._history.newest
        if newest is None or self._version < newest.version:
            return
        self._silent = False
        weights = await self._in_thread(self._learner.weights)
        self._stored = await self._publisher.go_on(newest, weights)

    async def _train_all(
        self, batches: AsyncGenerator[Delivery[BatchAssembled]], stopping: asyncio.Task[bool]
    ) -> None:
        """While one batch is trained, the next one is fetched."""
        loop = asyncio.get_running_loop()
        fetching = asyncio.create_task(self._fetch(batches, self._version + 1))
        try:
            while True:
                started = loop.time()
                await self._first_of(fetching, stopping)
                if stopping.done():
                    return
                prepared = fetching.result()
                wait_s = loop.time() - started
                fetching = asyncio.create_task(self._fetch(batches, self._version + 2))
                try:
                    made = await self._train(prepared, stopping)
                except Stopped:
                    return
                await self._take_over(prepared, made, wait_s)
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)

    async def _fetch(
        self, batches: AsyncGenerator[Delivery[BatchAssembled]], version: int
    ) -> PreparedBatch:
        """The batch that trains `version`, with its trajectories. What was read before is passed.

        RecordsLost where the log goes on after it.
        """
        async for delivery in batches:
            if delivery.event.version > version:
                raise RecordsLost(
                    f"{delivery.partition.topic} has batch {delivery.event.version} where batch "
                    f"{version} is due: it was removed, or never written. Restore the topic, or "
                    f"begin a new namespace"
                )
            if delivery.event.version == version:
                return await self._load(delivery)
        raise AssertionError("a topic has no end")

    async def _load(self, delivery: Delivery[BatchAssembled]) -> PreparedBatch:
        """The batch with its trajectories.

        A new one whose trajectories are gone, or are none, can't be trained on, and is skipped. One
        that was trained before can't be trained again: RecordsLost, since its version would come
        out otherwise. UnknownSchema is the registry's fault: the batch waits for it.
        """
        version, newest = delivery.event.version, self._history.newest
        if version in self._history.skipped:
            return unusable_batch(delivery, "it was skipped when it was first published")
        try:
            return await load_batch(
                self._context.log, delivery, self._learner.vocabulary, self._settings.updates
            )
        except UnknownSchema as error:
            raise DependencyError(
                f"batch {version} names a trajectory of an unknown schema: is this the registry "
                f"that its writer used? {error}"
            ) from error
        except (RecordsLost, DecodeError) as error:
            if newest is None or version > newest.version:
                return unusable_batch(delivery, f"its trajectories are gone, or none: {error}")
            raise RecordsLost(
                f"version {version} can't be trained again on the way from the checkpoint at "
                f"version {self._saved} to {newest.version}, the newest published. Bring a newer "
                f"checkpoint back, or begin a new namespace. {error}"
            ) from error

    async def _train(self, prepared: PreparedBatch, stopping: asyncio.Task[bool]) -> _Made:
        """Trains on a batch. Stopped where the process is to stop and it takes too long."""
        version = prepared.batch.version
        loop = asyncio.get_running_loop()
        started = loop.time()
        metrics = dict(prepared.metrics)
        try:
            if prepared.unusable:
                raise UnusableBatch(prepared.unusable)
            stop = threading.Event()
            done = self._learner.updates_done
            training = asyncio.ensure_future(
                self._in_thread(lambda: self._learner.train(prepared.updates, stop))
            )
            await asyncio.wait({training, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not training.done():
                await asyncio.wait({training}, timeout=FINISH_S)
                stop.set()
            metrics |= await training
        except UnusableBatch as error:
            logger.error("batch %d is skipped, the weights stay: %s", version, error)
            return _Made(0, loop.time() - started, metrics, skipped=True)
        updates = self._learner.updates_done - done
        return _Made(updates, loop.time() - started, metrics, skipped=False)

    async def _take_over(self, prepared: PreparedBatch, made: _Made, wait_s: float) -> None:
        """Makes the batch's version the current one, and publishes it where that is new."""
        self._version = prepared.batch.version
        self._offset = prepared.offset + 1
        if self._silent:
            await self._publish_if_resumed()
            return
        await self._publish(
            "skipped" if made.skipped else "trained",
            batch=prepared.ref,
            updates=made.updates,
            wait_s=wait_s,
            step_s=made.step_s,
            metrics=made.metrics,
        )
        if self._version - self._saved >= self._settings.checkpoint_every:
            await self._save()

    async def _publish(
        self, status: Status, metrics: Mapping[str, float] | None = None, **facts: Any
    ) -> None:
        """Begins to publish the learner's version, as soon as the one before it is out."""
        weights = await self._in_thread(self._learner.weights)
        loop = asyncio.get_running_loop()
        started = loop.time()
        await self._publish_before()
        told = {**(metrics or {}), "publish_wait_s": loop.time() - started}
        self._publishing = asyncio.create_task(
            self._publisher.publish(self._version, status, weights, metrics=told, **facts)
        )

    async def _publish_before(self) -> None:
        """Waits until what was begun to be published is out. Raises what went wrong with it."""
        if self._publishing is not None:
            self._stored = await self._publishing
            self._publishing = None

    async def _save(self) -> None:
        """Writes a checkpoint of the current version, if it is published and has none yet."""
        if self._silent:
            return
        # Before it is, the log knows no such version, and a checkpoint of it counts for nothing.
        await self._publish_before()
        if self._stored is None or self._version == self._saved:
            return
        checkpoint = Checkpoint(self._version, self._offset, self._stored.digest)
        await self._in_thread(lambda: self._checkpoints.save(checkpoint, self._learner.save))
        self._saved = self._version

    async def _first_of(self, *waits: asyncio.Task[Any]) -> None:
        """Waits for one of these, and keeps the newest weights in the store meanwhile."""
        while True:
            out = () if self._publishing is None else (self._publishing,)
            done, _ = await asyncio.wait(
                {*waits, *out}, timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED
            )
            if done & set(out):
                await self._publish_before()
            if done & set(waits):
                return
            if not done and self._stored is not None and self._publishing is None:
                self._publishing = asyncio.create_task(self._publisher.mend(self._version))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._torch_thread, work)


async def _batches(reader: EventStream) -> AsyncGenerator[Delivery[BatchAssembled]]:
    async for item in reader:
        if not isinstance(item, CaughtUp) and isinstance(item.event, BatchAssembled):
            yield cast("Delivery[BatchAssembled]", item)
