"""Activation checkpointing: the same training in far less memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load

from headrace.errors import UsageError
from headrace.schemas.recipe.policy import Policy
from headrace.services.models.weights import model_folder
from headrace.trainer.forward.activation_checkpointing import checkpoint_layers
from headrace.trainer.learner import Learner
from headrace.trainer.sequences import TokenSequence
from tests.unit.trainer.saved_tensors import SavedTensors
from tests.unit.trainer.test_learner import OPEN, sequence, update

SOURCE = model_folder("tiny-llama")
LAYERS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with 12 layers."""
    made = tmp_path_factory.mktemp("deep")
    for file in SOURCE.iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    config = json.loads((SOURCE / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    return made


def learner(folder: Path, checkpointing: bool, changes: dict[str, Any]) -> Learner:
    training = {"learning_rate": 1e-2, "device": "cpu", **changes.get("training", {})}
    training["activation_checkpointing"] = checkpointing
    settings = {"model": str(folder), **changes, "training": training}
    return Learner(folder, Policy.model_validate(settings))


def critic() -> dict[str, Any]:
    return {"training": {"critic": {}}, "groups": {"advantage": "rewards"}}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "bfloat16"},
        {"lora": {"rank": 4, "alpha": 8}},
        {"lora": {"rank": 4, "alpha": 8}, "dtype": "bfloat16"},
        critic(),
        {"training": {"kl_coefficient": 0.1, "epochs": 2, "entropy_bonus": 0.01}},
    ],
    ids=["whole", "bfloat16", "lora", "lora-bfloat16", "critic", "two-epochs"],
)
def test_training_is_the_same_bit_by_bit_in_a_third_of_the_memory(
    folder: Path, changes: dict[str, Any]
) -> None:
    rewards = "groups" in changes
    batch = [update(*(with_rewards(seed, rewards) for seed in range(4))) for _ in range(2)]
    weights, metrics, stored = [], [], []
    for checkpointing in (False, True):
        one = learner(folder, checkpointing, changes)
        with SavedTensors() as saved:
            metrics.append(one.train(batch))
        weights.append(load(one.weights()))
        stored.append(saved.most)
    assert metrics[0] == metrics[1]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert stored[1] <= stored[0] / 3


def with_rewards(seed: int, rewards: bool) -> TokenSequence:
    one = sequence(seed, turns=24, sampling=OPEN)
    if not rewards:
        return one
    given = np.zeros(24, dtype=np.float32)
    given[-1] = seed % 2
    ones = np.ones(24, dtype=np.float32)
    return replace(one, rewards=given, advantages=ones, turns=(0,), sample=seed)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(UsageError, match="activation_checkpointing"):
        checkpoint_layers(torch.nn.Linear(1, 1))
