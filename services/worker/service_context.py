"""What every service gets from `serve.py`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from headrace.schemas.recipe.recipe import Recipe
from headrace.services.log.event_log import EventLog
from headrace.services.models.blobs import BlobStore


@dataclass
class ServiceContext:
    """One process's surroundings. `stopping` ends it; `ending` is the run's last phase."""

    log: EventLog
    recipe: Recipe
    blobs: BlobStore
    worker_id: str
    """Unique a process: service, host, process id."""
    state: Path
    """A local folder for caches and checkpoints of this namespace."""
    stopping: asyncio.Event
    """Set on SIGTERM, the parent's death, or the run's end: drain within 10 s and return."""
    ending: asyncio.Event
    """Set when the run is ending: the source stops, queued and live work ends as cancelled."""

    @property
    def namespace(self) -> str:
        """The run's namespace."""
        return self.log.topics.namespace

    def consumer_group(self, service: str) -> str:
        """The name of a service's consumer group."""
        return f"{self.namespace}.{service}"
