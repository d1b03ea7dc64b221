"""What one host of a pool is asked for, by a source of containers on paper."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

from headrace.services.base.clock import now
from headrace.services.env.instances import Instances
from headrace.services.env.sandbox.container_names import Which
from headrace.services.env.sandbox.hosts.container_source import ContainerSource, Whose
from headrace.services.env.sandbox.hosts.sandbox_host import SandboxHost
from headrace.services.env.sandbox.sandbox import SandboxSettings
from headrace.services.processes.docker.ceilings import read_ceilings

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
