"""The images of a recipe's containers, each pinned to the content that its name has first.

A tag may move while a run goes on. Containers are made from digests, so all containers that a
worker makes for one name have the same content.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import InfrastructureError, UsageError
from headrace.services.processes.docker.ceilings import Ceilings
from headrace.services.processes.docker.docker_engine import DockerEngine, NotThere

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PinnedImage:
    """An image that the engine has."""

    name: str
    """As the recipe names it."""
    digest: str
    """The engine's id of its content, `sha256:` and 64 hex digits."""
    source: str = ""
    """How a registry names the same content, `repository@sha256:…`. Empty if it was never pulled
    or pushed."""

    @property
    def labels(self) -> dict[str, str]:
        """Labels for its containers."""
        return {"headrace.image": self.name, "headrace.digest": self.digest}

    def __str__(self) -> str:
        return f"{self.name} ({self.digest})"


class PinnedImages:
    """The images that one part of the recipe names."""

    def __init__(
        self, whose: str, ceilings: Ceilings, sources: dict[str, str] | None = None
    ) -> None:
        """`whose` images they are, for errors.

        If several engines share `sources`, an image that a registry has is the same on all of them.
        """
        self._whose = whose
        self._ceilings = ceilings
        self._pinned: dict[str, PinnedImage] = {}
        self._sources: dict[str, str] = {} if sources is None else sources
        """The source of each pinned image that has one, by name."""

    def __getitem__(self, name: str) -> PinnedImage:
        """Returns an image that was pinned."""
        return self._pinned[name]

    def __contains__(self, name: str) -> bool:
        """Returns whether an image was pinned."""
        return name in self._pinned

    def source(self, name: str) -> str:
        """Returns what to pull for an image: the content to which it is pinned, or its name."""
        return self._sources.get(name, name)

    async def pin(self, engine: DockerEngine, name: str) -> None:
        """Pulls an image if it is missing, and pins it unless it is pinned already.

        Raises UsageError if it can't be pulled, has volumes, or may not be used on this host.
        """
        if name in self._pinned:
            return
        self._ceilings.require_image(name, self._whose)
        self._pin(name, await self._found(engine, name))

    async def present(self, engine: DockerEngine, name: str) -> bool:
        """Returns whether the engine has an image, and pins it if so. It pulls nothing.

        Raises UsageError if the image has volumes, or may not be used on this host.
        """
        self._ceilings.require_image(name, self._whose)
        pinned = self._pinned.get(name)
        try:
            found = await engine.image(pinned.digest if pinned else self.source(name))
        except NotThere:
            return False
        if pinned is None:
            self._pin(name, found)
        return True

    def _pin(self, name: str, found: Mapping[str, Any]) -> None:
        names = [*(found.get("RepoTags") or ()), *(found.get("RepoDigests") or ())]
        self._ceilings.require_found(name, names, self._whose)
        if volumes := (found.get("Config") or {}).get("Volumes"):
            raise UsageError(
                f"{self._whose}: image {name!r} declares volumes ({', '.join(volumes)}), whose "
                "size nothing limits. Build it without volumes"
            )
        sources = list(found.get("RepoDigests") or ())
        # The engine may have the same content from other registries, too.
        own = [one for one in sources if one.partition("@")[0] == _repository(name)]
        source = next(iter(own + sources), "")
        self._pinned[name] = PinnedImage(name, found["Id"], source)
        if source:
            self._sources.setdefault(name, source)
        logger.info("image %s is %s %s", name, found["Id"], source)

    async def create(self, engine: DockerEngine, name: str, body: Mapping[str, Any]) -> None:
        """Creates and starts a container of a pinned image.

        If the image was removed from the engine meanwhile, the same content is pulled again.
        """
        try:
            await engine.create(name, body)
        except NotThere:
            if not await self._restored(engine, body["Image"]):
                raise
            await engine.create(name, body)

    async def _found(self, engine: DockerEngine, name: str) -> Mapping[str, Any]:
        try:
            return await engine.image(self.source(name))
        except NotThere:
            logger.info("pulling %s", name)
        try:
            await engine.pull(self.source(name))
            return await engine.image(self.source(name))
        except InfrastructureError as error:
            raise UsageError(
                f"{self._whose}: the engine has no image {name!r} and can't pull it: "
                f"{error.message}. Build, load or pull it first"
            ) from error

    async def _restored(self, engine: DockerEngine, digest: str) -> bool:
        """Pulls a pinned image that is gone. Returns whether that was so, and succeeded."""
        try:
            await engine.image(digest)
        except NotThere:
            image = next(one for one in self._pinned.values() if one.digest == digest)
        else:
            return False
        if image.source:
            logger.warning("image %s was removed from the engine: pulling it again", image)
            await engine.pull(image.source)
            return bool((await engine.image(image.source))["Id"] == digest)
        return False


def _repository(name: str) -> str:
    """Returns an image's name without its digest and tag."""
    name = name.partition("@")[0]
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(":")[0]
