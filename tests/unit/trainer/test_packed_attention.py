"""Packed sequences give the numbers of padded ones, and models that can't be packed are padded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from headrace.errors import UsageError
from headrace.schemas.events import Sampling
from headrace.schemas.recipe.policy import Policy
from headrace.services.models.even_rounding import WIDE_ATTENTION
from headrace.services.models.weights import model_folder
from headrace.trainer.collate import collate
from headrace.trainer.forward import packable, packed_attention
from headrace.trainer.forward.packed_attention import AT_ONCE, KEYS_AT_ONCE, PACKED, Packing
from headrace.trainer.learner import Learner
from headrace.trainer.packing import layout
from headrace.trainer.sequences import TokenSequence

SOURCE = model_folder("tiny-llama")
VOCABULARY = 48
"""Few ids, so that a logprob itself is rounded by 2e-7 at most."""
IDS = {"vocab_size": VOCABULARY, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "grouped": {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "num_key_value_heads": 1},
    "mixture": {
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "head_dim": 32, "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512},
    "opt": {"model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 64},
}  # fmt: skip
UNPACKABLE: dict[str, dict[str, Any]] = {
    "window": {"model_type": "mistral", "sliding_window": 64},
    "windows": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64,
                "max_window_layers": 1},
    "convolution": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
}  # fmt: skip


def learner(folder: Path, config: dict[str, Any], **policy: Any) -> Learner:
    made = json.loads((SOURCE / "config.json").read_text()) | IDS
    made |= {"max_position_embeddings": 2048, "architectures": None} | config
    (folder / "config.json").write_text(json.dumps(made))
    (folder / "tokenizer.json").write_bytes((SOURCE / "tokenizer.json").read_bytes())
    training = {"device": "cpu", **policy.pop("training", {})}
    settings = {"model": str(folder), "training": training, **policy}
    return Learner(folder, Policy.model_validate(settings))


def sequence(tokens: list[int]) -> TokenSequence:
    count = len(tokens) - 1
    return TokenSequence(
        tokens=np.array(tokens, dtype=np.int64),
        positions=np.arange(1, len(tokens)),
        behaviour=np.full(count, -5, dtype=np.float32),
        advantages=np.ones(count, dtype=np.float32),
        versions=np.zeros(count, dtype=np.int64),
        samplings=((Sampling(max_tokens=count), count),),
        demonstrated=np.zeros(count, dtype=np.bool_),
    )


def sequences(prompt: int = 90, longest: int = 300) -> list[TokenSequence]:
    """Two groups, of which one has branches within branches, and sequences that share nothing."""
    pick = np.random.default_rng(5)

    def draw(count: int) -> list[int]:
        return [*map(int, pick.integers(0, VOCABULARY, count))]

    first, second = draw(prompt), draw(40)
    branch = first + draw(50)
    made = [first + draw(int(count)) for count in pick.integers(1, 60, 4)]
    made += [branch + draw(int(count)) for count in pick.integers(1, 60, 3)]
    made += [second + draw(int(count)) for count in pick.integers(1, 60, 3)]
    made += [draw(int(count)) for count in pick.integers(2, longest, 4)] + [draw(2), made[0][:-1]]
    return [sequence(one) for one in made]


def numbers(one: Learner, batch: list[TokenSequence], packed: bool) -> tuple[Tensor, list[Tensor]]:
    """Returns the logprobs of all trained tokens, and the gradients of a mean of them."""
    inputs = collate(batch, one.vocabulary, one.device, packed=packed)
    logprobs, _ = one._forward.logprobs(inputs)
    learning = [part for part in one._model.parameters() if part.requires_grad]
    factors = torch.linspace(-1, 1, len(logprobs)) / len(logprobs)
    return logprobs.detach(), [*torch.autograd.grad((logprobs * factors).sum(), learning)]


def compare(one: Learner, batch: list[TokenSequence], most: float) -> None:
    assert one._forward.packed
    padded, by_padded = numbers(one, batch, packed=False)
    packed, by_packed = numbers(one, batch, packed=True)
    gradients = max(float((a - b).abs().max()) for a, b in zip(by_padded, by_packed, strict=True))
    largest = max(float(a.abs().max()) for a in by_padded)
    logprobs = float((packed - padded).abs().max())
    print(f"logprobs {logprobs:.1e}, gradients {gradients:.1e} of {largest:.1e}")
    assert logprobs <= most
    assert gradients <= min(most, 1e-5 * largest)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_equals_padded_within_1e_6(name: str, tmp_path: Path) -> None:
    compare(learner(tmp_path, CONFIGS[name]), sequences(), 1e-6)


def test_a_prompt_that_is_longer_than_a_call_equals_padded_too(tmp_path: Path) -> None:
    batch = sequences(prompt=AT_ONCE + 100, longest=2 * AT_ONCE)
    answers = [sequence([*batch[0].tokens[:600], *([number] * 700)]) for number in (1, 2)]
    compare(learner(tmp_path, {}), [*batch, *answers], 1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_keys_that_are_gathered_again_give_the_same_gradients(
    checkpointing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = learner(tmp_path, {}, training={"activation_checkpointing": checkpointing})
    kept = numbers(one, sequences(), packed=True)
    monkeypatch.setattr(packed_attention, "KEPT", 0)
    again = numbers(one, sequences(), packed=True)
    assert torch.equal(kept[0], again[0])
    assert all(torch.equal(a, b) for a, b in zip(kept[1], again[1], strict=True))


def test_in_bfloat16_logprobs_are_those_of_padded_sequences(tmp_path: Path) -> None:
    """Gradients are rounded, too, so both ways differ from those of the same weights in float32."""
    one = learner(tmp_path, CONFIGS["grouped"], dtype="bfloat16")
    padded, by_padded = numbers(one, sequences(), packed=False)
    packed, by_packed = numbers(one, sequences(), packed=True)
    assert float((packed - padded).abs().mean()) <= 1e-6
    exact = learner(tmp_path, CONFIGS["grouped"])
    for parameter, rounded in zip(exact._model.parameters(), one._model.parameters(), strict=True):
        parameter.data = rounded.data.float()
    _, expected = numbers(exact, sequences(), packed=False)
    for right, *both in zip(expected, by_padded, by_packed, strict=True):
        of_padded, of_packed = (float((each.float() - right).norm()) for each in both)
        assert of_packed <= 2 * of_padded


def test_an_adapter_learns_from_packed_sequences_as_from_padded_ones(tmp_path: Path) -> None:
    compare(learner(tmp_path, {}, lora={"rank": 4}), sequences(), 1e-6)


@pytest.mark.parametrize("name", UNPACKABLE)
def test_a_model_that_can_not_be_packed_is_padded(name: str, tmp_path: Path) -> None:
    one = learner(tmp_path, UNPACKABLE[name])
    assert not one._forward.packed
    inputs = one._forward.collate(sequences()[:3])
    assert (len(inputs.ids), inputs.packing) == (3, None)
    alone = [one._forward.logprobs(one._forward.collate([each]))[0] for each in sequences()[:3]]
    together = one._forward.logprobs(inputs)[0]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_whose_tokens_see_later_ones_is_refused(tmp_path: Path, dtype: str) -> None:
    """In bfloat16 they change by less than what its rounding may change."""
    config = {"model_type": "bloom", "n_layer": 2, "n_head": 4, "hidden_size": 64}
    with pytest.raises(UsageError, match=r"a BloomForCausalLM can't be trained: .* see later ones"):
        learner(tmp_path, config, dtype=dtype)


def test_a_model_that_can_not_be_computed_in_float32_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is padded."""

    def refuse(one: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(packable, "_wide", refuse)
    one = learner(tmp_path, {}, dtype="bfloat16")
    assert not one._forward.packed
    assert {part.dtype for part in one._model.parameters()} == {torch.bfloat16}


def test_a_model_that_ignores_positions_is_padded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its attention gets no packing either, so all sequences look like one."""
    known = AttentionInterface._global_mapping
    monkeypatch.setitem(known, PACKED[WIDE_ATTENTION], known["sdpa"])
    assert not learner(tmp_path, {})._forward.packed


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_in_bfloat16_is_packed_and_tried_with_its_own_weights(
    name: str, tmp_path: Path
) -> None:
    one = learner(tmp_path, CONFIGS[name], dtype="bfloat16")
    assert one._forward.packed
    assert {part.dtype for part in one._model.parameters()} == {torch.bfloat16}
    assert not any(part._forward_hooks for part in one._model.modules())


def test_a_difference_that_bfloat16_would_hide_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = AttentionInterface._global_mapping
    plain: Any = known[PACKED[WIDE_ATTENTION]]

    def off_by_one_percent(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
        found, _ = plain(*arguments, **options)
        return found * 1.01, None

    monkeypatch.setitem(known, PACKED[WIDE_ATTENTION], off_by_one_percent)
    assert not learner(tmp_path, {}, dtype="bfloat16")._forward.packed


def test_a_call_for_several_sequences_has_few_queries_and_keys() -> None:
    batch = [one.tokens for one in sequences(prompt=15_000, longest=900)]
    made = layout.packed(batch)
    packing = Packing.of(made, torch.device("cpu"))
    found = [block.keys for block in packing.blocks if isinstance(block.keys, Tensor)]
    assert found
    for block in packing.blocks:
        if block.mask is not None:
            rows = 1 if isinstance(block.queries, slice) else len(block.queries)
            assert rows * block.mask.shape[2] <= AT_ONCE
            assert rows == 1 or rows * block.mask.shape[3] <= KEYS_AT_ONCE
    assert packing.varlen.cuts[0][-1] == len(made.ids)
    assert packing.varlen.cuts[1][-1] == sum(map(len, batch))


def test_a_gpu_computes_all_sequences_by_one_call_of_flash_attention() -> None:
    """With fake tensors: what goes into the kernel and what comes out, not its numbers."""
    made = layout.packed([one.tokens for one in sequences()])
    packing = Packing.of(made, torch.device("cpu"))
    length = len(made.ids)
    with FakeTensorMode(allow_non_fake_inputs=True):
        query = torch.empty(1, 4, length, 32, device="cuda", dtype=torch.bfloat16)
        key = torch.empty(1, 2, length, 32, device="cuda", dtype=torch.bfloat16)
        inner = sdpa_attention_forward
        found, _ = packed_attention.packed_attention(
            inner, torch.nn.Module(), query, key, key, None, packing=packing, scaling=0.25
        )
    assert (found.shape, found.dtype) == ((1, length, 4, 32), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch sees none")
def test_on_a_gpu_flash_attention_gives_the_logprobs_of_padded_sequences(tmp_path: Path) -> None:
    one = learner(
        tmp_path, CONFIGS["grouped"], dtype="bfloat16", engine={"use": "vllm"},
        training={"device": "cuda"},
    )  # fmt: skip
    assert one._forward.packed
    padded, packed = (numbers(one, sequences(), packed=packed)[0] for packed in (False, True))
    assert float((packed - padded).abs().mean()) <= 0.01
