"""The planner's formulas, compared with the tensors of real updates on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import UsageError
from headrace.schemas.events import Sampling
from headrace.schemas.recipe.policy import Policy
from headrace.services.models.output_head import CHUNK
from headrace.services.models.weights import model_folder
from headrace.services.operate.plan.memory_parts import LOGITS_AT_ONCE, TrainerMemory
from headrace.services.operate.plan.model_shape import read_shape
from headrace.trainer.learner import Learner
from headrace.trainer.sequences import TokenSequence, UpdateBatch
from tests.unit.operate.plan.tracked_memory import TrackedMemory

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000}
SIZES: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 12,
              "num_attention_heads": 4, "num_key_value_heads": 2},
    "wide": {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3,
             "num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "qwen": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 256,
             "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4000},
    "attentive": {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
                  "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64},
}  # fmt: skip
"""Keys of `config.json`."""


def made(folder: Path, size: str) -> Path:
    config = LLAMA | {"max_position_embeddings": 512, "attention_bias": False} | SIZES[size]
    (folder / "config.json").write_text(json.dumps(config))
    source = model_folder("tiny-llama") / "tokenizer.json"
    (folder / "tokenizer.json").write_bytes(source.read_bytes())
    return folder


def sequences(count: int, length: int) -> list[TokenSequence]:
    random = np.random.default_rng(1)
    made = []
    for _ in range(count):
        trained = np.arange(1, length)
        made.append(
            TokenSequence(
                tokens=random.integers(0, 250, length),
                positions=trained,
                behaviour=np.full(length - 1, -5.0, dtype=np.float32),
                advantages=np.ones(length - 1, dtype=np.float32),
                versions=np.zeros(length - 1, dtype=np.int64),
                samplings=((Sampling(max_tokens=length), length - 1),),
                demonstrated=np.zeros(length - 1, dtype=np.bool_),
            )
        )
    return made


CASES = [
    ("small", {}),
    ("small", {"dtype": "bfloat16"}),
    ("small", {"training": {"activation_checkpointing": True}}),
    ("small", {"lora": {"rank": 8}, "dtype": "bfloat16"}),
    ("small", {"lora": {"rank": 8, "targets": ["q_proj", "v_proj"]}}),
    ("wide", {}),
    ("wide", {"dtype": "bfloat16", "training": {"activation_checkpointing": True}}),
    ("wide", {"dtype": "bfloat16", "engine": {"use": "vllm"}}),
    ("qwen", {}),
    ("qwen", {"dtype": "bfloat16", "training": {"kl_coefficient": 0.1}}),
    ("qwen", {"lora": {"rank": 8}, "training": {"activation_checkpointing": True}}),
    ("attentive", {"dtype": "bfloat16"}),
    ("attentive", {"dtype": "bfloat16", "length": 512, "training": {"max_tokens": 512}}),
]


@pytest.mark.long
@pytest.mark.parametrize(("size", "changes"), CASES, ids=str)
def test_a_plan_is_right_within_fifteen_percent(
    tmp_path: Path, size: str, changes: dict[str, Any]
) -> None:
    folder = made(tmp_path, size)
    length = changes.get("length", 128)
    changes = {key: value for key, value in changes.items() if key != "length"}
    training = {"device": "cpu", "max_tokens": 1024, **changes.get("training", {})}
    policy = Policy.model_validate({"model": str(folder), **changes, "training": training})
    one = Learner(folder, policy)
    count = 2 * training["max_tokens"] // length  # two micro-batches, so that gradients add up
    update = UpdateBatch(sequences(count, length))
    one.train([update])
    with TrackedMemory(tensors_of(one)) as tracked:
        one.train([update])

    memory = TrainerMemory(policy, read_shape(folder), on_gpu=False)
    assert memory.total == pytest.approx(tracked.most, rel=0.15)


def test_a_loss_that_compares_with_version_0_keeps_it(tmp_path: Path) -> None:
    shape = read_shape(made(tmp_path, "small"))

    def reference(**training: Any) -> int:
        policy = Policy.model_validate({"model": str(tmp_path), "training": training})
        return TrainerMemory(policy, shape, on_gpu=False).reference

    assert reference() == 0
    assert reference(loss={"use": "dpo", "beta": 0.2}) == reference(kl_coefficient=0.1) > 0


def tensors_of(one: Learner) -> list[Any]:
    """All that a learner keeps between two batches."""
    moments = one._optimizer.state_dict()["state"].values()
    reference = [] if one._reference is None else one._reference._first
    return [
        *one._model.state_dict(keep_vars=True).values(),
        *one._masters.by_name.values(),
        *(tensor for state in moments for tensor in state.values()),
        *reference,
        *(one._parameters[0].grad,) * (one._parameters[0].grad is not None),
    ]


@pytest.mark.parametrize("size", list(SIZES))
def test_parameters_are_counted(tmp_path: Path, size: str) -> None:
    folder = made(tmp_path, size)
    training = {"device": "cpu"}
    one = Learner(folder, Policy.model_validate({"model": str(folder), "training": training}))
    assert read_shape(folder).parameters == sum(p.numel() for p in one._model.parameters())


def test_the_gradients_inside_attention_may_be_larger_than_those_of_the_mlp(tmp_path: Path) -> None:
    """As with the shapes of Llama 3 8B on a CPU, where they are float64."""
    large = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
             "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
    folder = made(tmp_path, "small")
    (folder / "config.json").write_text(json.dumps(LLAMA | large))
    backward = {}
    for dtype in ("float32", "bfloat16"):
        policy = Policy.model_validate(
            {
                "model": str(folder),
                "dtype": dtype,
                "lora": {"rank": 8},
                "training": {"max_tokens": 1},
            }
        )
        memory = TrainerMemory(policy, read_shape(folder), on_gpu=False)
        assert memory.tokens == 2048, "one sequence of the whole context"
        backward[dtype] = memory.backward / memory.tokens
    assert backward == {
        "float32": 4 * 2 * (14336 + 4096),
        "bfloat16": 8 * (2 * 4096 + 2 * 1024),
    }


def test_the_planner_knows_how_many_logits_there_are_at_once() -> None:
    assert LOGITS_AT_ONCE == CHUNK


def test_a_model_of_another_family_is_refused(tmp_path: Path) -> None:
    (made(tmp_path, "small") / "config.json").write_text(
        json.dumps(LLAMA | SIZES["small"] | {"model_type": "mixtral"})
    )
    with pytest.raises(UsageError, match="mixtral"):
        read_shape(tmp_path)
