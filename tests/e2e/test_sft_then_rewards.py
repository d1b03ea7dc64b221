"""Fine-tuning on recorded demonstrations, then rewards, as good as a warm start."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path
from typing import Any

import pytest

from headrace.infra import local
from headrace.schemas.events import BatchAssembled
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.recipe.toml import to_toml
from headrace.services.operate.verify.invariants.log_facts import Facts
from headrace.services.operate.verify.verify import read_all
from tests.e2e import harness

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_use" / "tool-use.toml"
RUN_S = 2400.0


def recipe(folder: Path, *, warm: bool, model: str | None = None) -> Path:
    """The example's recipe, with the calculator in Python instead of a container."""
    tree: dict[str, Any] = tomllib.loads(EXAMPLE.read_text())
    calculator = "examples.tool_use.calculator"
    tree["tasks"]["use"] = tree["warm_start"]["use"] = f"{calculator}:sums"
    tree["agents"]["teacher"]["use"] = f"{calculator}:teacher"
    own = {"use": "tests.e2e.python_calculator:PythonCalculator", "slots": 64}
    tree["environments"]["default"] = own
    if not warm:
        del tree["warm_start"], tree["agents"]["teacher"]
    if model is not None:
        tree["policies"]["default"]["model"] = model
    path = folder / f"warm-{warm}.toml"
    path.write_text(to_toml(tree))
    return path


async def rewards(place: ClusterConfig) -> list[float]:
    """The mean rewards of the batches that were learned by reward."""
    async with open_namespace(place, "test") as (log, _):
        deliveries, _ = await read_all(log)
    means = [one.reward_mean for one in Facts.of(deliveries).events(BatchAssembled)]
    return [one for one in means if one is not None]


@pytest.mark.long
def test_fine_tuning_and_rewards_reach_what_a_warm_start_reaches(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    address = (local_stack.bootstrap_servers, local_stack.registry_url)
    demonstrated, rewarded = (
        ClusterConfig(tmp_path, *address, namespace=f"{namespace}-{name}")
        for name in ("warm", "sft")
    )
    model = tmp_path / "model"
    found = []

    async def learn(path: Path, place: ClusterConfig) -> None:
        checks = ("--check", "reward>=0.9", "--check", "failures==0")
        async with harness.headrace(*harness.arguments_of(path, place), *checks) as run:
            assert await run.ends(RUN_S) == 0, run.said
        found.append(await rewards(place))

    async def main() -> None:
        path = recipe(tmp_path, warm=True)
        await learn(path, demonstrated)
        _, _, *cluster = harness.arguments_of(path, demonstrated)
        shown = ("--recorded", "--agent", "teacher", "--passing", "0", "--to", str(model))
        # As many updates as the warm start makes: half a thousand small ones.
        small = ("--batch-tokens", "64", "--schedule", "constant", "--held-out", "0")
        await harness.headrace_done("sft", str(path), *cluster, *shown, *small, bound_s=RUN_S)
        await learn(recipe(tmp_path, warm=False, model=str(model)), rewarded)

    try:
        asyncio.run(asyncio.wait_for(main(), 3 * RUN_S))
        harness.gone(tmp_path)
    finally:
        harness.end_all_of(tmp_path)
    for name, means in zip(("warm start", "sft"), found, strict=True):
        best = max(sum(means[end - 3 : end]) / 3 for end in range(3, len(means) + 1))
        print(f"{name}: first {means[0]:.2f}, {best:.2f} over three of {len(means)} versions")
        assert means[0] < 0.9 <= best
