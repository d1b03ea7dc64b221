"""Policies that learn an adapter: what changes, what is published, and what is gone on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save

from headrace.errors import UsageError
from headrace.schemas.recipe.policy import Policy
from headrace.services.models.lora import attach, base_tensors
from headrace.services.models.weights import ADAPTER, model_folder, weights_digest
from headrace.trainer.learner import Learner
from headrace.trainer.model_loading import load_model
from tests.unit.trainer.test_learner import OPEN, sequence, state, update

FOLDER = model_folder("tiny-llama")
LAYERS = [
    f"model.layers.{layer}.{module}"
    for layer in range(2)
    for module in (
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    )
]


def learner(folder: Path = FOLDER, **changes: Any) -> Learner:
    settings = {
        "model": str(folder),
        "lora": {"rank": 4, "alpha": 8},
        "training": {"learning_rate": 1e-2, "device": "cpu"},
    }
    return Learner(folder, Policy.model_validate(settings | changes))


def base_file(one: Learner) -> bytes:
    assert one.base is not None
    return one.base.file()


def with_weights(folder: Path, seed: int) -> Path:
    """A model folder whose weights are random by `seed`."""
    for file in FOLDER.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "model.safetensors").write_bytes(base_file(learner(seed=seed)))
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_adapter_learns_and_nothing_else_does(dtype: str) -> None:
    one = learner(dtype=dtype)
    before, base = load(one.weights()), base_file(one)
    one.train([update(sequence(0), sequence(1))])
    after = load(one.weights())
    assert base_file(one) == base
    assert set(after) == {
        f"base_model.model.{layer}.lora_{half}.weight" for layer in LAYERS for half in "AB"
    }
    assert {tensor.dtype for tensor in after.values()} == {getattr(torch, dtype)}
    # B is zero at first, so that A has no gradient yet.
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) == (".lora_A." in name), name
        assert before[name].any() == (".lora_A." in name)
    q = "base_model.model.model.layers.0.self_attn.q_proj"
    assert after[f"{q}.lora_A.weight"].shape == (4, 64)
    assert after[f"{q}.lora_B.weight"].shape == (64, 4)


def test_version_0_is_the_base_and_follows_from_the_seed() -> None:
    first, again, other = learner().weights(), learner().weights(), learner(seed=1).weights()
    assert first == again
    assert weights_digest(first) != weights_digest(other)
    inputs = learner()._forward.collate([sequence(0, sampling=OPEN)])
    whole = Learner(FOLDER, Policy(model="tiny-llama"))
    assert weights_digest(base_file(learner())) == weights_digest(whole.weights())
    torch.testing.assert_close(
        learner()._forward.logprobs(inputs)[0], whole._forward.logprobs(inputs)[0]
    )


def test_a_layer_adds_alpha_by_rank_times_the_product() -> None:
    """The adapter's logits are those of weights W + (alpha / rank) B A."""
    merged, adapted = load_model(FOLDER, 0).eval(), load_model(FOLDER, 0).eval()
    attach(adapted, ["q_proj", "mlp.down_proj"], 4, 6.0, torch.float32)
    pairs = {name for name in adapted.state_dict() if ".lora_A." in name}
    assert len(pairs) == 4
    torch.manual_seed(3)
    own = merged.state_dict()
    for name in pairs:
        layer = adapted.get_submodule(name.removesuffix(".lora_A.weight"))
        for half in (layer.lora_A, layer.lora_B):
            torch.nn.init.normal_(half.weight, std=0.3)
        product = layer.lora_B.weight @ layer.lora_A.weight
        own[name.replace("lora_A.", "")] += 1.5 * product.detach()
    assert set(base_tensors(adapted)) == set(own)
    ids = torch.arange(97, 113)[None]
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("targets", "chosen"),
    [
        ((), LAYERS),
        (("q_proj", "layers.1.mlp.down_proj"), [LAYERS[0], LAYERS[7], LAYERS[13]]),
        (("lm_head",), ["lm_head"]),
    ],
)
def test_targets_name_layers_by_their_last_parts(
    targets: tuple[str, ...], chosen: list[str]
) -> None:
    base = learner(lora={"targets": targets}).base
    assert base is not None
    assert base.targets == tuple(chosen)


def test_a_target_that_no_layer_has_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no linear layer .*'proj'.*down_proj.*q_proj"):
        learner(lora={"targets": ["q_proj", "proj"]})


def test_training_goes_on_from_a_checkpoint_bit_by_bit(tmp_path: Path) -> None:
    batches = [[update(sequence(seed), sequence(seed + 9))] for seed in range(4)]
    whole = learner()
    for batch in batches:
        whole.train(batch)
    half = learner()
    for batch in batches[:2]:
        half.train(batch)
    half.save(tmp_path / "checkpoint")
    kept = load_file(tmp_path / "checkpoint")
    assert {name for name in kept if name.startswith("model.")} == {
        f"model.{layer}.lora_{part}.weight" for layer in LAYERS for part in "AB"
    }
    assert (tmp_path / "checkpoint").stat().st_size < 3.5 * len(half.weights())

    resumed = learner()
    resumed.load(tmp_path / "checkpoint")
    for batch in batches[2:]:
        resumed.train(batch)
    assert resumed.weights() == whole.weights()
    assert state(resumed, tmp_path) == state(whole, tmp_path)


def test_a_checkpoint_of_another_base_is_refused(tmp_path: Path) -> None:
    one = learner(with_weights(tmp_path, seed=1))
    one.save(tmp_path / "checkpoint")
    learner(tmp_path).load(tmp_path / "checkpoint")
    with pytest.raises(UsageError, match="another base"):
        learner(with_weights(tmp_path, seed=2)).load(tmp_path / "checkpoint")
    with pytest.raises(UsageError, match="another model"):
        learner(tmp_path, lora={"rank": 2}).load(tmp_path / "checkpoint")


def test_an_adapter_beside_the_weights_is_version_0(tmp_path: Path) -> None:
    taught = learner()
    taught.train([update(sequence(0), sequence(1))])
    (with_weights(tmp_path, seed=0) / ADAPTER).write_bytes(taught.weights())
    assert weights_digest(learner(tmp_path).weights()) == weights_digest(taught.weights())
    with pytest.raises(UsageError, match="other layers, or another rank"):
        learner(tmp_path, lora={"rank": 2})
    (tmp_path / ADAPTER).write_bytes(save({"strange": torch.zeros(1)}))
    with pytest.raises(UsageError, match="other layers"):
        learner(tmp_path)


def test_layers_with_transposed_weights_have_adapters_too(tmp_path: Path) -> None:
    """GPT-2's, whose attention is one layer of three times the width."""
    tree = {"model_type": "gpt2", "vocab_size": 258, "n_embd": 32, "n_layer": 1, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    one = learner(tmp_path)
    one.train([update(sequence(0), sequence(1))])
    weights = load(one.weights())
    attention = "base_model.model.transformer.h.0.attn.c_attn"
    assert weights[f"{attention}.lora_A.weight"].shape == (4, 32)
    assert weights[f"{attention}.lora_B.weight"].shape == (96, 4)
    assert len(weights) == 2 * len(["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"])
