"""Publishing a policy's versions: the weights into the blob store first, then the record."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from math import isfinite
from typing import Literal

from schemas.events import Blob, PolicyPublished, Ref
from schemas.topics import POLICIES
from services.blobs import BlobStore
from services.context import ServiceContext
from services.errors import BlobError
from services.kafka.broker import FencedWriter, Partition
from services.log import EventLog, read_all, require_beginning
from services.weights import model_folder, weights_digest

logger = logging.getLogger(__name__)

SAFETENSORS = "application/vnd.safetensors"
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
    place = Partition(log.topics.name(POLICIES), 0)
    # Another policy's trainer may have a transaction open there, before one's own newest record.
    async with aclosing(read_all(log, {place: "first"}, undecided=True)) as deliveries:
        async for delivery in deliveries:
            event = delivery.event
            if isinstance(event, PolicyPublished) and event.policy == policy:
                history.add(event)
    if history.newest is None:
        await require_beginning(log.broker, place, f"version of policy {policy}")
    return history


@dataclass(frozen=True, slots=True)
class Stored:
    """A version's weights in the blob store."""

    blob: Blob
    digest: bytes


def store(blobs: BlobStore, weights: bytes) -> Stored:
    """Puts a safetensors file into the blob store. Blocks."""
    return Stored(blobs.put(weights, SAFETENSORS), weights_digest(weights))


def mend(blobs: BlobStore, stored: Stored, weights: Callable[[], bytes]) -> None:
    """Stores weights again where the store has lost or damaged them. Blocks."""
    try:
        blobs.get(stored.blob)
    except BlobError as error:
        logger.error("the newest weights are stored again: %s", error)
        store(blobs, weights())


@dataclass(frozen=True, slots=True)
class Publisher:
    """The sole writer of one policy's versions."""

    log: EventLog
    writer: FencedWriter
    policy: str
    _: KW_ONLY
    base: str
    """The model that the recipe names."""
    dtype: str
    context: int
    """Context length in tokens."""
    tokenizer: Blob

    async def publish_if_other(self, newest: PolicyPublished, stored: Stored) -> None:
        """Publishes the newest version again where its weights came out otherwise."""
        if (stored.digest, stored.blob) != (newest.digest, newest.full):
            logger.warning("version %d came out otherwise than published", newest.version)
            await self.publish(newest.version, "resumed", stored)

    async def publish(
        self,
        version: int,
        status: Literal["initial", "trained", "skipped", "resumed"],
        stored: Stored,
        *,
        batch: Ref | None = None,
        updates: int = 0,
        wait_s: float = 0.0,
        step_s: float = 0.0,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Writes the record of a version whose weights are stored.

        Fenced where another trainer has taken over; DependencyError where the outcome is unknown.
        """
        published = PolicyPublished(
            policy=self.policy,
            version=version,
            status=status,
            batch=batch,
            digest=stored.digest,
            full=stored.blob,
            full_version=version,
            base=self.base,
            dtype=self.dtype,
            tokenizer=self.tokenizer,
            context=self.context,
            updates=updates,
            wait_s=wait_s,
            step_s=step_s,
            metrics={name: value for name, value in (metrics or {}).items() if isfinite(value)},
        )
        await self.log.send_all(self.writer, [published])
        logger.info(
            "policy %s version %d %s: reward %s, %d updates, waited %.2f s, trained %.2f s",
            self.policy,
            version,
            status,
            published.metrics.get("reward_mean", "-"),
            updates,
            wait_s,
            step_s,
        )


@asynccontextmanager
async def sole_publisher(
    context: ServiceContext, policy: str
) -> AsyncIterator[tuple[Publisher, History]]:
    """Takes over as the policy's sole writer; only then is its history complete."""
    settings = context.recipe.policies[policy]
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
                base=settings.model,
                dtype=settings.dtype,
                context=int(configuration.get("max_position_embeddings", 0)),
                tokenizer=tokenizer,
            ),
            history,
        )
    finally:
        await writer.close()
