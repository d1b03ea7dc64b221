"""What `serve` gives to every service."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from headrace.schemas.recipe.recipe import Recipe
from headrace.services.log.event_log import EventLog
from headrace.services.models.blobs import BlobStore


@dataclass
class ServiceContext:
    """One service process: its log, recipe and folders, and the events that end it."""

    log: EventLog
    recipe: Recipe
    blobs: BlobStore
    worker_id: str
    """Unique for each process: service, host name and process id."""
    state: Path
    """This machine's folder for caches and checkpoints of the namespace and its cluster."""
    stopping: asyncio.Event
    """Set on SIGTERM, when the parent has died, or when the run has ended. The service must then
    drain and return within 10 s."""
    ending: asyncio.Event
    """Set when the run is ending: the source stops, and all open work ends as cancelled."""
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the worker shall finish what it has, take nothing new, and then return by itself.
    Only an inference worker drains. `stopping` may be set meanwhile."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the worker can be used. An inference worker sets it when it has loaded its weights;
    for every other service it is set before the service runs."""

    @property
    def namespace(self) -> str:
        """The name of the run's namespace."""
        return self.log.topics.namespace

    def consumer_group(self, service: str) -> str:
        """The name of a service's consumer group."""
        return f"{self.namespace}.{service}"
