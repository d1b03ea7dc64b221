"""Causal language models of other families than Llama, from a folder: trained and served alike."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.schemas.events import Sampling
from headrace.schemas.recipe.policy import Policy
from headrace.services.inference.engine import EngineOutput, EnginePrompt, EngineSetup, Weights
from headrace.services.inference.engines.torch_engine import TorchEngine
from headrace.services.models.weights import model_folder
from headrace.trainer.learner import Learner
from headrace.trainer.sequences import TokenSequence, UpdateBatch

PROMPT = [97, 98, 99, 100]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
NARROW = {"intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "qwen3": SMALL | NARROW | {"head_dim": 8, "tie_word_embeddings": True},
    "gpt_neox": SMALL | {"intermediate_size": 64, "max_position_embeddings": 128},
    "olmo2": SMALL | NARROW,
}


def a_model(folder: Path, family: str) -> Path:
    ends = {"bos_token_id": 257, "eos_token_id": 257, "pad_token_id": 256}
    tree = {"model_type": family, "vocab_size": 258} | FAMILIES[family] | ends
    (folder / "config.json").write_text(json.dumps(tree))
    shutil.copy(model_folder("tiny-llama") / "tokenizer.json", folder)
    return folder


def drawn(tokens: list[int], logprobs: list[float], advantage: float) -> TokenSequence:
    count = len(tokens)
    return TokenSequence(
        tokens=np.array([*PROMPT, *tokens]),
        positions=np.arange(len(PROMPT), len(PROMPT) + count),
        behaviour=np.array(logprobs, dtype=np.float32),
        advantages=np.full(count, advantage, dtype=np.float32),
        versions=np.zeros(count, dtype=np.int64),
        samplings=((Sampling(max_tokens=count, temperature=0.7), count),),
        demonstrated=np.zeros(count, dtype=np.bool_),
    )


async def served(folder: Path, weights: bytes, dtype: str) -> EngineOutput:
    engine = TorchEngine(EngineSetup(folder, 2, device="cpu", dtype=dtype))
    path = folder / "served.safetensors"
    path.write_bytes(weights)
    try:
        await engine.load(Weights("p", 0, path))
        return await engine.generate(EnginePrompt("p", PROMPT, max_tokens=20, temperature=0.7))
    finally:
        await engine.close(0)
        path.unlink()


@pytest.mark.parametrize(("dtype", "apart"), [("float32", 1e-8), ("bfloat16", 1e-3)])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_served_is_what_is_trained(
    tmp_path: Path, family: str, dtype: str, apart: float
) -> None:
    """The engine's logprobs are those of the trainer's own forward pass, and an update shows."""
    folder = a_model(tmp_path, family)
    training = {"learning_rate": 1e-2, "device": "cpu"}
    learner = Learner(
        folder,
        Policy.model_validate({"model": str(folder), "dtype": dtype, "training": training}),
    )
    before = learner.weights()
    said = asyncio.run(served(folder, before, dtype))
    assert len(said.tokens) == 20
    sequence = drawn(said.tokens, said.logprobs, 1.0)
    metrics = learner.train([UpdateBatch([sequence])])
    assert 0 <= metrics["kl"] < apart
    assert learner.weights() != before
