"""The trainer's loop: trains on batch n and publishes version n, in the order of the log.

After a start it continues from the newest complete checkpoint. It trains again on the batches up
to the newest published version without publishing. If the weights then differ from the published
ones, it publishes that version again, as `resumed`. If the process dies while it makes a version,
nothing of that version remains, and the next process makes it again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar, cast

from headrace.errors import (
    DecodeError,
    DependencyError,
    RecordsLost,
    UnknownSchema,
    UsageError,
)
from headrace.schemas.events import BatchAssembled
from headrace.schemas.topics import BATCHES
from headrace.services.log.event_log import Delivery
from headrace.services.log.log_reader import CaughtUp, EventStream, follow_events
from headrace.services.worker.service_context import ServiceContext
from headrace.trainer.checkpoint import Checkpoint, Checkpoints
from headrace.trainer.loader import PreparedBatch, load_batch
from headrace.trainer.metrics.exported_metrics import PHASES, note_batch
from headrace.trainer.metrics.recorded_logprobs import pack_logprobs
from headrace.trainer.publish import CHECK_S, Publisher, Status
from headrace.trainer.sequences import Stopped, UnusableBatch
from headrace.trainer.versions import StoredVersion

if TYPE_CHECKING:
    # They import torch, which is not needed here.
    from headrace.trainer.learner import Learner
    from headrace.trainer.ranks.shared_learner import SharedLearner

logger = logging.getLogger(__name__)

T = TypeVar("T")

FINISH_S = 4.0
"""How long the current version may still take after the process was asked to stop."""


class Trainer:
    """One policy's training, for the life of this process."""

    def __init__(
        self,
        context: ServiceContext,
        publisher: Publisher,
        learner: Learner | SharedLearner,
        torch_thread: ThreadPoolExecutor,
    ) -> None:
        settings = context.recipe.policies[publisher.policy].training
        assert settings is not None, "a policy without training has no learner"
        self._settings = settings
        evaluation = context.recipe.evaluation
        self._passing = 1.0 if evaluation is None else evaluation.passing
        self._context = context
        self._publisher = publisher
        self._learner = learner
        self._torch_thread = torch_thread
        self._checkpoints = Checkpoints(
            context.state / "checkpoints" / publisher.policy, settings.keep_checkpoints
        )
        self._version = 0
        """The version of the learner's weights."""
        self._offset = 0
        """The batch after it is at this offset, or later."""
        self._saved = 0
        """The version of the newest checkpoint. Version 0 needs none."""
        self._skips: list[str] = []
        """Why the newest batches were skipped, one reason for each: those since the last one that
        was trained on, and that this process saw first."""
        self._warned = False
        """Whether it said that the learning rate is 0."""
        self._silent = True
        """Whether it trains versions again that are published already."""
        self._stored: StoredVersion | None = None
        """The newest published weights."""
        self._publishing: asyncio.Task[StoredVersion] | None = None
        """Publishes or repairs a version in the background."""

    async def run(self) -> None:
        """Resumes, then trains on one batch after the other until the process is to stop."""
        if self._publisher.history.newest is None:
            self._silent = False
            await self._publish("initial")
        else:
            await self._load_checkpoint()
            await self._publish_if_resumed()
        stopping = asyncio.create_task(self._context.stopping.wait())
        partition = self._context.log.topics.partition(BATCHES, self._publisher.policy)
        reader = follow_events(self._context.log, {partition: self._offset or "first"})
        try:
            await self._train_all(reader, stopping)
            await self._save()
        finally:
            stopping.cancel()
            if self._publishing is not None:
                self._publishing.cancel()
                await asyncio.gather(self._publishing, return_exceptions=True)
            await reader.aclose()

    async def _load_checkpoint(self) -> None:
        digests = self._publisher.history.digests
        found = await asyncio.to_thread(
            self._checkpoints.newest, lambda c: c.digest in digests.get(c.version, ())
        )
        if found is not None:
            checkpoint, state = found
            await self._in_thread(lambda: self._learner.load(state))
            self._version = self._saved = checkpoint.version
            self._offset = checkpoint.offset
        logger.info("policy %s continues from version %d", self._publisher.policy, self._version)

    async def _publish_if_resumed(self) -> None:
        """At the newest published version: compares the weights, and ends the silent training."""
        newest = self._publisher.history.newest
        if newest is None or self._version < newest.version:
            return
        self._silent = False
        weights = await self._in_thread(self._learner.weights)
        self._stored = await self._publisher.resume(newest, weights)

    async def _train_all(self, reader: EventStream, stopping: asyncio.Task[bool]) -> None:
        """Trains on one batch and fetches the next one meanwhile."""
        loop = asyncio.get_running_loop()
        fetching = asyncio.create_task(self._fetch(reader, self._version + 1))
        try:
            while True:
                started = loop.time()
                PHASES.enter(self._publisher.policy, "wait")
                await self._first_of(fetching, stopping)
                if stopping.done():
                    return
                prepared = fetching.result()
                PHASES.enter(self._publisher.policy, "train")
                began, done = loop.time(), self._learner.updates_done
                fetching = asyncio.create_task(self._fetch(reader, self._version + 2))
                try:
                    status, metrics = await self._train(prepared, stopping)
                except Stopped:
                    return
                PHASES.enter(self._publisher.policy, "publish")
                await self._advance(
                    prepared,
                    status,
                    metrics,
                    updates=self._learner.updates_done - done,
                    wait_s=began - started,
                    step_s=loop.time() - began,
                )
                await self._stop_if_all_are_skipped()
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)

    async def _fetch(self, reader: EventStream, version: int) -> PreparedBatch:
        """Returns the batch that trains `version`, with its trajectories. Skips earlier batches.

        Raises RecordsLost if the log has a later batch instead.
        """
        async for item in reader:
            if isinstance(item, CaughtUp) or not isinstance(item.event, BatchAssembled):
                continue
            delivery = cast("Delivery[BatchAssembled]", item)
            if delivery.event.version > version:
                raise RecordsLost(
                    f"{delivery.partition.topic} has batch {delivery.event.version}, but batch "
                    f"{version} is due: it was removed, or never written. Restore the topic, or "
                    f"start a new namespace"
                )
            if delivery.event.version == version:
                return await self._load(delivery)
        raise AssertionError("a topic has no end")

    async def _load(self, delivery: Delivery[BatchAssembled]) -> PreparedBatch:
        """Returns the batch with its trajectories.

        A new batch whose trajectories are gone or can't be decoded is skipped. If the batch was
        trained on before, its version would now come out different, so that raises RecordsLost. An
        unknown schema raises DependencyError, so that the batch waits until the registry has it.
        """
        version, newest = delivery.event.version, self._publisher.history.newest
        if version in self._publisher.history.skipped:
            return PreparedBatch(delivery, unusable="it was skipped when it was first published")
        try:
            return await load_batch(
                *(self._context.log, delivery, self._learner.vocabulary),
                *(self._settings.minibatches, self._passing, self._settings.teacher is not None),
                critic=self._settings.critic is not None,
            )
        except UnknownSchema as error:
            raise DependencyError(
                f"batch {version} refers to a trajectory with an unknown schema. Check that this "
                f"is the registry that its writer used. {error}"
            ) from error
        except (RecordsLost, DecodeError) as error:
            if newest is None or version > newest.version:
                return PreparedBatch(delivery, unusable=f"its trajectories can't be read: {error}")
            raise RecordsLost(
                f"version {version} can't be trained again: the newest checkpoint is of version "
                f"{self._saved}, the newest published version is {newest.version}. Restore a "
                f"newer checkpoint, or start a new namespace. {error}"
            ) from error

    async def _train(
        self, prepared: PreparedBatch, stopping: asyncio.Task[bool]
    ) -> tuple[Status, dict[str, float]]:
        """Trains on a batch. Raises Stopped if the process is to stop and it takes too long."""
        metrics, version = prepared.metrics(), prepared.delivery.event.version
        for reason in prepared.dropped:
            logger.warning("batch %d: a sample is dropped: %s", version, reason)
        try:
            if prepared.unusable:
                raise UnusableBatch(prepared.unusable)
            stop = threading.Event()
            training = asyncio.ensure_future(
                self._in_thread(lambda: self._learner.train(prepared.updates, stop))
            )
            await asyncio.wait({training, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not training.done():
                await asyncio.wait({training}, timeout=FINISH_S)
                stop.set()
            trained = await training
            dropped = metrics["dropped_samples"] + trained.get("dropped_samples", 0.0)
            metrics |= trained | {"dropped_samples": dropped}
        except UnusableBatch as error:
            logger.error("batch %d is skipped and the weights stay as they are: %s", version, error)
            if version not in self._publisher.history.skipped:
                self._skips.append(str(error))
            return "skipped", metrics
        batch, dropped = prepared.delivery.event, int(metrics["dropped_samples"])
        note_batch(self._publisher.policy, len(batch.samples), dropped, batch.sampled_tokens)
        self._skips.clear()
        self._warn(version, metrics)
        return "trained", metrics

    def _warn(self, version: int, metrics: Mapping[str, float]) -> None:
        """Logs what makes training useless although nothing fails."""
        if masked := metrics.get("masked_updates"):
            logger.warning(
                "batch %d: the loss masked every token in %d of its updates, so they taught "
                "nothing. Raise the loss's bounds, lower batches.max_staleness, or choose another "
                "loss",
                *(version, masked),
            )
        if metrics.get("learning_rate") == 0 and not self._warned:
            self._warned = True
            logger.warning(
                "policy %s: the learning rate has reached 0, so the weights do not change any "
                "more. To go on learning, start a new namespace with a larger "
                "training.total_updates, or with a training.final_learning_rate",
                self._publisher.policy,
            )

    async def _stop_if_all_are_skipped(self) -> None:
        """Raises UsageError if so many batches in a row were skipped that something is wrong."""
        if len(self._skips) < self._settings.max_skipped:
            return
        await self._finish_publishing()
        raise UsageError(
            f"policy {self._publisher.policy}: the last {len(self._skips)} batches were skipped, "
            f"up to version {self._version}, so training stops. The last reason: "
            f"{self._skips[-1]}. If a loss is not finite, lower training.learning_rate; if memory "
            "is too small, lower training.max_tokens. Then continue the run. "
            "training.max_skipped is this limit"
        )

    async def _advance(
        self, prepared: PreparedBatch, status: Status, metrics: dict[str, float], **fields: Any
    ) -> None:
        """Makes the batch's version the current one, and publishes it if it is new.

        `fields` are those of `Publisher.publish`, except `batch` and `logprobs`.
        """
        self._version = prepared.delivery.event.version
        self._offset = prepared.delivery.offset + 1
        if self._silent:
            await self._publish_if_resumed()
            return
        batch, found = prepared.delivery.event, self._learner.start_logprobs
        if status == "trained" and self._settings.record_logprobs and batch.sampled_tokens:
            fields["logprobs"] = await asyncio.to_thread(pack_logprobs, batch, found)
        await self._publish(status, metrics, batch=prepared.delivery.ref, **fields)
        if self._version - self._saved >= self._settings.checkpoint_every:
            await self._save()

    async def _publish(
        self, status: Status, metrics: Mapping[str, float] | None = None, **fields: Any
    ) -> None:
        """Starts to publish the learner's version after the one before it is published.

        `fields` are those of `Publisher.publish`.
        """
        weights = await self._in_thread(self._learner.weights)
        loop = asyncio.get_running_loop()
        started = loop.time()
        await self._finish_publishing()
        metrics = {**(metrics or {}), "publish_wait_s": loop.time() - started}
        self._publishing = asyncio.create_task(
            self._publisher.publish(self._version, status, weights, metrics, **fields)
        )

    async def _finish_publishing(self) -> None:
        """Waits until the current publication is written, and raises its error if it failed."""
        if self._publishing is not None:
            self._stored = await self._publishing
            self._publishing = None

    async def _save(self) -> None:
        """Writes a checkpoint of the current version, if it is published and has none yet."""
        if self._silent:
            return
        # A checkpoint counts only if the log has its version, so wait for the publication.
        await self._finish_publishing()
        if self._stored is None or self._version == self._saved:
            return
        checkpoint = Checkpoint(
            self._version, self._offset, self._stored.digest, self._learner.processes
        )
        await self._in_thread(lambda: self._checkpoints.save(checkpoint, self._learner.save))
        self._saved = self._version

    async def _first_of(self, *waits: asyncio.Task[Any]) -> None:
        """Waits for one of these tasks, and keeps the newest weights in the store meanwhile."""
        while True:
            out = () if self._publishing is None else (self._publishing,)
            done, _ = await asyncio.wait(
                {*waits, *out}, timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED
            )
            if done & set(out):
                await self._finish_publishing()
            if done & set(waits):
                return
            if not done and self._stored is not None and self._publishing is None:
                self._publishing = asyncio.create_task(self._publisher.repair(self._version))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._torch_thread, work)
