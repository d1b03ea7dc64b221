"""Which workers of `headrace run` are started and drained."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.services.namespace.cluster_config import read_recipe
from headrace.services.operate.autoscale.local_pool import LocalPool
from headrace.services.operate.run.children import child_specs, scaled_specs
from headrace.services.operate.run.supervisor import ChildSpec

SETTINGS = ("workers.inference=2", "workers.autoscale.most=4")


class Children:
    """A supervisor's children, without processes."""

    def __init__(self, *names: str) -> None:
        self.serving = list(names)
        self.leaving: list[str] = []

    async def add(self, spec: ChildSpec) -> None:
        self.serving.append(spec.name)

    def drain(self, name: str) -> None:
        if name in self.serving:
            self.serving.remove(name)
            self.leaving.append(name)

    def names(self, *, leaving: bool) -> list[str]:
        return list(self.leaving if leaving else self.serving)


def test_the_newest_workers_drain_and_names_are_used_again_once_they_are_free() -> None:
    specs = scaled_specs(read_recipe("null", SETTINGS), Path("recipe.toml"))
    children = Children("trainer", "inference-1", "inference-2")
    pool = LocalPool(children, specs, lambda line: None)

    def after(wanted: int) -> list[str]:
        asyncio.run(pool.apply(wanted))
        return [name for name in children.serving if name != "trainer"]

    assert after(4) == ["inference-1", "inference-2", "inference-3", "inference-4"]
    assert after(4) == ["inference-1", "inference-2", "inference-3", "inference-4"]
    assert after(1) == ["inference-1"]
    assert children.leaving == ["inference-2", "inference-3", "inference-4"]
    # They still drain, so the one that is wanted again can't be started yet.
    assert after(2) == ["inference-1"]
    children.leaving.remove("inference-3")
    assert after(2) == ["inference-1", "inference-3"]
    assert "trainer" in children.serving


def test_spare_workers_have_ports_of_their_own_and_do_not_start_by_themselves() -> None:
    recipe, path = read_recipe("null", SETTINGS), Path("recipe.toml")
    begun, scaled = child_specs(recipe, path, 9000), scaled_specs(recipe, path, 9000)
    assert [spec.name for spec in scaled] == [f"inference-{n}" for n in (1, 2, 3, 4)]
    names = {spec.name for spec in begun}
    assert {"inference-1", "inference-2"} <= names
    assert not {"inference-3", "inference-4"} & names
    ports = {spec.name: spec.command[-1] for spec in (*begun, *scaled)}
    assert len(set(ports.values())) == len(ports)
    assert scaled[0] in begun
