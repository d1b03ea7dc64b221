"""Publishes a policy's versions: stores the weights in the blob store, then writes the record."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

from headrace.errors import UsageError
from headrace.schemas.events import Adapter, Blob, PolicyPublished
from headrace.schemas.recipe.policy import Lora
from headrace.schemas.topics import POLICIES
from headrace.services.kafka.broker import FencedWriter
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import WHOLE, read_events, require_beginning
from headrace.services.log.signatures import PublicationSigner, find_signer
from headrace.services.models.weights import WeightsFile, model_folder
from headrace.services.worker.service_context import ServiceContext
from headrace.trainer.metrics.exported_metrics import note_version
from headrace.trainer.versions import StoredVersion, VersionStore

if TYPE_CHECKING:
    from headrace.trainer.model_loading import FrozenBase  # It imports torch, not needed here.

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class History:
    """The versions of a policy that the log holds."""

    newest: PolicyPublished | None = None
    """The last record of the newest version, which is the one that counts."""
    digests: dict[int, set[bytes]] = field(default_factory=dict)
    """By version: every digest that it was published with."""
    skipped: set[int] = field(default_factory=set)
    """Versions whose batch was not trained on."""
    number: int = 0
    """The highest number of a signed publication."""

    def add(self, published: PolicyPublished, number: int) -> None:
        """Adds the next record of the log that counts. `number` is as in Delivery."""
        self.number = max(self.number, number)
        if self.newest is None or published.version >= self.newest.version:
            self.newest = published
        self.digests.setdefault(published.version, set()).add(published.digest)
        if published.status == "skipped":
            self.skipped.add(published.version)


async def read_history(log: EventLog, policy: str) -> History:
    """Reads the policy's publications so far. Only its fenced writer can be sure they are all.

    Raises RecordsLost if there are none and the first records of the topic were deleted.
    """
    history = History()
    policies = log.topics.partition(POLICIES)
    # Another policy's trainer may have an open transaction before this policy's newest record.
    async with aclosing(read_events(log, {policies: WHOLE}, include_uncommitted=True)) as items:
        async for delivery in items:
            event = delivery.event
            if isinstance(event, PolicyPublished) and event.policy == policy:
                history.add(event, delivery.number)
    if history.newest is None:
        await require_beginning(log.broker, policies, f"version of policy {policy}")
    return history


Status = Literal["initial", "trained", "skipped", "resumed"]


@dataclass(frozen=True, slots=True)
class Publisher:
    """The sole writer of one policy's versions."""

    log: EventLog
    writer: FencedWriter
    policy: str
    versions: VersionStore
    _: KW_ONLY
    base: str
    """The model that the recipe names."""
    dtype: str
    context: int
    """Context length in tokens."""
    tokenizer: Blob
    history: History
    adapter: Adapter | None = None
    """What the versions are adapters of; None if they are whole models."""
    signer: PublicationSigner | None = None
    """Signs each record; None if the recipe names no signers."""

    def with_base(self, base: FrozenBase | None, lora: Lora | None) -> Publisher:
        """Returns a publisher of adapters, after it has stored their base. Blocks.

        Returns this publisher if `base` or `lora` is None. Raises UsageError if the versions so far
        are adapters of another base, or whole models.
        """
        if base is None or lora is None:
            return self
        newest = self.history.newest
        if newest is not None and (
            newest.adapter is None or newest.adapter.base_digest != base.digest
        ):
            raise UsageError(
                f"policy {self.policy}: version {newest.version} is not an adapter of the weights "
                f"that model {self.base!r} has now (digest {base.digest.hex()}). Restore the "
                f"weights that the run started with, or start a new namespace"
            )
        adapter = Adapter(
            base=self.versions.keep_base(base.file),
            base_digest=base.digest,
            rank=lora.rank,
            alpha=lora.alpha,
            targets=base.targets,
        )
        return replace(self, adapter=adapter)

    async def publish(
        self,
        version: int,
        status: Status,
        weights: WeightsFile,
        metrics: Mapping[str, float] | None = None,
        logprobs: bytes | None = None,
        **fields: Any,
    ) -> StoredVersion:
        """Stores a version's weights, a safetensors file, and then writes its record.

        `logprobs` is what `pack_logprobs` returned, which is stored, too. `fields` are more fields
        of the record: `batch`, `updates`, `wait_s` and `step_s`. Raises Fenced if another trainer
        has fenced this one, and DependencyError if it is unknown whether the record was written.
        """
        stored = await asyncio.to_thread(self.versions.add, version, weights)
        if logprobs is not None:
            fields["logprobs"] = await asyncio.to_thread(self.versions.keep_logprobs, logprobs)
        await self._write(version, status, stored, metrics or {}, **fields)
        return stored

    async def resume(self, newest: PolicyPublished, weights: WeightsFile) -> StoredVersion:
        """Continues from the newest version of the log, whose weights were made again.

        Publishes the version again if these weights differ from the published ones, or if the store
        has lost some of its blobs.
        """
        stored = await asyncio.to_thread(self.versions.resume, newest, weights)
        if stored != StoredVersion.of(newest):
            logger.warning(
                "version %d is published again: its weights or its blobs have changed",
                newest.version,
            )
            await self._write(newest.version, "resumed", stored, {})
        return stored

    async def repair(self, version: int) -> StoredVersion:
        """Stores the newest version again if the store has lost it, and publishes it if needed."""
        stored, changed = await asyncio.to_thread(self.versions.repair)
        if changed:
            await self._write(version, "resumed", stored, {})
        return stored

    async def _write(
        self,
        version: int,
        status: Status,
        stored: StoredVersion,
        metrics: Mapping[str, float],
        updates: int = 0,
        **fields: Any,
    ) -> None:
        published = PolicyPublished(
            policy=self.policy,
            version=version,
            status=status,
            digest=stored.digest,
            full=stored.full,
            full_version=stored.full_version,
            deltas=stored.deltas,
            tensor_digests=stored.tensors,
            base=self.base,
            dtype=self.dtype,
            tokenizer=self.tokenizer,
            context=self.context,
            adapter=self.adapter,
            updates=updates,
            metrics={name: value for name, value in metrics.items() if isfinite(value)},
            **fields,
        )
        await self.log.send_all(self.writer, [published], self.signer)
        note_version(self.policy, version, status, published.metrics)
        logger.info(
            "policy %s version %d %s: reward %s, %d updates, waited %.2f s, trained %.2f s",
            self.policy,
            version,
            status,
            published.metrics.get("reward_mean", "-"),
            published.updates,
            published.wait_s,
            published.step_s,
        )


@asynccontextmanager
async def sole_publisher(context: ServiceContext, policy: str) -> AsyncIterator[Publisher]:
    """Fences the policy's previous trainer, and then reads the history, which is now complete."""
    settings = context.recipe.policies[policy]
    training = settings.training
    folder = model_folder(settings.model)
    # Without its key, a trainer must not fence the one that has it.
    signer = find_signer(context.log.topics, policy)
    writer = await context.log.broker.fenced(f"{context.namespace}.trainer.{policy}")
    try:
        history = await read_history(context.log, policy)
        if signer is not None:
            signer.newest = history.number
        tokenizer = await asyncio.to_thread(
            context.blobs.put, (folder / "tokenizer.json").read_bytes(), "application/json"
        )
        configuration = json.loads((folder / "config.json").read_text())
        yield Publisher(
            context.log,
            writer,
            policy,
            VersionStore(context.blobs, training.full_every if training else 1),
            base=settings.model,
            dtype=settings.dtype,
            context=context_length(configuration),
            tokenizer=tokenizer,
            history=history,
            signer=signer,
        )
    finally:
        await writer.close()


def context_length(configuration: Mapping[str, Any]) -> int:
    """Returns a model's context length in tokens, 0 if its config.json does not say it."""
    names = ("max_position_embeddings", "n_positions")  # The second one is GPT-2's.
    return next((int(configuration[name]) for name in names if configuration.get(name)), 0)
