"""What another team's trainer does through `TrainerClient`, step by step.

The trainer keeps its own state, and with it a `Checkpoint`. This class knows where it stands, what
is due next, and what is published already.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.log.event_log import EventLog
from headrace.services.models.weights import model_folder, weights_digest
from headrace.trainer.checkpoint import Checkpoint
from headrace.trainer.contract.training_batch import TrainingBatch
from headrace.trainer.contract.training_session import TrainingSession
from headrace.trainer.contract.weight_files import check_layout
from headrace.trainer.loader import PreparedBatch
from headrace.trainer.metrics.exported_metrics import PHASES, note_batch
from headrace.trainer.publish import Publisher, Status

logger = logging.getLogger(__name__)


def trained_elsewhere(recipe: Recipe, policy: str | None) -> str:
    """Returns the policy that another team's trainer trains: `policy`, or else the only one.

    Raises UsageError if the recipe does not leave this policy to another trainer.
    """
    external = [
        name
        for name, one in recipe.policies.items()
        if one.training is not None and one.training.external
    ]
    if policy is None and len(external) == 1:
        policy = external[0]
    if policy is None or policy not in external:
        raise UsageError(
            f"the policy is {policy}, but the run leaves these to another trainer: "
            f"{', '.join(external) or '(none)'}. Name one of them, or start a run whose recipe "
            "has policies.NAME.training.external = true"
        )
    if recipe.policies[policy].lora is not None:
        raise UsageError(
            f"policies.{policy}.lora: TrainerClient publishes whole models and no adapters. Merge "
            "the adapter before you publish, and start a run without this key"
        )
    return policy


class ExternalTrainer:
    """One policy's training by another program. Only one thread at a time may use it."""

    def __init__(self, log: EventLog, recipe: Recipe, publisher: Publisher) -> None:
        """`publisher` has fenced the policy's previous trainer."""
        settings = recipe.policies[publisher.policy]
        self._dtype = settings.dtype
        self._versions = publisher.versions
        self._session = TrainingSession(log, recipe, publisher, _vocabulary(settings.model))
        self._weights = b""
        """The weights of the trainer's version; empty until it gave some."""
        self._due: PreparedBatch | None = None
        """The batch that the trainer works on."""
        self._times: tuple[float, float] = 0.0, 0.0
        """Seconds that the trainer waited for that batch, and when it got it."""

    @property
    def policy(self) -> str:
        """The policy that is trained."""
        return self._session.policy

    @property
    def version(self) -> int:
        """The version that the trainer stands at."""
        return self._session.version

    @property
    def newest(self) -> int | None:
        """The newest version that was published before this trainer started; None if none was."""
        newest = self._session.history.newest
        return None if newest is None else newest.version

    def resume(self, checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
        """Returns the newest of these checkpoints that fits the log, and continues from it.

        None means that the trainer starts from version 0. Raises UsageError after a first publish.
        """
        if self._weights:
            raise UsageError("call `resume` once, before the first `publish`")
        fitting = [one for one in checkpoints if self._session.fits(one)]
        chosen = max(fitting, key=lambda one: one.version, default=None)
        if chosen is not None:
            self._session.continue_from(chosen)
        return chosen

    async def publish(
        self, version: int, packed: bytes, metrics: Mapping[str, float], updates: int
    ) -> Checkpoint:
        """Publishes the weights of a version, if it is not published yet, as `TrainerClient` has
        it. `packed` is a safetensors file."""
        begun, prepared = bool(self._weights), self._due
        due = self.version if not begun else self._number(prepared)
        if version != due:
            raise UsageError(f"version {version} can't be published now: {self._expected()}")
        before: bytes | Path | None = self._weights
        if not begun:
            before = await asyncio.to_thread(self._published)
        await asyncio.to_thread(check_layout, packed, self._dtype, before)
        self._weights = packed
        if prepared is None:
            await self._session.begin(self._given)
        else:
            trained = len({one.sample for one in _all_sequences(prepared)})
            batch = prepared.delivery.event
            note_batch(self._session.policy, trained, len(prepared.dropped), batch.sampled_tokens)
            await self._complete(prepared, "trained", metrics, updates=updates)
        return await self._checkpoint()

    async def skip(self, version: int, reason: str) -> Checkpoint:
        """Gives the batch of a version up, as `TrainerClient` has it."""
        prepared = self._due
        if prepared is None or version != self._number(prepared):
            raise UsageError(f"version {version} can't be skipped now: {self._expected()}")
        await self._skip(prepared, reason)
        return await self._checkpoint()

    async def next(self, stopping: asyncio.Task[bool]) -> TrainingBatch | None:
        """Returns the next batch that has something to train on; None once `stopping` is done.

        Batches that can't be used are skipped, and batches without samples are published with the
        weights that the trainer has.
        """
        loop = asyncio.get_running_loop()
        if not self._weights or self._due is not None:
            raise UsageError(f"the next batch can't be given yet: {self._expected()}")
        PHASES.enter(self._session.policy, "wait")
        started = loop.time()
        while (prepared := await self._session.next(stopping)) is not None:
            self._times = loop.time() - started, loop.time()
            for reason in prepared.dropped:
                number = self._number(prepared)
                logger.warning("batch %d: a sample is dropped: %s", number, reason)
            if prepared.unusable:
                await self._skip(prepared, prepared.unusable)
            elif not prepared.updates:
                await self._complete(prepared, "trained", {}, updates=0)
            else:
                self._due = prepared
                PHASES.enter(self._session.policy, "train")
                return self._batch(prepared)
        return None

    async def aclose(self) -> None:
        """Ends what runs in the background."""
        await self._session.aclose()

    def _batch(self, prepared: PreparedBatch) -> TrainingBatch:
        batch = prepared.delivery.event
        return TrainingBatch(
            version=batch.version,
            published=self.newest is not None and batch.version <= self.newest,
            sequences=_all_sequences(prepared),
            origins=prepared.origins,
            seed=batch.seed,
            metrics=prepared.metrics(),
        )

    async def _skip(self, prepared: PreparedBatch, reason: str) -> None:
        number = self._number(prepared)
        logger.error("batch %d is skipped and the weights stay as they are: %s", number, reason)
        await self._complete(prepared, "skipped", {}, reason=reason)

    async def _complete(
        self,
        prepared: PreparedBatch,
        status: Status,
        metrics: Mapping[str, float],
        **fields: Any,
    ) -> None:
        PHASES.enter(self._session.policy, "publish")
        wait_s, began = self._times
        fields |= {"wait_s": wait_s, "step_s": asyncio.get_running_loop().time() - began}
        known = prepared.metrics() | dict(metrics)
        await self._session.complete(prepared, status, self._given, known, **fields)
        self._due = None

    async def _checkpoint(self) -> Checkpoint:
        found = await self._session.checkpoint()
        if found is not None:
            return found
        digest = await asyncio.to_thread(weights_digest, self._weights)
        checkpoint = Checkpoint(self.version, self._session.offset, digest)
        if not self._session.fits(checkpoint):
            logger.warning(
                "version %d has other weights than when it was published first. Either the "
                "trainer's updates are not deterministic, or it lost a part of its state",
                self.version,
            )
        return checkpoint

    def _published(self) -> Path | None:
        """Returns weights that another process has published, if the store has them. Blocks."""
        newest = self._session.history.newest
        return None if newest is None else self._versions.full_file(newest)

    async def _given(self) -> bytes:
        return self._weights

    def _number(self, prepared: PreparedBatch | None) -> int | None:
        return None if prepared is None else prepared.delivery.event.version

    def _expected(self) -> str:
        if not self._weights:
            return f"first publish version {self.version}, where the trainer stands"
        if self._due is not None:
            return f"batch {self._number(self._due)} is open. Publish or skip its version"
        return "no batch is open. Take the next one from `batches`"


def _all_sequences(prepared: PreparedBatch) -> list[Any]:
    return [one for update in prepared.updates for one in update.sequences]


def _vocabulary(model: str) -> int:
    """Returns the number of token ids of a model. Raises UsageError if its folder lacks it."""
    path = model_folder(model) / "config.json"
    configuration = json.loads(path.read_text())
    size = configuration.get("vocab_size") or configuration.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int):
        raise UsageError(f"{path} has no `vocab_size`, the number of token ids: add it")
    return size
