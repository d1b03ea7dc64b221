"""The trainer's loop: trains on batch n and publishes version n, in the order of the log.

After a start it continues from the newest complete checkpoint. It trains again on the batches up
to the newest published version without publishing. If the weights then differ from the published
ones, it publishes that version again, as `resumed`. If the process dies while it makes a version,
nothing of that version remains, and the next process makes it again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.services.models.blobs import disk_errors
from headrace.services.models.weights import WeightsFile
from headrace.services.worker.service_context import ServiceContext
from headrace.trainer.checkpoint import Checkpoints
from headrace.trainer.contract.training_session import TrainingSession
from headrace.trainer.loader import PreparedBatch
from headrace.trainer.metrics.exported_metrics import PHASES, note_batch
from headrace.trainer.metrics.recorded_logprobs import pack_logprobs
from headrace.trainer.publish import Publisher, Status
from headrace.trainer.sequences import Stopped, UnusableBatch

if TYPE_CHECKING:
    # They import torch, which is not needed here.
    from headrace.trainer.learner import Learner
    from headrace.trainer.ranks.shared_learner import SharedLearner

logger = logging.getLogger(__name__)

T = TypeVar("T")

FINISH_S = 4.0
"""How long the current version may still take after the process was asked to stop."""
STOP_S = 9.0
"""When the last checkpoint must be written after the process was asked to stop. One second later
the process is ended by force (`services/operate/serve/stopper.py`)."""


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
        self._context = context
        self._learner = learner
        self._torch_thread = torch_thread
        self._session = TrainingSession(context.log, context.recipe, publisher, learner.vocabulary)
        self._checkpoints = Checkpoints(
            context.state / "checkpoints" / publisher.policy, settings.keep_checkpoints
        )
        self._unpublished = context.state / "unpublished" / publisher.policy
        """The files of weights that are published now, or that the next delta starts from."""
        self._numbers = count()
        self._warned = False
        """Whether it said that the learning rate is 0."""
        self._begun = 0
        """The version of the newest checkpoint that was begun."""
        self._completing: asyncio.Task[None] | None = None
        """Completes that checkpoint in the background."""
        self._save_s = 0.0
        """How long the last checkpoint took, in seconds. 0 until one is complete."""
        self._save_by = math.inf
        """When checkpoints must be written, by the event loop's clock."""

    async def run(self) -> None:
        """Resumes, then trains on one batch after the other until the process is to stop."""
        stopping = asyncio.create_task(self._stop())
        try:
            with disk_errors(f"empty {self._unpublished}"):
                if self._unpublished.exists():  # A process that was killed may have left files.
                    shutil.rmtree(self._unpublished)
                if self._learner.processes > 1:
                    self._unpublished.mkdir(parents=True)
            # Only rank 0 gets here, and its predecessor is fenced: nobody writes a checkpoint now.
            await asyncio.to_thread(self._checkpoints.remove_partial)
            if self._session.history.newest is not None:
                await self._load_checkpoint()
            await self._session.begin(self._weights)
            await self._train_all(stopping)
            await self._save()
            await self._complete_checkpoint()
        finally:
            stopping.cancel()
            if self._completing is not None:  # Training has failed, and needs it all the more.
                await asyncio.gather(self._completing, return_exceptions=True)
            await self._session.aclose()

    async def _stop(self) -> bool:
        """Waits until the process is to stop."""
        await self._context.stopping.wait()
        self._save_by = asyncio.get_running_loop().time() + STOP_S
        return True

    async def _load_checkpoint(self) -> None:
        found = await asyncio.to_thread(self._checkpoints.newest, self._session.fits)
        if found is not None:
            checkpoint, state = found
            await self._in_thread(lambda: self._learner.load(state))
            self._session.continue_from(checkpoint)

    async def _weights(self) -> WeightsFile:
        """Returns the weights of the current version: a file on disk if several processes train."""
        if self._learner.processes == 1:
            return await self._in_thread(self._learner.weights)
        path = self._unpublished / f"{next(self._numbers)}.safetensors"
        await self._in_thread(lambda: self._learner.write_weights(path))
        return path

    async def _train_all(self, stopping: asyncio.Task[bool]) -> None:
        """Trains on one batch after the other. The next one is fetched meanwhile."""
        loop, policy = asyncio.get_running_loop(), self._session.policy
        while True:
            started = loop.time()
            PHASES.enter(policy, "wait")
            prepared = await self._session.next(stopping)
            if prepared is None:
                return
            PHASES.enter(policy, "train")
            began, done = loop.time(), self._learner.updates_done
            try:
                status, metrics, reason = await self._train(prepared, stopping)
            except Stopped:
                return
            PHASES.enter(policy, "publish")
            fields: dict[str, Any] = {
                "reason": reason,
                "updates": self._learner.updates_done - done,
                "wait_s": began - started,
                "step_s": loop.time() - began,
                **await self._logprobs(prepared, status),
            }
            await self._session.complete(prepared, status, self._weights, metrics, **fields)
            if self._completing is not None and self._completing.done():
                await self._complete_checkpoint()
            newest = max(self._session.saved, self._begun)
            if self._session.version - newest >= self._settings.checkpoint_every:
                await self._save()

    async def _logprobs(self, prepared: PreparedBatch, status: Status) -> dict[str, bytes]:
        """Returns the logprobs to publish with a new version, if there are any."""
        batch, found = prepared.delivery.event, self._learner.start_logprobs
        if status != "trained" or self._session.silent:
            return {}
        if not self._settings.record_logprobs or not batch.sampled_tokens:
            return {}
        return {"logprobs": await asyncio.to_thread(pack_logprobs, batch, found)}

    async def _train(
        self, prepared: PreparedBatch, stopping: asyncio.Task[bool]
    ) -> tuple[Status, dict[str, float], str]:
        """Trains on a batch. The text says why it was skipped.

        Raises Stopped if the process is to stop and it takes too long.
        """
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
            return "skipped", metrics, str(error)
        batch, dropped = prepared.delivery.event, int(metrics["dropped_samples"])
        note_batch(self._session.policy, len(batch.samples), dropped, batch.sampled_tokens)
        self._warn(version, metrics)
        return "trained", metrics, ""

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
                self._session.policy,
            )

    async def _save(self) -> None:
        """Writes a checkpoint of the current version, if it is published and has none yet.

        Training goes on as soon as the learner's state is written, and the checkpoint is completed
        in the background. Writes none if the process is to stop, and the last one took longer than
        the time that is left: it would be interrupted.
        """
        await self._complete_checkpoint()
        checkpoint = await self._session.checkpoint()
        if checkpoint is None or checkpoint.version == self._session.saved:
            return
        loop, saved = asyncio.get_running_loop(), self._session.saved
        began = loop.time()
        if began + self._save_s > self._save_by:
            logger.warning(
                "policy %s: no checkpoint of version %d is written, because the last one took "
                "%.1f s and the process must end before that. The next start continues from "
                "version %d and trains the later versions again, without publishing them",
                *(self._session.policy, checkpoint.version, self._save_s, saved),
            )
            return
        checkpoint = replace(checkpoint, processes=self._learner.processes)
        complete = await self._in_thread(
            lambda: self._checkpoints.write(checkpoint, self._learner.save)
        )

        async def rest() -> None:
            await asyncio.to_thread(complete)
            self._session.saved, self._save_s = checkpoint.version, loop.time() - began

        self._begun, self._completing = checkpoint.version, asyncio.create_task(rest())

    async def _complete_checkpoint(self) -> None:
        """Waits until the checkpoint that was begun is complete. Raises its error if it failed."""
        if self._completing is not None:
            await self._completing
            self._completing = None

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._torch_thread, work)
