"""Publishing a policy's versions: the weights into the blob store first, then the record."""

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
from headrace.schemas.events import Adapter, Blob, PolicyPublished, Ref
from headrace.schemas.recipe.policy import Lora
from headrace.schemas.topics import POLICIES
from headrace.services.kafka.broker import FencedWriter
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import WHOLE, read_events, require_beginning
from headrace.services.models.weights import model_folder
from headrace.services.worker.service_context import ServiceContext
from headrace.trainer.versions import Stored, VersionStore

if TYPE_CHECKING:
    from headrace.trainer.model_loading import Base  # torch, which publishing has no need of

logger = logging.getLogger(__name__)

CHECK_S = 60.0
"""How often an idle trainer looks whether the blob store still has the newest weights: without
them no worker serves the version, and no batch may ever come."""


@dataclass(slots=True)
class History:
    """What the log says of a policy's versions."""

    newest: PolicyPublished | None = None
    """The last record of the newest version: the one that counts."""
    digests: dict[int, set[bytes]] = field(default_factory=dict)
    """Of each version: every digest that it was published with."""
    skipped: set[int] = field(default_factory=set)
    """Versions whose batch was not trained on."""

    def add(self, published: PolicyPublished) -> None:
        """Takes in the next record of the log."""
        if self.newest is None or published.version >= self.newest.version:
            self.newest = published
        self.digests.setdefault(published.version, set()).add(published.digest)
        if published.status == "skipped":
            self.skipped.add(published.version)


async def read_history(log: EventLog, policy: str) -> History:
    """The policy's publications so far. Only a fenced writer knows that no more will come.

    RecordsLost where there is none, but what the topic began with was deleted.
    """
    history = History()
    place = log.topics.partition(POLICIES)
    # Another policy's trainer may have a transaction open there, before one's own newest record.
    async with aclosing(read_events(log, {place: WHOLE}, include_uncommitted=True)) as deliveries:
        async for delivery in deliveries:
            event = delivery.event
            if isinstance(event, PolicyPublished) and event.policy == policy:
                history.add(event)
    if history.newest is None:
        await require_beginning(log.broker, place, f"version of policy {policy}")
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
    adapter: Adapter | None = None
    """Of what the versions are adapters; None where they are whole models."""

    def on_base(self, base: Base, lora: Lora, history: History) -> Publisher:
        """The publisher of a base's adapters. Stores the base, and blocks.

        UsageError where the versions so far are of another.
        """
        newest = history.newest
        if newest is not None and (
            newest.adapter is None or newest.adapter.base_digest != base.digest
        ):
            raise UsageError(
                f"policy {self.policy}: version {newest.version} is no adapter of the weights that "
                f"model {self.base!r} has now (digest {base.digest.hex()}). Bring back those that "
                f"the run began with, or begin a new namespace"
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
        weights: bytes,
        *,
        batch: Ref | None = None,
        updates: int = 0,
        wait_s: float = 0.0,
        step_s: float = 0.0,
        metrics: Mapping[str, float] | None = None,
    ) -> Stored:
        """Stores a version's weights, a safetensors file, and then writes its record.

        Fenced where another trainer has taken over; DependencyError where the outcome is unknown.
        """
        stored = await asyncio.to_thread(self.versions.add, version, weights)
        facts = {"batch": batch, "updates": updates, "wait_s": wait_s, "step_s": step_s}
        await self._write(version, status, stored, facts, metrics or {})
        return stored

    async def go_on(self, newest: PolicyPublished, weights: bytes) -> Stored:
        """Goes on from the newest version of the log, of which these weights came.

        They are published again where they came out otherwise, or the store has lost some.
        """
        stored = await asyncio.to_thread(self.versions.adopt, newest, weights)
        if stored != Stored.of(newest):
            logger.warning("version %d is not what was published", newest.version)
            await self._write(newest.version, "resumed", stored, {"updates": 0}, {})
        return stored

    async def mend(self, version: int) -> Stored:
        """Sees to it that the store has the newest version; it is published again if it must be."""
        stored, other = await asyncio.to_thread(self.versions.mend)
        if other:
            await self._write(version, "resumed", stored, {"updates": 0}, {})
        return stored

    async def _write(
        self,
        version: int,
        status: Status,
        stored: Stored,
        facts: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> None:
        published = PolicyPublished(
            policy=self.policy,
            version=version,
            status=status,
            digest=stored.digest,
            full=stored.full,
            full_version=stored.full_version,
            deltas=stored.deltas,
            base=self.base,
            dtype=self.dtype,
            tokenizer=self.tokenizer,
            context=self.context,
            adapter=self.adapter,
            metrics={name: value for name, value in metrics.items() if isfinite(value)},
            **facts,
        )
        await self.log.send_all(self.writer, [published])
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
async def sole_publisher(
    context: ServiceContext, policy: str
) -> AsyncIterator[tuple[Publisher, History]]:
    """Takes over as the policy's sole writer; only then is its history complete."""
    settings = context.recipe.policies[policy]
    training = settings.training
    folder = model_folder(settings.model)
    writer = await context.log.broker.fenced(f"{context.namespace}.trainer.{policy}")
    try:
        history = await read_history(context.log, policy)
        tokenizer = await asyncio.to_thread(
            context.blobs.put, folder / "tokenizer.json", "application/json"
        )
        configuration = json.loads((folder / "config.json").read_text())
        yield (
            Publisher(
                context.log,
                writer,
                policy,
                VersionStore(context.blobs, training.full_every if training else 1),
                base=settings.model,
                dtype=settings.dtype,
                context=int(configuration.get("max_position_embeddings", 0)),
                tokenizer=tokenizer,
            ),
            history,
        )
    finally:
        await writer.close()
