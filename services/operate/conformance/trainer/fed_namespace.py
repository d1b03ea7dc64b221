"""A namespace in which the kit stands for all services but the trainer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import BlobError, DependencyError
from headrace.schemas.events import PolicyPublished
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import POLICIES
from headrace.services.inference.local_weights import LocalWeights
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import CaughtUp, follow_events
from headrace.services.models.blobs import BlobStore
from headrace.services.models.weights import model_folder, weights_digest
from headrace.services.namespace.apply import apply
from headrace.services.namespace.connect import Connection
from headrace.services.namespace.lookup import topics_of
from headrace.services.namespace.run_life import enter
from headrace.services.operate.conformance.trainer.known_batches import write_batch
from headrace.services.operate.conformance.trainer.observed_run import ObservedRun, Publication

TICK_S = 0.05


@dataclass
class FedNamespace:
    """One run's namespace: the kit writes its batches, and sees what the trainer publishes."""

    log: EventLog
    recipe: Recipe
    policy: str
    run: ObservedRun = field(default_factory=ObservedRun)
    seen: list[PolicyPublished] = field(default_factory=list)
    """The publications so far."""

    @property
    def newest(self) -> int:
        """The newest published version; -1 if there is none."""
        return max((one.version for one in self.seen), default=-1)

    async def feed(self, version: int, *, poison: bool = False) -> None:
        """Writes the batch that makes a version."""
        configuration = model_folder(self.recipe.policies[self.policy].model) / "config.json"
        vocabulary = int(json.loads(configuration.read_text())["vocab_size"])
        self.run.batches[version] = await write_batch(
            *(self.log, self.recipe, self.policy, version, vocabulary), poison=poison
        )

    async def fence(self) -> None:
        """Becomes the policy's trainer for a moment, so that the one before is fenced."""
        name = f"{self.log.topics.namespace}.trainer.{self.policy}"
        writer = await self.log.broker.fenced(name)
        await writer.close()

    async def follow(self) -> None:
        """Notes all publications of the policy, until it is cancelled."""
        policies = self.log.topics.partition(POLICIES)
        async with aclosing(follow_events(self.log, {policies: 0})) as items:
            async for item in items:
                if isinstance(item, CaughtUp) or not isinstance(item.event, PolicyPublished):
                    continue
                if item.event.policy == self.policy:
                    self.seen.append(item.event)

    def collect(self, blobs: BlobStore, folder: Path) -> bytes:
        """Reads the weights of all publications, and returns those of the newest version. Blocks.

        Returns b"" if they can't be read.
        """
        weights = b""
        for number, event in enumerate(self.seen):
            reader = LocalWeights(blobs, folder / str(number))
            try:
                weights = reader.fetch(event).read_bytes()
                self.run.publications.append(Publication(event, weights_digest(weights)))
            except (BlobError, DependencyError) as error:
                weights = b""
                self.run.publications.append(Publication(event, None, str(error)))
        return weights


@asynccontextmanager
async def fed_namespace(
    connection: Connection, recipe: Recipe, policy: str, name: str
) -> AsyncIterator[FedNamespace]:
    """Makes a namespace and starts its run. In the end the run is marked as ended."""
    log = await connection.writing_log(topics_of(recipe, name))
    await apply(log, recipe)
    fed = FedNamespace(log, recipe, policy)
    following = asyncio.create_task(fed.follow())
    try:
        yield fed
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await enter(log, "ended", recipe, "the conformance kit has finished")
