"""Images are pulled when they are needed, once, and removed when nobody needs them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import headrace.services.processes.docker.image_store
from headrace.errors import InfrastructureError
from headrace.schemas.events import EnvironmentUse
from headrace.services.processes.docker.ceilings import Ceilings
from headrace.services.processes.docker.docker_engine import DockerEngine
from headrace.services.processes.docker.image_store import TAG, ImageStore
from headrace.services.processes.docker.pinned_images import PinnedImages
from tests.sandboxes.bench import bench, claim, view
from tests.sandboxes.image_registry import ImageRegistry, image_registry

BOUND_S = 120.0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headrace.services.processes.docker.image_store, "WAIT_S", 0.05)


class Stores:
    """Stores of one engine, as of several processes, and the images that they pulled."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.stores: list[ImageStore] = []
        self.engines: list[DockerEngine] = []

    def make(self, most_gb: float | None = None, unused_h: float | None = None) -> ImageStore:
        engine = DockerEngine(self._host)
        pinned = PinnedImages("here", Ceilings())
        store = ImageStore(engine, pinned, pull_s=60, most_gb=most_gb, unused_h=unused_h)
        self.engines.append(engine)
        self.stores.append(store)
        return store

    async def names(self) -> set[str]:
        """The names of all images that the engine has."""
        usage = await self.engines[0].disk_usage()
        return {name for image in usage["Images"] for name in image["RepoTags"] or ()}


@asynccontextmanager
async def stores(host: str) -> AsyncIterator[tuple[Stores, ImageRegistry]]:
    """Nothing that was pulled is left at the end."""
    made = Stores(host)
    async with asyncio.timeout(BOUND_S), image_registry(host) as registry:
        try:
            yield made, registry
        finally:
            for store in made.stores:
                await store.aclose()
            cleaner = made.make(unused_h=1e-9)
            await asyncio.sleep(1.1)  # the engine's time of the last use is compared by seconds
            await cleaner._remove_unneeded()
            assert not [name for name in await made.names() if name.startswith(TAG)]
            for engine in made.engines:
                await engine.aclose()


def test_an_image_is_fetched_once_for_all_episodes_and_processes(engine: str) -> None:
    async def main() -> None:
        async with stores(engine) as (made, registry):
            image = registry.add("once", 200_000)
            registry.released.clear()
            waiting = [
                asyncio.create_task(store.require(image))
                for store in (made.make(), made.make())
                for _ in range(20)
            ]
            await registry.asked.wait()
            await asyncio.sleep(1.0)
            assert not any(task.done() for task in waiting)
            registry.released.set()
            await asyncio.gather(*waiting)
            assert set(registry.fetched.values()) == {1}

    asyncio.run(main())


def test_a_registry_that_fails_for_a_while_costs_no_episode(engine: str) -> None:
    async def main() -> None:
        async with stores(engine) as (made, registry):
            image, store = registry.add("failing"), made.make()
            registry.failing = True
            waiting = asyncio.create_task(store.require(image))
            await asyncio.sleep(0.2)
            registry.failing = False
            await waiting
            missing = f"{registry.host}/missing:1"
            began = time.monotonic()
            with pytest.raises(InfrastructureError, match=r"has no image '.*missing:1' and can't"):
                await store.require(missing)
            assert time.monotonic() - began > 0.05 * (1 + 4 + 16)
            registry.add("missing")
            await store.require(missing)

    asyncio.run(main())


def test_the_least_recently_used_images_go_first_and_none_that_is_needed(engine: str) -> None:
    async def main() -> None:
        async with stores(engine) as (made, registry):
            before = (await DockerEngine(engine).disk_usage())["LayersSize"]
            store = made.make(most_gb=(before + 7_000_000) / 1e9)
            images = [registry.add(f"size{number}", 2_000_000) for number in range(4)]
            async with store.holding(images[0]):
                for image in images[1:]:
                    async with store.holding(image):
                        pass
                    await asyncio.sleep(1.1)
                names = await made.names()
                # The shell's layer is 2 MB, too.
                assert [image in names for image in images] == [True, False, False, True]
                assert not store.has(images[1])
            async with store.holding(images[1]):  # it is pulled again, by its digest
                assert store.has(images[1])
            assert registry.fetched.most_common(1)[0][1] == 2

    asyncio.run(main())


def test_an_image_of_a_container_and_one_that_somebody_else_pulled_stay(engine: str) -> None:
    async def main() -> None:
        async with stores(engine) as (made, registry):
            used, foreign, unused = map(registry.add, ("used", "foreign", "unused"))
            store, other = made.make(), DockerEngine(engine)
            await other.pull(foreign)
            for image in (used, foreign, unused):
                await store.require(image)
            await other.create("test-images", {"Image": used, "Cmd": ["sleep", "60"]})
            await asyncio.sleep(1.1)
            assert await made.make(unused_h=1e-9)._remove_unneeded() == 1
            assert {used, foreign} <= await made.names()
            assert unused not in await made.names()
            await other.remove("test-images")
            await other.remove_image(foreign)
            await other.aclose()

    asyncio.run(main())


def test_expected_images_are_pulled_while_no_episode_waits(engine: str) -> None:
    async def main() -> None:
        async with stores(engine) as (made, registry):
            store = made.make()
            store.start()
            now, later = registry.add("now"), registry.add("later")
            registry.released.clear()
            needed = asyncio.create_task(store.require(now))
            await registry.asked.wait()
            store.expect(later)
            await asyncio.sleep(0.5)
            assert not store.has(later)
            registry.released.set()
            await needed
            while later not in await made.names():
                await asyncio.sleep(0.1)

    asyncio.run(main())


def test_episodes_of_several_images_begin_without_a_pull_at_the_start(engine: str) -> None:
    async def main() -> None:
        async with stores(engine) as (_, registry):
            images = [registry.add(f"task{number}") for number in range(3)]
            registry.failing = True  # the worker starts in any case
            async with bench(engine, images=images) as made:
                registry.failing = False

                async def play(number: int) -> str:
                    owner = claim(number, offset=number)
                    use = EnvironmentUse(use="default", image=images[number])
                    async with made.setup.prepared(use, owner, False):
                        environment = await made.setup.take(use, owner)
                        await environment.reset(view())
                        text = (await environment.step("head -c 5 /own")).text
                        await made.setup.give_back(use, environment, False)
                        return text

                assert await asyncio.gather(*map(play, range(3))) == ["task0", "task1", "task2"]

    asyncio.run(main())
