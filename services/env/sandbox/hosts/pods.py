"""Pods of a cluster as sandboxes: one for each episode. Its nodes pull the images."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from headrace.errors import InfrastructureError, UsageError
from headrace.services.base.clock import now
from headrace.services.env.sandbox import container_names as names
from headrace.services.env.sandbox.container_names import Which
from headrace.services.env.sandbox.hosts.container_source import LABEL, Whose
from headrace.services.processes.docker.pinned_images import PinnedImage
from headrace.services.processes.kubernetes.hardened_pod import NAME, NETWORK, hardened_pod
from headrace.services.processes.kubernetes.network_checks import denies_all, deny_all
from headrace.services.processes.kubernetes.pod_states import digest_of, source_of
from headrace.services.processes.kubernetes.pods_engine import PodsEngine

logger = logging.getLogger(__name__)

NEEDED = (
    ("create", "pods"), ("get", "pods"), ("list", "pods"), ("patch", "pods"), ("delete", "pods"),
    ("get", "pods/exec"), ("create", "pods/exec"), ("patch", "pods/ephemeralcontainers"),
)  # fmt: skip
"""What a worker must be allowed to do in the namespace."""
POLICIES = "networkpolicies"
POLICIES_GROUP = "networking.k8s.io"


class Pods:
    """A ContainerSource of one namespace of a cluster."""

    def __init__(self, whose: Whose, url: str, sources: dict[str, str]) -> None:
        """`sources` of images are shared by all hosts."""
        self.engine = PodsEngine(url, whose.settings, names.read)
        self._whose = whose
        self._sources = sources
        self._images: dict[str, PinnedImage] = {}

    async def reach(self) -> None:
        """Check whether the cluster answers."""
        await self.engine.info()

    async def check(self) -> None:
        """Check what the worker may do and the network's policies, and start one pod.

        That pod shows that the cluster admits and can start such pods, and pins the image.
        """
        whose = self._whose
        for image in (whose.settings.image, *whose.settings.images):
            whose.ceilings.require_image(image, whose.options)
        whose.ceilings.require_runtime(whose.settings.runtime, whose.options)
        await self.reach()
        await self._require_rights()
        if whose.settings.network == "none":
            await self._require_no_network()
        name = names.taken(whose.namespace, uuid.uuid4().hex[:12])
        live_s = whose.settings.pull_s + 60
        labels = {
            f"{LABEL}namespace": whose.namespace,
            f"{LABEL}environment": whose.key,
            f"{LABEL}deadline": f"{now() + live_s:.0f}",
        }
        await self.create(name, whose.settings.image, labels, live_s)
        await self.engine.remove(name)

    async def _require_rights(self) -> None:
        needed = [(verb, resource, "") for verb, resource in NEEDED]
        if self._whose.settings.network == "none":
            needed.append(("list", POLICIES, POLICIES_GROUP))
        missing = [
            f"{verb} {resource}"
            for verb, resource, group in needed
            if not await self.engine.allowed(verb, resource, group)
        ]
        if missing:
            raise UsageError(
                f"{self._whose.options}: at {self.engine.host} the worker's account may not "
                f"{', '.join(missing)}. Bind it to a Role with these verbs; docs/kubernetes.md "
                "has a complete one"
            )

    async def _require_no_network(self) -> None:
        labels = {NETWORK: "none"}
        if not denies_all(await self.engine.network_policies(), labels):
            raise UsageError(
                f"{self._whose.options}: network = 'none', but in {self.engine.host} no "
                "NetworkPolicy denies the pods of sandboxes all traffic, or another one allows "
                "some. Apply this one, and see that the cluster's network plug-in enforces "
                f"policies: {deny_all(self.engine.namespace)}"
            )

    def start(self) -> None:
        """Do nothing: nodes look after their images."""

    async def aclose(self) -> None:
        """End the calls of the engine."""
        await self.engine.aclose()

    def image(self, name: str) -> PinnedImage:
        """Return what the first pod of an image had. Before that, its digest is empty."""
        return self._images.get(name) or PinnedImage(name, "")

    def has_image(self, name: str) -> bool:
        """Return True: only the cluster knows which node will start a pod."""
        return True

    @asynccontextmanager
    async def holding(self, image: str) -> AsyncIterator[None]:
        """Hold nothing: the node pulls the image when the pod starts."""
        yield

    async def require(self, image: str) -> None:
        """Do nothing: the node pulls the image when the pod starts."""

    def expect(self, image: str) -> None:
        """Do nothing: the node pulls the image when the pod starts."""

    async def create(self, name: str, image: str, labels: Mapping[str, str], live_s: int) -> None:
        """Start a pod and wait until it runs, with its image's content pinned."""
        settings = self._whose.settings
        token, facts = names.read(name)
        annotations = {**labels, **facts, f"{LABEL}image": image, NAME: name}
        own = self._whose.ceilings.require_user_namespaces
        source = self._sources.get(image, image)
        body = hardened_pod(settings, source, token, annotations, live_s, settings.network, own)
        pod = await self.engine.create(name, body, settings.pull_s)
        found, source = digest_of(pod), source_of(pod)
        if source:
            self._sources.setdefault(image, source)
        pinned = self._images.setdefault(image, PinnedImage(image, found, source))
        if pinned.digest != found:
            await self.engine.remove(name)
            message = f"image {image} is {pinned.digest}, and a node of {self.engine.host} has "
            raise InfrastructureError("image_moved", f"{message}{found}. Name it by its digest")

    async def empty(self, name: str) -> None:
        """Raise UsageError: the folders of a pod stay when its container restarts."""
        raise UsageError(f"{self._whose.options}: a pod can't be emptied: remove {name}")

    async def find(self, labels: Mapping[str, str], which: Which) -> list[Mapping[str, Any]]:
        """Return sandboxes by labels, those that their names imply included."""
        return await self.engine.containers({**labels, **which.labels}, which.pattern)
