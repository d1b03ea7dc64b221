"""The recipe of an evaluation: the recipe's own tasks, and nothing that learns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.schemas.untrusted.public_keys import key_text
from headrace.schemas.untrusted.trusted_keys import TrustedKeys
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.operate.evaluate import evaluate as evaluating
from headrace.services.operate.evaluate.evaluate import evaluate, evaluation_recipe
from headrace.services.operate.run.children import services_of
from headrace.services.tasks.data_sets import items_by_epoch


def test_an_evaluation_runs_the_first_items_once_and_trains_nothing() -> None:
    tree = {
        "name": "r",
        "stop": {"reward": 0.5},
        "tasks": {"use": "count", "samples": 3},
        "policies": {"default": {"model": "tiny-llama"}},
        "evaluation": {"items": 5, "samples": 2, "temperature": 0, "seed": 9, "passing": 0.5},
    }
    derived = evaluation_recipe(parse_recipe(tree, "test"), {"default": "/weights"})
    policy, tasks = derived.policies["default"], derived.tasks
    assert (policy.training, policy.model, policy.sampling.temperature) == (None, "/weights", 0)
    assert (tasks.purpose, tasks.samples, tasks.seed, derived.stop.reward) == (
        "evaluate", 2, 9, None,
    )  # fmt: skip
    items = items_by_epoch(tasks.use, tasks.options, tasks.epochs)
    assert [item.item_id for _, _, item in items] == ["0", "1", "2", "3", "4"]
    assert not {"evaluation", "assemble-batches"} & set(services_of(derived))


@pytest.mark.parametrize(
    "learning",
    [
        {"tasks": {"curators": ["greso"], "curated_by": "default"}},
        {
            "tasks": {
                "roles": {"policy": "default", "other": "default"},
                "league": {"roles": ["other"]},
            }
        },
        {"tasks": {"roles": {"a": "default", "b": "second"}}, "barrier": {}},
    ],
)
def test_what_only_a_policy_that_learns_can_have_is_left_out(learning: dict[str, Any]) -> None:
    tasks = {"use": "count", "options": {"items": 9}, **learning["tasks"]}
    names = ("default", "second")[: 1 + ("barrier" in learning)]
    policies = {name: {"model": "tiny-llama"} for name in names}
    tree = {"name": "r", "policies": policies, **learning, "tasks": tasks}
    derived = evaluation_recipe(parse_recipe(tree, "test"), {})
    assert (derived.tasks.curators, derived.tasks.league, derived.barrier) == ((), None, None)
    assert derived.tasks.roles == tasks.get("roles", {"policy": "default"})


def test_an_evaluation_needs_no_private_key() -> None:
    keys = [key_text(bytes([number]) * 32) for number in range(2)]
    scheduler = {"tenants": {"mine": {"keys": keys[:1], "weight": 2}}, "operators": keys[1:]}
    tree = {
        "name": "r",
        "tasks": {"tenant": "mine"},
        "policies": {"default": {"model": "tiny-llama", "signers": keys[:1]}},
        "scheduler": {**scheduler, "require_keys": True},
    }
    derived = evaluation_recipe(parse_recipe(tree, "test"), {})
    assert derived.scheduler.trusted == TrustedKeys()
    assert derived.scheduler.tenants["mine"].weight == 2
    assert derived.policies["default"].signers == ()


@pytest.mark.parametrize("roles", [(), ("agent", "env")])
def test_the_temporary_stack_is_as_secure_as_the_folders_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roles: Sequence[str]
) -> None:
    if roles:
        (tmp_path / "stack-roles.json").write_text(json.dumps(roles))

    class Started(Exception):
        pass

    def start(*_: Any, roles: Sequence[str], **__: Any) -> None:
        raise Started(*roles)

    monkeypatch.setattr(evaluating, "LocalRun", start)
    recipe = parse_recipe({"name": "r", "policies": {"default": {"model": "tiny-llama"}}}, "test")
    with pytest.raises(Started) as started:
        asyncio.run(evaluate(recipe, ClusterConfig(state=tmp_path), None, tmp_path, quiet=True))
    assert started.value.args == tuple(roles)
