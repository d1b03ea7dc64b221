"""The images of one engine: pulled when they are needed or soon will be, removed when it is full.

Everything that other processes must know is in the engine: an image that Headrace pulled has a tag
of the repository `headrace-pulled`, and the time of that tag is the time of its last use. An image
without this tag is never removed. If several processes pull an image at once, the engine downloads
each layer once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Any

import prometheus_client

from headrace.errors import InfrastructureError, UsageError
from headrace.services.base.clock import now
from headrace.services.processes.docker.docker_engine import Conflict, DockerEngine, NotThere
from headrace.services.processes.docker.image_evictions import StoredImage, evictions
from headrace.services.processes.docker.pinned_images import PinnedImages

logger = logging.getLogger(__name__)

PULLS = prometheus_client.Counter(
    "headrace_image_pulls_total", "Images pulled, or not: `result` is pulled or failed.", ["result"]
)
REMOVED = prometheus_client.Counter(
    "headrace_images_removed_total", "Images removed from engines because nobody needed them."
)

TAG = "headrace-pulled"
"""Repository of the tags of the images that Headrace pulled."""
AT_ONCE = 3
"""Most images that are pulled at the same time for episodes that wait."""
TRIES = 4
"""How often a pull is tried before the episodes that wait for it fail."""
WAIT_S = 1.0
"""Seconds before a pull is tried again. Each further wait is WAIT_FACTOR times as long."""
WAIT_FACTOR = 4.0
LONGEST_WAIT_S = 300.0
EXPECTED = 256
"""Most images that are known to be needed later."""
TOUCH_S = 60.0
"""Seconds after which a further use of an image is noted in the engine."""
ROUND_S = 60.0
"""Seconds between two looks at what can be removed."""
GB = 10**9


class ImageStore:
    """The images of one engine that one environment uses."""

    def __init__(
        self,
        engine: DockerEngine,
        pinned: PinnedImages,
        *,
        pull_s: float,
        most_gb: float | None = None,
        unused_h: float | None = None,
    ) -> None:
        """`most_gb` limits all images of the engine, and `unused_h` hours remove an image.

        `pull_s` is the most seconds of one pull.
        """
        self._engine = engine
        self._pinned = pinned
        self._pull_s = pull_s
        self._most_gb = most_gb
        self._unused_h = unused_h
        self._needed: Counter[str] = Counter()
        """How many episodes hold each image, by name."""
        self._there: dict[str, float] = {}
        """Images that the engine has, and when their last use was noted."""
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._failures: Counter[str] = Counter()
        """How often in a row each image could not be pulled."""
        self._not_before: dict[str, float] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._changing = asyncio.Lock()
        """Held while an image is removed, and while one is looked up: so nobody finds an image that
        is about to go."""
        self._expected: deque[str] = deque()
        self._awaited = asyncio.Event()
        self._background: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to pull what is expected, and to remove what is not needed."""
        self._background.append(asyncio.create_task(self._pull_expected(), name="images"))
        if self._most_gb is not None or self._unused_h is not None:
            self._background.append(asyncio.create_task(self._tidy(), name="image rounds"))

    async def aclose(self) -> None:
        """Ends what it does in the background. Images stay."""
        tasks = [*self._background, *self._pulls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def has(self, name: str) -> bool:
        """Returns whether the engine has an image, or is getting it now."""
        return name in self._there or name in self._pulls

    async def look(self, name: str) -> None:
        """Pins an image if the engine has it. Raises UsageError if it may not be used."""
        if await self._pinned.present(self._engine, name):
            self._there.setdefault(name, 0.0)

    def expect(self, name: str) -> None:
        """Notes that an image will be needed. It is pulled when no episode waits for another."""
        if not self.has(name) and name not in self._expected and len(self._expected) < EXPECTED:
            self._expected.append(name)
            self._awaited.set()

    @asynccontextmanager
    async def holding(self, name: str) -> AsyncIterator[None]:
        """Has the engine keep an image. It is pulled first if it is missing.

        Raises InfrastructureError `pull_failed` if that failed several times, and UsageError if the
        image may not be used.
        """
        self._needed[name] += 1
        try:
            await self.require(name)
            yield
        finally:
            self._needed[name] -= 1
            if not self._needed[name]:
                del self._needed[name]

    async def require(self, name: str) -> None:
        """Returns once the engine has an image. All who wait for an image wait for one pull."""
        if (noted := self._there.get(name)) is not None:
            if now() - noted > TOUCH_S:
                await self._touch(name)
            return
        task = self._pulls.get(name)
        if task is None:
            task = asyncio.create_task(self._get(name, self._turns), name=f"pull {name}")
            self._pulls[name] = task
            task.add_done_callback(lambda done: self._end_pull(name, done))
        await asyncio.shield(task)

    def _end_pull(self, name: str, task: asyncio.Task[None]) -> None:
        del self._pulls[name]
        if not task.cancelled():
            task.exception()  # who waited has it, and perhaps nobody waits any more

    async def _get(self, name: str, turns: asyncio.Semaphore) -> None:
        """Gets an image, and tries again with growing waits."""
        for tries_left in reversed(range(TRIES)):
            await asyncio.sleep(max(0.0, self._not_before.get(name, 0.0) - now()))
            try:
                async with turns:
                    await self._get_once(name)
            except UsageError:
                raise
            except InfrastructureError as error:
                self._failures[name] += 1
                grown = WAIT_S * WAIT_FACTOR ** min(self._failures[name] - 1, 10)
                wait_s = min(LONGEST_WAIT_S, grown)
                self._not_before[name] = now() + wait_s
                PULLS.labels("failed").inc()
                logger.warning("%s; it is tried again in %g s", error, wait_s)
                if not tries_left:
                    raise
            else:
                self._failures.pop(name, None)
                self._not_before.pop(name, None)
                return

    async def _get_once(self, name: str) -> None:
        async with self._changing:
            found = await self._pinned.present(self._engine, name)
        if not found:
            began = now()
            logger.info("pulling %s", name)
            await self._pull(name)
            if not await self._pinned.present(self._engine, name):
                message = f"image {name!r} is still missing after it was pulled"
                raise InfrastructureError("pull_failed", message)
            PULLS.labels("pulled").inc()
            logger.info("pulled %s in %.1f s", name, now() - began)
            await self._engine.tag(self._pinned[name].digest, TAG, _tag(self._pinned[name].digest))
        self._there[name] = 0.0
        await self._touch(name)
        if not found and self._most_gb is not None:
            await self._remove_unneeded()

    async def _pull(self, name: str) -> None:
        source = self._pinned.source(name)
        while True:
            try:
                await self._engine.pull(source, self._pull_s)
                return
            except InfrastructureError as error:
                if error.code != "no_space" or not await self._remove_unneeded(at_least=1):
                    raise InfrastructureError(
                        error.code,
                        f"the engine at {self._engine.host} has no image {name!r} and can't pull "
                        f"it: {error.message}",
                    ) from error

    async def _touch(self, name: str) -> None:
        """Notes a use of an image in the engine, if Headrace pulled the image."""
        self._there[name] = now()
        digest = self._pinned[name].digest
        with suppress(InfrastructureError):  # it is noted for the next removal, and no more
            found = await self._engine.image(digest)
            if _is_ours(found):
                await self._engine.tag(digest, TAG, _tag(digest))

    async def _pull_expected(self) -> None:
        turns = asyncio.Semaphore(1)
        while True:
            await self._awaited.wait()
            if not self._expected:
                self._awaited.clear()
                continue
            name = self._expected[0]
            try:
                if self._pulls:  # episodes wait for these
                    await asyncio.wait(list(self._pulls.values()))
                elif self.has(name) or await self._is_full():
                    self._expected.popleft()
                else:
                    self._expected.popleft()
                    await self._ahead(name, turns)
            except InfrastructureError as error:
                logger.warning("image %s was not pulled ahead of its need: %s", name, error)
            except UsageError as error:  # its episodes get the error
                logger.warning("image %s: %s", name, error)

    async def _ahead(self, name: str, turns: asyncio.Semaphore) -> None:
        task = asyncio.create_task(self._get(name, turns), name=f"pull {name} ahead")
        self._pulls[name] = task
        task.add_done_callback(lambda done: self._end_pull(name, done))
        await asyncio.wait([task])

    async def _is_full(self) -> bool:
        if self._most_gb is None:
            return False
        usage = await self._engine.disk_usage()
        return float(usage.get("LayersSize") or 0) >= self._most_gb * GB

    async def _tidy(self) -> None:
        while True:
            try:
                await self._remove_unneeded()
            except InfrastructureError as error:
                logger.warning("images were not removed; it is tried again: %s", error)
            await asyncio.sleep(ROUND_S)

    async def _remove_unneeded(self, at_least: int = 0) -> int:
        """Removes images by size and age. Returns how many."""
        usage = await self._engine.disk_usage()
        stored = {}
        for image in usage.get("Images") or ():
            if _is_ours(image):
                found = await self._engine.image(image["Id"])
                own = max(0, int(image["Size"]) - max(0, int(image.get("SharedSize") or 0)))
                stored[image["Id"]] = StoredImage(image["Id"], own, _used_at(found)), found
        excess = 0
        if self._most_gb is not None:
            excess = int(usage.get("LayersSize") or 0) - int(self._most_gb * GB)
        since = now() - self._unused_h * 3600 if self._unused_h is not None else 0.0
        chosen = evictions(
            [image for image, _ in stored.values()], self._digests_needed(),
            excess_bytes=excess, unused_since=since, at_least=at_least,
        )  # fmt: skip
        removed = 0
        for digest in chosen:
            removed += await self._remove(digest, stored[digest][1])
        return removed

    def _digests_needed(self) -> set[str]:
        return {self._pinned[name].digest for name in self._needed if name in self._pinned}

    async def _remove(self, digest: str, found: Mapping[str, Any]) -> bool:
        """Removes an image unless a container is made of it. Returns whether it is gone."""
        async with self._changing:
            if digest in self._digests_needed():
                return False
            if await self._engine.containers({}, ancestor=digest):
                return False
            for name in [name for name in self._there if self._pinned[name].digest == digest]:
                del self._there[name]
            names = [*(found.get("RepoTags") or ()), *(found.get("RepoDigests") or ())]
            # The tag goes last: if this process dies before, the next one tries again.
            for name in sorted(names, key=lambda name: name.startswith(f"{TAG}:")):
                try:
                    await self._engine.remove_image(name)
                except NotThere:
                    continue
                except Conflict:  # a container was made of it meanwhile
                    return False
        logger.info("removed image %s, which nobody needs: %s", digest, ", ".join(names))
        REMOVED.inc()
        return True


def _tag(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _is_ours(image: Mapping[str, Any]) -> bool:
    return any(name.startswith(f"{TAG}:") for name in image.get("RepoTags") or ())


def _used_at(found: Mapping[str, Any]) -> float:
    """Returns when an image was tagged last, in seconds since the epoch."""
    text = str((found.get("Metadata") or {}).get("LastTagTime") or "")
    try:
        return datetime.fromisoformat(text[:19] + "+00:00").timestamp()
    except ValueError:
        return 0.0
