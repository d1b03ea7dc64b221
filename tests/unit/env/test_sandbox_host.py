"""What one host of a pool is asked for, by a source of containers on paper."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import pytest

from headrace.errors import InfrastructureError
from headrace.services.base.clock import now
from headrace.services.env.environment import Claim
from headrace.services.env.instances import Instances
from headrace.services.env.sandbox.container_names import InUse, Which, idle
from headrace.services.env.sandbox.hosts.container_source import ContainerSource, Whose
from headrace.services.env.sandbox.hosts.sandbox_host import SandboxHost
from headrace.services.env.sandbox.sandbox import SandboxSettings
from headrace.services.processes.docker.ceilings import read_ceilings
from headrace.services.processes.docker.docker_errors import Conflict, NotThere
from headrace.services.processes.docker.pinned_images import PinnedImage

LABELS = {"headrace.deadline": ""}


class PaperSource:
    """Lists containers. It is its own engine."""

    host = "paper"

    def __init__(self, there: list[Mapping[str, Any]]) -> None:
        self.there = there
        self.asked: list[Mapping[str, str]] = []
        self.removed: list[str] = []

    @property
    def engine(self) -> PaperSource:
        return self

    async def check(self) -> None:
        pass

    def start(self) -> None:
        pass

    async def find(self, labels: Mapping[str, str], which: Which) -> list[Mapping[str, Any]]:
        self.asked.append(labels)
        return self.there if labels == LABELS else []

    async def remove(self, name: str) -> None:
        self.removed.append(name)
        if "stuck" in name:
            raise InfrastructureError("engine_failed", "device or resource busy")


async def send(event: object) -> None:
    pass


def test_the_sweeps_of_all_partitions_list_the_whole_host_once_a_minute() -> None:
    """A worker sweeps 256 partitions each ten seconds, and a cluster may have 10,000 pods."""

    async def main() -> None:
        late = {"headrace.deadline": f"{now() - 120:.0f}"}
        source = PaperSource(
            [{"Id": "a" * 12, "Names": ["/headrace.other.idle.a"], "Labels": late}]
        )
        settings = SandboxSettings(image="i")
        whose = Whose("ns", "docker", settings, read_ceilings(), Instances(send, "w"))
        host = SandboxHost(whose, cast(ContainerSource, source))
        for _ in range(3):
            await asyncio.gather(*(host.sweep(n, 0, lambda task, sample: None) for n in range(64)))
        assert source.asked.count(LABELS) == 1
        assert source.removed == ["headrace.other.idle.a"]
        assert len(source.asked) == 1 + 3 * 64
        host._look_at = 0.0
        await host.sweep(0, 0, lambda task, sample: None)
        assert source.asked.count(LABELS) == 2

    asyncio.run(main())


def container(name: str, ends_s: float, **more: Any) -> Mapping[str, Any]:
    labels = {"headrace.deadline": f"{now() + ends_s:.0f}"}
    return {"Id": name, "Names": [f"/{name}"], "Labels": labels, "State": "running", **more}


def test_a_container_that_stays_keeps_no_other_one() -> None:
    async def main() -> None:
        source = PaperSource([container(name, -120) for name in ("h.n.idle.stuck", "h.n.idle.b")])
        with pytest.raises(InfrastructureError, match="busy"):
            await host_of(source).sweep(0, 0, lambda task, sample: None)
        assert source.removed == ["h.n.idle.stuck", "h.n.idle.b"]

    asyncio.run(main())


def test_what_nobody_takes_any_more_is_removed() -> None:
    """Two workers take one each. The second one has ended amid that."""

    async def main() -> None:
        source = PaperSource([container(f"h.n.taken.{one}", 600) for one in "ab"])
        host = host_of(source)
        for there in (source.there, source.there[1:], source.there[1:]):
            host._look_at, source.there = 0.0, there
            await host.sweep(0, 0, lambda task, sample: None)
        assert source.removed[0] == "h.n.taken.b"
        assert "h.n.taken.a" not in source.removed

    asyncio.run(main())


class OneContainer(PaperSource):
    """Has one idle container, and renames it as Docker does: it looks it up, and waits for it."""

    def __init__(self, waits: Callable[[str], Awaitable[None]]) -> None:
        self.name = idle("ns", "a")
        labels = {"headrace.deadline": f"{now() + 600:.0f}", **self.image("i").labels}
        found = {"Id": "a", "Names": [f"/{self.name}"], "Labels": labels, "State": "running"}
        super().__init__([found])
        self._waits = waits

    def image(self, name: str) -> PinnedImage:
        return PinnedImage(name, name, "")

    async def find(self, labels: Mapping[str, str], which: Which) -> list[Mapping[str, Any]]:
        return self.there

    async def rename(self, name: str, new: str) -> None:
        await self.inspect(name)
        await self._waits(new)
        if self.name == new:
            raise Conflict("sandbox_lost", "it has that name")
        self.name = new

    async def inspect(self, name: str) -> Mapping[str, Any]:
        await asyncio.sleep(0)
        if self.name != name:
            raise NotThere("sandbox_lost", f"no {name}")
        return {}


async def take(host: SandboxHost, task: int) -> InUse | None:
    return await host.reuse(Claim(task, 0, 0, 0, 0, now() + 60), "i", used=True)


def host_of(source: PaperSource) -> SandboxHost:
    whose = Whose("ns", "docker", SandboxSettings(image="i"), read_ceilings(), Instances(send, "w"))
    return SandboxHost(whose, cast(ContainerSource, source))


@pytest.mark.parametrize("seed", range(40))
def test_one_episode_of_a_worker_takes_an_idle_container(seed: int) -> None:
    chance = random.Random(seed)

    async def main() -> None:
        async def waits(new: str) -> None:
            for _ in range(chance.choice((0, 0, 1, 20))):
                await asyncio.sleep(0)

        source = OneContainer(waits)
        host = host_of(source)
        took = await asyncio.gather(*(take(host, task) for task in range(4)))
        assert [str(name) for name in took if name] == [source.name]

    asyncio.run(main())


def test_a_worker_does_not_have_a_container_that_another_took_at_the_same_time() -> None:
    async def main() -> None:
        late, first = asyncio.Event(), asyncio.Event()

        async def waits(new: str) -> None:
            if ".taken." in new and not first.is_set():  # the first rename ends last
                first.set()
                await late.wait()
            elif ".taken." not in new:
                late.set()

        source = OneContainer(waits)
        one, other = await asyncio.gather(take(host_of(source), 1), take(host_of(source), 2))
        assert one is not None
        assert str(one) == source.name
        assert other is None

    asyncio.run(main())
