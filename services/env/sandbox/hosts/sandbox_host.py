"""The sandboxes of one environment on one engine: made, found, pooled and removed."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from prometheus_client import Gauge

from headrace.errors import InfrastructureError
from headrace.services.base.clock import now
from headrace.services.env.environment import Claim
from headrace.services.env.sandbox import container_names as names
from headrace.services.env.sandbox.container_names import InUse, Which
from headrace.services.env.sandbox.hosts.container_source import LABEL, ContainerSource, Whose
from headrace.services.env.sandbox.hosts.host_choice import HostLoad
from headrace.services.processes.docker.docker_errors import Conflict, NotThere
from headrace.services.processes.docker.pinned_images import PinnedImage

logger = logging.getLogger(__name__)

ANY = Which("")
OVERDUE_S = 60.0
"""Seconds after its deadline when any worker removes a container; clocks differ. Also the seconds
between two looks for such containers, which list those of all episodes on the host."""
UNREACHABLE = ("engine_unreachable", "engine_silent")
"""Codes of the errors after which a host gets no new episodes until it answers again."""
UP = Gauge(
    "headrace_sandbox_host_up", "Whether an engine or a cluster answered its last call.", ["host"]
)
READY_S = 5.0
"""Seconds between two looks at the containers that are ready."""
UNLIMITED = 1 << 20
"""Slots of a host that has no limit of its own."""


class SandboxHost:
    """One engine or cluster with its containers."""

    def __init__(self, whose: Whose, source: ContainerSource, slots: int | None = None) -> None:
        """`slots` limits the containers at once."""
        self.source = source
        self.engine = source.engine
        self.up = True
        """Whether it answered its last call."""
        self._whose = whose
        self._slots = slots or UNLIMITED
        self._free = asyncio.Semaphore(self._slots)
        self._episodes = 0
        self._checked = False
        self._look_at = 0.0
        """When the host is looked through for overdue containers again, in the loop's time."""
        self._checking = asyncio.Lock()
        self._idle: set[str] = set()
        """Names of the containers not in use that this worker pooled or made ready."""
        self._taking: set[str] = set()
        """Names of the containers not in use that this worker is about to take."""
        self._taken: set[str] = set()
        """Ids of the containers that somebody was about to take at the last look."""
        self._ready_wanted = asyncio.Event()
        self._closing = False
        self._keeping: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return self.engine.host

    def load(self, image: str) -> HostLoad:
        """Returns what counts when the host of an episode is chosen."""
        return HostLoad(self.up, self._episodes, self._slots, self.source.has_image(image))

    async def check(self) -> None:
        """Checks the engine once, and gets the recipe's image.

        Raises InfrastructureError if the engine can't be reached, UsageError if it is not suitable.
        """
        async with self._checking:
            if self._checked:
                return
            with self.noting():
                await self.source.check()
            self.source.start()
            if self._whose.settings.ready:
                self._keeping = asyncio.create_task(self._keep_ready(), name="ready sandboxes")
            self._checked = True

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note whether the engine answers the calls inside."""
        try:
            yield
        except InfrastructureError as error:
            if error.code in UNREACHABLE:
                self._note(False, f"gets no new episodes until it answers: {error}")
            raise
        self._note(True, "answers again")

    def _note(self, up: bool, what: str) -> None:
        if up != self.up:
            logger.warning("the engine at %s %s", self, what)
        self.up = up
        UP.labels(str(self)).set(up)

    @asynccontextmanager
    async def holding(self, image: str) -> AsyncIterator[None]:
        """Hold an image and a slot for an episode, as soon as both are there."""
        self._episodes += 1
        try:
            await self.check()
            async with self.source.holding(image), self._free:
                yield
        finally:
            self._episodes -= 1

    async def create(self, claim: Claim, image_name: str, *, persistent: bool, copy: bool) -> InUse:
        """Start a new container and return its name."""
        whose = self._whose
        name = names.in_use(whose.namespace, claim, uuid.uuid4().hex[:12], copy=copy)
        live_s = max(1, int(claim.expires_at - now()) + 1)
        if persistent:
            live_s = max(live_s, whose.settings.lifetime_s)
        # Labels can't change, so only the name says which attempt uses a persistent container.
        attempt = {} if persistent else {"task": claim.task, "sample": claim.sample}
        if attempt:
            attempt["attempt"] = claim.attempt
        await self._create(str(name), name.instance, image_name, live_s, attempt)
        whose.instances.enter(name.instance, "sandbox", "busy")
        return name

    async def create_ready(self) -> None:
        """Start a container that an episode may take later."""
        token = uuid.uuid4().hex[:12]
        name = names.ready(self._whose.namespace, token)
        settings = self._whose.settings
        self._idle.add(name)
        await self._create(name, f"sandbox-{token}", settings.image, settings.lifetime_s, {})

    async def _create(
        self, name: str, instance: str, image_name: str, live_s: int, attempt: Mapping[str, int]
    ) -> None:
        whose, image = self._whose, self.source.image(image_name)
        live_s = whose.ceilings.lifetime(live_s, whose.options)
        whose.instances.enter(instance, "sandbox", "provisioning", f"of image {image} on {self}")
        labels = {
            "namespace": whose.namespace,
            "environment": whose.key,
            "instance": instance,
            "deadline": f"{now() + live_s:.0f}",
            **{label: str(number) for label, number in attempt.items()},
        }
        labels = {f"{LABEL}{label}": text for label, text in labels.items()}
        try:
            with self.noting():
                await self.source.create(name, image_name, labels, live_s)
        except InfrastructureError as error:
            whose.instances.enter(instance, "sandbox", "failed", str(error))
            raise
        whose.instances.enter(instance, "sandbox", "ready")

    async def reuse(
        self, claim: Claim, image_name: str, *, used: bool, copy: bool = False
    ) -> InUse | None:
        """Take a container that lives long enough, whichever worker made it.

        It is an idle one that was `used` before, or one that never was. Those that end soonest are
        taken first, so that few end unused. The worker that renames it first has it.
        """
        image, namespace = self.source.image(image_name), self._whose.namespace
        which = names.of_idle(namespace) if used else names.of_ready(namespace)
        for found in sorted(await self._list(which), key=_deadline):
            if not self._is_fit(found, image, claim.expires_at):
                continue
            free = found["Names"][0].lstrip("/")
            name = names.in_use(namespace, claim, free.rpartition(".")[2], copy=copy)
            if free not in self._taking and await self._take(free, name):
                self._whose.instances.enter(name.instance, "sandbox", "busy")
                return name
        return None

    async def _take(self, free: str, name: InUse) -> bool:
        """Rename a container that is not in use. Return whether this episode has it.

        An engine may carry out the first rename of another worker after both of this one, as
        container_names.py says. So the last call asks whether the container is still there.
        """
        taken = names.taken(name.namespace, name.token)
        self._taking.add(free)
        try:
            await self.engine.rename(free, taken)
            self._idle.discard(free)
            await self.engine.rename(taken, str(name))
            await self.engine.inspect(str(name))
        except (NotThere, Conflict):
            return False
        finally:
            self._taking.discard(free)
            self._ready_wanted.set()
        return True

    def _is_fit(self, found: Mapping[str, Any], image: PinnedImage, until: float) -> bool:
        """Whether a container runs this image, and goes on until then."""
        labels = found["Labels"]
        late = _deadline(found) < until
        return found["State"] == "running" and not late and labels | image.labels == labels

    async def _keep_ready(self) -> None:
        """Keep as many containers ready as the recipe says, whichever worker made them."""
        while not self._closing:
            self._ready_wanted.clear()
            try:
                missing = await self._missing_ready()
                if missing and not self._closing:
                    await self.create_ready()
            except InfrastructureError as error:
                logger.warning("%s: no sandbox was made ready: %s", self, error)
                missing = 0  # not again at once
            if missing <= 1 and not self._closing:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ready_wanted.wait(), READY_S)

    async def _missing_ready(self) -> int:
        """Count the ready containers that are missing, and remove those that nobody needs.

        Those end soon, or other workers made as many at the same time. Of these, every worker keeps
        the first by name, so that no two workers remove different ones.
        """
        settings = self._whose.settings
        image, late = self.source.image(settings.image), now() + settings.lifetime_s / 2
        fit = []
        for found in await self._list(names.of_ready(self._whose.namespace)):
            name = found["Names"][0].lstrip("/")
            if self._is_fit(found, image, late):
                fit.append(name)
            elif found["State"] != "created" or name in self._idle:  # else another worker starts it
                await self._remove_free(name)
        for name in sorted(fit)[settings.ready :]:
            await self._remove_free(name)
        return max(0, settings.ready - len(fit))

    async def _remove_free(self, name: str) -> None:
        """Remove a container that is not in use, by the name `taken`, so that nobody takes it."""
        self._idle.discard(name)
        taken = names.taken(self._whose.namespace, name.rpartition(".")[2])
        with suppress(NotThere, Conflict):  # an episode has taken it
            await self.engine.rename(name, taken)
            await self.engine.remove(taken)

    async def pool(self, name: InUse) -> None:
        """Make a persistent container idle, so that the next episode may use it.

        It is restarted first: nothing runs in it, and its folders are empty.
        """
        await self.source.empty(str(name))
        idle = names.idle(self._whose.namespace, name.token)
        await self.engine.rename(str(name), idle)
        self._idle.add(idle)
        self._whose.instances.enter(name.instance, "sandbox", "ready")

    async def close_pool(self) -> None:
        """Remove this worker's idle containers. Those in use stay for the next worker."""
        if self._keeping is not None:  # a container that is being made must be known to go
            self._closing = True
            self._ready_wanted.set()
            await self._keeping
        which = names.of_idle(self._whose.namespace), names.of_ready(self._whose.namespace)
        with suppress(InfrastructureError):
            listed = [each for one in which for each in await self._list(one)]
            mine = self._idle & {each["Names"][0].lstrip("/") for each in listed}
            await asyncio.gather(*map(self._remove_free, mine), return_exceptions=True)

    async def aclose(self) -> None:
        """End the calls of the engine."""
        if self._keeping is not None:
            self._keeping.cancel()
        await self.source.aclose()

    async def in_use(self, which: Which) -> list[tuple[InUse, Mapping[str, Any]]]:
        """Return the containers in use that are looked for."""
        found = await self._list(which)
        return [(name, each) for each in found if (name := names.parse(each["Names"][0]))]

    async def remove(self, name: InUse) -> None:
        """Remove a container in use."""
        await self.engine.remove(str(name))
        self._whose.instances.enter(name.instance, "sandbox", "gone")

    async def discard(self, found: Mapping[str, Any], why: str) -> None:
        """Remove a container that nobody uses."""
        logger.info("removing a sandbox %s: %s", why, found["Names"][0])
        await self.engine.remove(found["Names"][0].lstrip("/"))
        instance = found["Labels"].get(f"{LABEL}instance", found["Id"][:12])
        self._whose.instances.enter(instance, "sandbox", "gone", why)

    async def sweep(
        self, partition: int, read_to: int, open_attempt: Callable[[int, int], int | None]
    ) -> None:
        """Remove what no open episode needs, as `DockerSetup.sweep` says."""
        await self.check()
        found = await self.in_use(names.of_partition(self._whose.namespace, partition))
        unneeded: list[tuple[Mapping[str, Any], str]] = []
        for name, each in found:
            if name.partition != partition or name.offset > read_to:
                continue
            attempt = open_attempt(name.task, name.sample)
            if attempt is None or name.attempt < attempt:
                unneeded.append((each, "that no open episode needs"))
        loop = asyncio.get_running_loop()
        if loop.time() >= self._look_at:  # else another partition's sweep has looked
            self._look_at = loop.time() + OVERDUE_S
            unneeded += await self._overdue()
        failed: InfrastructureError | None = None
        for each, why in unneeded:
            try:
                await self.discard(each, why)
            except InfrastructureError as error:  # the others may go nevertheless
                failed = error
                if error.code in UNREACHABLE:
                    break
        if failed is not None:
            raise failed

    async def _overdue(self) -> list[tuple[Mapping[str, Any], str]]:
        """Return what is past its deadline, or was `taken` at two looks: its taker has ended."""
        overdue: list[tuple[Mapping[str, Any], str]] = []
        before, self._taken = self._taken, set()
        for each in await self.source.find({f"{LABEL}deadline": ""}, ANY):
            if _deadline(each) + OVERDUE_S < now():
                overdue.append((each, "past its deadline"))
            elif names.is_taken(each["Names"][0]):
                self._taken.add(each["Id"])
                if each["Id"] in before:
                    overdue.append((each, "whose taker has ended"))
        return overdue

    async def _list(self, which: Which) -> list[Mapping[str, Any]]:
        labels = {
            f"{LABEL}namespace": self._whose.namespace,
            f"{LABEL}environment": self._whose.key,
        }
        with self.noting():
            return await self.source.find(labels, which)


def _deadline(found: Mapping[str, Any]) -> float:
    """Return when a container ends by itself, in seconds since the epoch."""
    return float(found["Labels"][f"{LABEL}deadline"])
