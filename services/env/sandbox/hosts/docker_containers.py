"""Containers and images of a Docker engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from headrace.services.base.clock import now
from headrace.services.env.sandbox.container_names import Which
from headrace.services.env.sandbox.hosts.container_source import LABEL, Whose
from headrace.services.processes.docker.docker_engine import DockerEngine
from headrace.services.processes.docker.engine_checks import require_engine
from headrace.services.processes.docker.hardened import container
from headrace.services.processes.docker.image_store import ImageStore
from headrace.services.processes.docker.pinned_images import PinnedImage, PinnedImages
from headrace.services.processes.docker.writable_root import require_limit, root_bytes

logger = logging.getLogger(__name__)


class DockerContainers:
    """A ContainerSource of one engine."""

    def __init__(self, whose: Whose, engine: DockerEngine, sources: dict[str, str]) -> None:
        """`sources` of images are shared by all hosts."""
        self.engine = engine
        self._whose = whose
        self._images = PinnedImages(whose.options, whose.ceilings, sources)
        settings = whose.settings
        self._store = ImageStore(
            engine, self._images, pull_s=settings.pull_s,
            most_gb=settings.images_gb, unused_h=settings.images_unused_h,
        )  # fmt: skip
        self.start = self._store.start
        self.has_image = self._store.has
        self.require = self._store.require
        self.expect = self._store.expect
        self.empty = engine.restart

    async def reach(self) -> None:
        """Check whether the engine answers and isolates containers."""
        settings, ceilings = self._whose.settings, self._whose.ceilings
        info = await self.engine.info()
        isolation = require_engine(info, settings.runtime, ceilings, self._whose.options)
        logger.info(
            "%s: containers of %s have %s", self._whose.options, self.engine.host, isolation
        )

    async def check(self) -> None:
        """Check the engine, pull the recipe's image, and pin the images that are there."""
        await self.reach()
        settings = self._whose.settings
        await self._images.pin(self.engine, settings.image)
        await asyncio.gather(*map(self._store.look, set(settings.images)))
        digest = self._images[settings.image].digest
        if root := await self._root_bytes(digest):
            labels = {f"{LABEL}deadline": f"{now():.0f}"}  # a sweep removes it if this worker dies
            body = container(settings, digest, labels, 1, root_bytes=root)
            await require_limit(self.engine, body, self._whose.options)

    async def aclose(self) -> None:
        """End what goes on in the background, and the calls of the engine."""
        await self._store.aclose()
        await self.engine.aclose()

    def image(self, name: str) -> PinnedImage:
        """Return the content to which a name is pinned."""
        return self._images[name]

    def holding(self, image: str) -> AbstractAsyncContextManager[None]:
        """Hold an image for an episode, as soon as it is there."""
        return self._store.holding(image)

    async def create(self, name: str, image: str, labels: Mapping[str, str], live_s: int) -> None:
        """Start a container."""
        pinned, settings = self._images[image], self._whose.settings
        root = await self._root_bytes(pinned.digest)
        whole = dict(labels) | pinned.labels
        body = container(settings, pinned.digest, whole, live_s, settings.network, root)
        await self._images.create(self.engine, name, body)

    async def find(self, labels: Mapping[str, str], which: Which) -> list[Mapping[str, Any]]:
        """Return containers by labels and by their names."""
        return await self.engine.containers(labels, which.pattern)

    async def _root_bytes(self, digest: str) -> int:
        if self._whose.settings.root_mb is None:
            return 0
        image = await self.engine.image(digest)
        return await root_bytes(self.engine, self._whose.settings.root_mb, image)
