"""The workflows in `examples/workflows`: what their environments give, and runs through a Kafka."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from examples.workflows.nim import Nim, games, winnable
from examples.workflows.proposer_solver import ProposedSums, all_sums, beginnings
from examples.workflows.solver_verifier import RIGHT, WRONG, Sums, sums
from headrace.infra import local
from headrace.services.base.types import Observation, TaskView
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.operate.verify.verify import check_namespace
from tests.commands import cluster_variables, run_command


@pytest.mark.parametrize("verdict", [RIGHT, WRONG])
@pytest.mark.parametrize("said", ["3", "1"])
def test_neither_policy_sets_the_others_reward_alone(said: str, verdict: str) -> None:
    async def play(sample: int) -> tuple[str, Mapping[str, float]]:
        environment = Sums(largest=2)
        await environment.reset(TaskView(0, sample, {"question": "1+2", "answer": "3"}, {}, 7))
        shown = (await environment.step(said)).text
        return shown, (await environment.step(verdict)).rewards

    played = [asyncio.run(play(sample)) for sample in range(200)]
    right = sum(shown == "3" for shown, _ in played)
    assert 70 < right < 130, "an answer that is shown is right in half of the episodes"
    for shown, rewards in played:
        verified = verdict == (RIGHT if shown == "3" else WRONG)
        assert rewards["verifier"] == verified
        assert rewards["solver"] == (said == "3") * (0.5 + 0.5 * verified)
    assert len({one.item_id for one in sums(largest=2)}) == 9


@pytest.mark.parametrize("stones", range(1, 10))
def test_nim_is_won_by_leaving_a_multiple_of_four(stones: int) -> None:
    async def play(moves: int) -> Mapping[str, float]:
        game = Nim()
        payload = {"stones": stones, "begins": "player", "opponent": "perfect"}
        shown = await game.reset(TaskView(0, 0, payload, {}, 7))
        while not shown.terminated:
            left = int(shown.text.removeprefix("player "))
            shown = await game.step(str(left % 4 or moves))
        return shown.rewards

    for moves in (1, 2, 3):
        won = stones % 4 > 0
        assert asyncio.run(play(moves)) == {"player": won, "opponent": not won}


@pytest.mark.parametrize("action", ["3", "0", "x", "", "11"])
def test_an_impossible_move_loses(action: str) -> None:
    async def play() -> Observation:
        game = Nim()
        shown = await game.reset(TaskView(0, 0, {"stones": 2, "begins": "opponent"}, {}, 7))
        assert shown.text == "opponent 2"
        return await game.step(action)

    shown = asyncio.run(play())
    assert (shown.terminated, shown.rewards) == (True, {"player": 1.0, "opponent": 0.0})


def test_only_games_that_can_be_won_are_evaluated() -> None:
    assert [item.item_id for item in winnable(largest=5)] == [
        "2-player", "3-player", "4-opponent", "5-player",
    ]  # fmt: skip
    assert len(list(games(largest=9))) == 16


def test_a_proposer_gains_what_the_solver_loses() -> None:
    async def play(payload: dict[str, int], *actions: str) -> Observation:
        environment = ProposedSums()
        shown = await environment.reset(TaskView(0, 0, payload, {}, 7))
        for action in actions:
            shown = await environment.step(action)
        return shown

    def rewards(payload: dict[str, int], *actions: str) -> Mapping[str, float]:
        return asyncio.run(play(payload, *actions)).rewards

    assert asyncio.run(play({"first": 3})).text == "3+"
    assert asyncio.run(play({"first": 3}, "2")).text == "3+2="
    assert rewards({"first": 3}, "2", "5") == {"proposer": 0.0, "solver": 1.0}
    assert rewards({"first": 3}, "2", "4") == {"proposer": 1.0, "solver": 0.0}
    assert rewards({"first": 3}, "4") == {"proposer": 0.0, "solver": 0.0}
    assert rewards({"first": 3, "second": 1}, "4") == {"solver": 1.0}
    assert (len(list(beginnings())), len(list(all_sums()))) == (4, 16)


FEW = ("stop.versions=3", "stop.reward=9", "tasks.samples=4")


@pytest.mark.parametrize(
    ("workflow", "sets"),
    [
        ("solver-verifier", ("barrier.versions=1",)),
        # Every version becomes an opponent, and the checker finds only samples of staleness 0.
        pytest.param(
            "self-play",
            ("tasks.league.every=1", "evaluation.items=2", "evaluation.every=1", "mode=sync"),
            marks=pytest.mark.long,
        ),
        pytest.param("proposer-solver", ("evaluation.items=2",), marks=pytest.mark.long),
    ],
)
def test_each_policy_is_trained_on_its_own_reward(
    tmp_path: Path,
    local_stack: local.LocalStack,
    namespace: str,
    workflow: str,
    sets: tuple[str, ...],
) -> None:
    recipe = f"examples/workflows/{workflow}.toml"
    policies = read_recipe(recipe).policies
    environment = cluster_variables(local_stack, namespace, tmp_path)
    sets += (*FEW, *(f"policies.{name}.batches.groups=2" for name in policies))
    words = (word for one in sets for word in ("--set", one))
    done = run_command(("run", recipe, "--json", "--quiet", *words), environment)
    assert done.returncode == 0, done.stderr[-3000:]
    summary: dict[str, Any] = json.loads(done.stdout)
    assert (summary["failures"], summary["restarts"]) == (0, 0), summary

    servers, registry = local_stack.bootstrap_servers, local_stack.registry_url
    cluster = ClusterConfig(tmp_path, servers, registry, namespace=namespace)
    report = asyncio.run(check_namespace(cluster))
    assert report.violations == []
    assert min(report.versions[name] for name in policies) >= 3
