"""What differs between kinds of hosts: how a container and its image are had."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.services.env.instances import Instances
from headrace.services.env.sandbox.container_names import Which
from headrace.services.env.sandbox.sandbox import SandboxSettings
from headrace.services.env.sandbox.sandbox_engine import SandboxEngine
from headrace.services.processes.docker.ceilings import Ceilings
from headrace.services.processes.docker.pinned_images import PinnedImage

LABEL = "headrace."


@dataclass(frozen=True, slots=True)
class Whose:
    """The environment that sandboxes belong to."""

    namespace: str
    key: str
    """The environment's key in the recipe."""
    settings: SandboxSettings
    ceilings: Ceilings
    instances: Instances

    @property
    def options(self) -> str:
        """Where the recipe has its options, for errors."""
        return f"environments.{self.key}.options"


class ContainerSource(Protocol):
    """Where a host has its containers from."""

    @property
    def engine(self) -> SandboxEngine:
        """What runs the containers."""

    async def reach(self) -> None:
        """Return once the host has answered. Nothing is pulled or started.

        Raises InfrastructureError if it can't be reached, UsageError if it is not suitable.
        """

    async def check(self) -> None:
        """Return once the host can have containers of the recipe's image.

        Raises InfrastructureError if it can't be reached, UsageError if it is not suitable.
        """

    def start(self) -> None:
        """Begin what goes on in the background."""

    async def aclose(self) -> None:
        """End what goes on in the background, and the calls of the engine."""

    def image(self, name: str) -> PinnedImage:
        """Return what an image's name means on this host."""

    def has_image(self, name: str) -> bool:
        """Return whether the host has an image, or is getting it."""

    def holding(self, image: str) -> AbstractAsyncContextManager[None]:
        """Hold an image for an episode, as soon as it is there."""

    async def require(self, image: str) -> None:
        """Return once the host has an image."""

    def expect(self, image: str) -> None:
        """Note that an image will be needed."""

    async def create(self, name: str, image: str, labels: Mapping[str, str], live_s: int) -> None:
        """Start a container that ends by itself after `live_s` seconds."""

    async def empty(self, name: str) -> None:
        """End all that runs in a container, and empty its folders."""

    async def find(self, labels: Mapping[str, str], which: Which) -> list[Mapping[str, Any]]:
        """Return containers as a Docker engine lists them."""
