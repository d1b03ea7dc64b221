"""A client for other trainers: batches in, policy versions out.

    from headrace import TrainerClient, plan

    with TrainerClient() as client:
        start = client.resume(saved)                       # your checkpoints; None: version 0
        client.publish(start.version if start else 0, model_weights())
        for batch in client.batches():
            for micro_batch in plan(batch, ranks=1, max_tokens=8192)[0]:
                ...                                        # forward and backward
            checkpoint = client.publish(batch.version, model_weights())
            if not batch.published:
                ...                                        # save it with your own state

docs/contract-trainer.md has the contract. This module does not import torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from headrace.loop_thread import ClosedAtExit, LoopThread
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.models.weights import model_folder
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import connect, locate
from headrace.services.namespace.lookup import find_namespace
from headrace.services.namespace.run_life import follow_life
from headrace.services.operate.run_references import fetch_models
from headrace.services.operate.serve.open_context import claim_models, open_context
from headrace.services.worker.life_records import LifeRecords
from headrace.services.worker.service_context import ServiceContext
from headrace.trainer.checkpoint import Checkpoint
from headrace.trainer.contract.external_trainer import ExternalTrainer, trained_elsewhere
from headrace.trainer.contract.training_batch import TrainingBatch
from headrace.trainer.contract.weight_files import GivenWeights, pack_weights
from headrace.trainer.publish import sole_publisher

logger = logging.getLogger(__name__)

NO_METRICS: Mapping[str, float] = MappingProxyType({})


class TrainerClient(ClosedAtExit):
    """The sole trainer of a policy that the recipe leaves to another trainer.

    While it is open, it is the only one: it fences the policy's trainer before it, whose next
    `publish` raises Fenced. Use it in one process and one thread, which is rank 0 if there are
    several. A `TrainingBatch` can be pickled and sent to the other ranks.
    """

    def __init__(
        self,
        policy: str | None = None,
        *,
        bootstrap: str | None = None,
        registry: str | None = None,
        namespace: str | None = None,
        state: str | Path | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Connects, and fences the policy's trainer before it.

        Without `policy`, the run must leave only one to another trainer. The other arguments are
        those of `AsyncClient`. If the recipe names `signers`, the variable HEADRACE_SIGNING_KEY
        names the file of the private key.

        Raises DependencyError if the broker does not answer, and UsageError if there is no such
        namespace, if its run has ended, or if the recipe does not leave the policy to another
        trainer.
        """
        cluster = ClusterConfig.of_environment(
            state=None if state is None else Path(state),
            bootstrap_servers=bootstrap,
            registry_url=registry,
            namespace=namespace,
            kafka_properties=dict(properties or {}),
        )
        cluster = replace(cluster, role="trainer")
        self._thread = LoopThread()
        self._stop = asyncio.Event()
        with ExitStack() as closing:
            closing.callback(self._thread.close)
            stack = AsyncExitStack()
            closing.callback(lambda: self._thread.wait(stack.aclose()))
            opening = stack.enter_async_context(_open(cluster, policy, self._stop))
            self._context, self._trainer, self._follower = self._thread.wait(opening)
            self._stopping = self._thread.wait(_task_of(self._stop))
            self._closing = closing.pop_all()

    @property
    def namespace(self) -> str:
        """The namespace that this client uses."""
        return self._context.namespace

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return self._context.recipe

    @property
    def model_folder(self) -> Path:
        """The folder of the policy's model: configuration, tokenizer, and weights if it has some.

        Without weights, version 0 is random, from the recipe's seed.
        """
        return model_folder(self.recipe.policies[self._trainer.policy].model, weights=True)

    @property
    def newest(self) -> int | None:
        """The newest version that was published before this client opened; None if none was."""
        return self._trainer.newest

    def resume(self, checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
        """Returns the newest of your checkpoints that fits the log; None to start from version 0.

        Load your state of that checkpoint, and publish its version: nothing is written unless its
        weights came out different. Batches up to `newest` then come once more, with `published`
        set. Train on them as before, so that model and optimizer are what they were.
        """
        return self._trainer.resume(checkpoints)

    def batches(self) -> Iterator[TrainingBatch]:
        """Yields batch after batch, in order. Publish or skip each before you take the next one.

        It ends when the run has ended, or after `stop`. Batches that can't be used are skipped
        without being yielded. Raises UsageError if so many batches in a row were skipped that
        something is wrong (`training.max_skipped`), RecordsLost if the log lacks a batch, and
        DependencyError if the state of the run can no longer be followed.
        """
        while (batch := self._thread.wait(self._trainer.next(self._stopping))) is not None:
            yield batch
        self._thread.wait(_result_of(self._follower))

    def publish(
        self,
        version: int,
        weights: GivenWeights,
        metrics: Mapping[str, float] = NO_METRICS,
        *,
        updates: int = 1,
    ) -> Checkpoint:
        """Publishes the weights of a version, and returns what to save with your state.

        `version` is that of the batch, or before the first batch the one that you stand at.
        `weights` is a safetensors file as bytes or a path, a folder of such files, or names with
        numpy arrays or torch tensors. They have the names that transformers gives the model's
        parameters, tied ones once, and the recipe's dtype. They are stored in full, or as a delta
        to the version before. `metrics` are recorded with the version, and `updates` is the number
        of optimizer updates that the batch made.

        Save the checkpoint only if the batch's version was not `published` before. If updates are
        not deterministic, the weights that are made again differ, and no checkpoint of them fits.

        On return the version is in the log. If it was published before, it is not published again,
        unless it is the newest one and its weights differ. Raises Fenced if another trainer has
        taken over, UsageError if another version is due or the weights don't fit those before
        them, and DependencyError if the log or the blob store can't be reached. After Fenced and
        DependencyError, end the process.
        """
        packed = pack_weights(weights)  # In this thread: an iterable may talk to other ranks.
        return self._thread.wait(self._trainer.publish(version, packed, metrics, updates))

    def skip(self, version: int, reason: str) -> Checkpoint:
        """Gives up the batch of a version, for example because its loss is not finite.

        The version is published as `skipped`, with the weights before it. Raises what `publish`
        raises.
        """
        return self._thread.wait(self._trainer.skip(version, reason))

    def stop(self) -> None:
        """Ends `batches` instead of the next batch. Signal handlers may call it."""
        self._thread.loop.call_soon_threadsafe(self._stop.set)


async def _task_of(stop: asyncio.Event) -> asyncio.Task[bool]:
    return asyncio.create_task(_true_after(stop))


async def _result_of(task: asyncio.Task[None]) -> None:
    """Raises the error of a task that has failed."""
    if task.done():
        await task


async def _true_after(stop: asyncio.Event) -> bool:
    await stop.wait()
    return True


@asynccontextmanager
async def _open(
    cluster: ClusterConfig, policy: str | None, stop: asyncio.Event
) -> AsyncIterator[tuple[ServiceContext, ExternalTrainer, asyncio.Task[None]]]:
    """Opens a run as its trainer. `stop` is set when the run ends.

    The task follows the run, and fails if that is no longer possible.
    """
    began_s = time.time()
    cluster = await asyncio.to_thread(locate, cluster)
    worker = f"trainer-{socket.gethostname()}-{os.getpid()}"
    async with connect(cluster, worker) as connection:
        topics, life = await find_namespace(connection, cluster.namespace)
        life.require_open(topics.namespace)
        recipe = life.recipe()
        name = trained_elsewhere(recipe, policy)
        await asyncio.to_thread(partial(fetch_models, recipe, cluster, logger.info))
        context = await open_context(
            *(connection, recipe, replace(cluster, namespace=topics.namespace)),
            *(stop, asyncio.Event(), asyncio.Event()),
        )
        await asyncio.to_thread(claim_models, recipe, context.blobs)
        context.ready.set()
        own = name if len(recipe.policies) > 1 else ""
        lives = LifeRecords(context.log.send, worker, "trainer", own, began_s, context.ready)
        async with sole_publisher(context, name) as publisher, lives.recording():
            trainer = ExternalTrainer(context.log, recipe, publisher)
            follower = asyncio.create_task(_stop_at_end(context))
            try:
                yield context, trainer, follower
            finally:
                follower.cancel()
                await asyncio.gather(follower, return_exceptions=True)
                await trainer.aclose()


async def _stop_at_end(context: ServiceContext) -> None:
    """Sets `stopping` when the run has ended, or when its state can no longer be followed."""
    try:
        async with aclosing(follow_life(context.log)) as lives:
            async for life in lives:
                if life.ended is not None:
                    return
    finally:
        context.stopping.set()
