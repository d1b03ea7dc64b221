"""One policy's training as the log sees it: batches come in order, and each makes its version.

Headrace's own trainer and the client for other trainers both work through this class. It knows
nothing of models: a trainer gives it the weights as a safetensors file.

After a start, a trainer makes the versions that are published already once more, from its newest
checkpoint. The session publishes none of them. At the newest one it compares the weights: if they
differ from the published ones, it publishes that version again, as `resumed`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from headrace.errors import DecodeError, DependencyError, RecordsLost, UnknownSchema, UsageError
from headrace.schemas.events import BatchAssembled
from headrace.schemas.recipe.policy import Training
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import BATCHES
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import CaughtUp, EventStream, follow_events
from headrace.services.models.weights import WeightsFile
from headrace.trainer.checkpoint import Checkpoint
from headrace.trainer.loader import PreparedBatch, load_batch
from headrace.trainer.publish import History, Publisher, Status
from headrace.trainer.versions import StoredVersion

logger = logging.getLogger(__name__)

CHECK_S = 60.0
"""How often an idle trainer checks that the blob store has the newest weights. Without them no
worker serves the version, so no batch might ever come."""

Weights = Callable[[], Awaitable[WeightsFile]]
"""Returns the weights of the version that the trainer has now, as a safetensors file."""


class TrainingSession:
    """The batches and versions of one policy, for the life of this process."""

    def __init__(
        self, log: EventLog, recipe: Recipe, publisher: Publisher, vocabulary: int
    ) -> None:
        """`publisher` has fenced the policy's previous trainer. Token ids that are not below
        `vocabulary` make a sample unusable."""
        settings = recipe.policies[publisher.policy].training
        assert settings is not None, "a policy without training has no batches"
        self._settings: Training = settings
        self._passing = 1.0 if recipe.evaluation is None else recipe.evaluation.passing
        self._log = log
        self._publisher = publisher
        self._vocabulary = vocabulary
        self.version = 0
        """The version that the trainer's weights are of."""
        self.offset = 0
        """The batch after it is at this offset, or later."""
        self.saved = 0
        """The version of the newest checkpoint. Version 0 needs none."""
        self.stored: StoredVersion | None = None
        """The newest published weights. None until the trainer has caught up with the log."""
        self._skips: list[str] = []
        """Why the newest batches were skipped, one reason for each: those since the last one that
        was trained on, and that this process saw first."""
        self._reader: EventStream | None = None
        self._fetching: asyncio.Task[PreparedBatch] | None = None
        """Fetches the next batch."""
        self._publishing: asyncio.Task[StoredVersion] | None = None
        """Publishes or repairs a version in the background."""

    @property
    def policy(self) -> str:
        """The policy that is trained."""
        return self._publisher.policy

    @property
    def history(self) -> History:
        """What the log had of this policy when the session began."""
        return self._publisher.history

    @property
    def silent(self) -> bool:
        """Whether the trainer's version is older than the newest that was published before."""
        newest = self.history.newest
        return newest is not None and self.version < newest.version

    def fits(self, checkpoint: Checkpoint) -> bool:
        """Whether the log has the version of a checkpoint, with its weights."""
        digests = self.history.digests
        return checkpoint.digest in digests.get(checkpoint.version, ())

    def continue_from(self, checkpoint: Checkpoint) -> None:
        """Continues after a checkpoint that fits. Call it before `begin`."""
        self.version = self.saved = checkpoint.version
        self.offset = checkpoint.offset

    async def begin(self, weights: Weights) -> None:
        """Publishes version 0, or compares the weights if they are of the newest version.

        Then it begins to fetch the next batch.
        """
        if self.history.newest is None:
            await self._publish("initial", weights)
        else:
            logger.info("policy %s continues from version %d", self.policy, self.version)
            await self._compare(weights)
        partition = self._log.topics.partition(BATCHES, self.policy)
        self._reader = follow_events(self._log, {partition: self.offset or "first"})
        self._fetching = asyncio.create_task(self._fetch(self._reader, self.version + 1))

    async def next(self, stopping: asyncio.Task[bool]) -> PreparedBatch | None:
        """Returns the next batch, or None once `stopping` is done.

        Meanwhile it fetches the one after it, and keeps the newest weights in the blob store.
        Raises RecordsLost if the log has a later batch instead, or lacks trajectories of a batch
        that was trained on before.
        """
        assert self._fetching is not None, "the session has not begun"
        assert self._reader is not None
        await self._first_of(self._fetching, stopping)
        if stopping.done():
            return None
        prepared = self._fetching.result()
        following = prepared.delivery.event.version + 1
        self._fetching = asyncio.create_task(self._fetch(self._reader, following))
        return prepared

    async def complete(
        self,
        prepared: PreparedBatch,
        status: Status,
        weights: Weights,
        metrics: Mapping[str, float],
        *,
        reason: str = "",
        **fields: Any,
    ) -> None:
        """Makes the batch's version the current one, and begins to publish it if it is new.

        `reason` says why the batch was skipped. `fields` are those of `Publisher.publish`, except
        `batch`. Raises UsageError if so many batches in a row were skipped that something is wrong.
        """
        batch = prepared.delivery.event
        known = self.history.newest is not None and batch.version <= self.history.newest.version
        if status == "trained":
            self._skips.clear()
        elif batch.version not in self.history.skipped:
            self._skips.append(reason)
        self.version, self.offset = batch.version, prepared.delivery.offset + 1
        if known:
            await self._compare(weights)
        else:
            await self._publish(status, weights, metrics, batch=prepared.delivery.ref, **fields)
        if len(self._skips) >= self._settings.max_skipped:
            await self.finish_publishing()
            self._stop_skipping()

    async def finish_publishing(self) -> None:
        """Waits until the current publication is written, and raises its error if it failed."""
        if self._publishing is not None:
            self.stored = await self._publishing
            self._publishing = None

    async def checkpoint(self) -> Checkpoint | None:
        """Returns where the trainer stands, once that is published.

        Returns None while the log has a newer version: then no checkpoint is needed.
        """
        # A checkpoint counts only if the log has its version, so wait for the publication.
        await self.finish_publishing()
        if self.silent or self.stored is None:
            return None
        return Checkpoint(self.version, self.offset, self.stored.digest)

    async def aclose(self) -> None:
        """Ends what runs in the background."""
        tasks = [task for task in (self._fetching, self._publishing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._reader is not None:
            await self._reader.aclose()

    async def _compare(self, weights: Weights) -> None:
        """Compares the weights with the newest published version, if they are of that one."""
        newest = self.history.newest
        if newest is not None and self.version == newest.version:
            self.stored = await self._publisher.resume(newest, await weights())

    async def _publish(
        self,
        status: Status,
        source: Weights,
        metrics: Mapping[str, float] | None = None,
        **fields: Any,
    ) -> None:
        """Starts to publish the trainer's version after the one before it is published."""
        weights = await source()
        loop = asyncio.get_running_loop()
        started = loop.time()
        await self.finish_publishing()
        metrics = {**(metrics or {}), "publish_wait_s": loop.time() - started}
        self._publishing = asyncio.create_task(
            self._publisher.publish(self.version, status, weights, metrics, **fields)
        )

    async def _first_of(self, *waits: asyncio.Task[Any]) -> None:
        """Waits for one of these tasks, and keeps the newest weights in the store meanwhile."""
        while True:
            out = () if self._publishing is None else (self._publishing,)
            done, _ = await asyncio.wait(
                {*waits, *out}, timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED
            )
            if done & set(out):
                await self.finish_publishing()
            if done & set(waits):
                return
            if not done and self.stored is not None and self._publishing is None:
                self._publishing = asyncio.create_task(self._publisher.repair(self.version))

    async def _fetch(self, reader: EventStream, version: int) -> PreparedBatch:
        """Returns the batch that trains `version`, with its trajectories. Passes over earlier ones.

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
        version, newest = delivery.event.version, self.history.newest
        if version in self.history.skipped:
            return PreparedBatch(delivery, unusable="it was skipped when it was first published")
        try:
            return await load_batch(
                *(self._log, delivery, self._vocabulary, self._settings.minibatches),
                *(self._passing, self._settings.teacher is not None),
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
                f"{self.saved}, the newest published version is {newest.version}. Restore a "
                f"newer checkpoint, or start a new namespace. {error}"
            ) from error

    def _stop_skipping(self) -> None:
        raise UsageError(
            f"policy {self.policy}: the last {len(self._skips)} batches were skipped, "
            f"up to version {self.version}, so training stops. The last reason: "
            f"{self._skips[-1]}. If a loss is not finite, lower training.learning_rate; if memory "
            "is too small, lower training.max_tokens. Then continue the run. "
            "training.max_skipped is this limit"
        )
