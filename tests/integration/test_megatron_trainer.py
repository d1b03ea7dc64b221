"""The trainer on Megatron-Core, in two processes with gloo: its numbers, and its weights."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from headrace.infra import local
from headrace.schemas.recipe.policy import Policy
from headrace.services.inference.engine import EnginePrompt, EngineSetup, Weights
from headrace.services.inference.engines.torch_engine import TorchEngine
from headrace.services.models.weights import model_folder
from headrace.trainer.learner import Learner
from headrace.trainer.sequences import UpdateBatch
from tests.integration.megatron_ranks import EXAMPLES, UPDATES, batch, example
from tests.integration.test_trainer_kit import learn_the_quickstart, try_trainer

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None,
        reason="megatron-core is not installed: `pip install megatron-core==0.16.1`",
    ),
]
TRAINER = EXAMPLES / "megatron_trainer" / "trainer.py"
PROGRAM = Path(__file__).with_name("megatron_ranks.py")
BOUND_S = 300
SIZE: dict[str, Any] = {
    "vocab_size": 258, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZE),
    "qwen2": Qwen2Config(**SIZE),
    "qwen3": Qwen3Config(**SIZE, head_dim=16, tie_word_embeddings=True),
}


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A random model whose norms and biases are not those of the start."""
    torch.manual_seed(3)
    made: Any = AutoModelForCausalLM.from_config(MODELS[request.param])
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "bias" in name or "norm" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    made.save_pretrained(tmp_path / "model")
    tokenizer = model_folder("tiny-llama") / "tokenizer.json"
    (tmp_path / "model" / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    return tmp_path / "model"


def test_two_ranks_compute_what_other_trainers_do(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    arguments = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, *arguments, str(PROGRAM), str(model), str(tmp_path)],
        capture_output=True, text=True, timeout=BOUND_S, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    training = {"device": "cpu", "max_tokens": 64}
    ours = Learner(model, Policy.model_validate({"model": str(model), "training": training}))
    ours.train([UpdateBatch(list(batch(1).sequences), 0)])
    theirs = json.loads((tmp_path / "logprobs").read_text())
    differences = [
        np.abs(found - np.array(theirs[str(one.sample)])).max()
        for one, found in ours.start_logprobs
    ]
    print(f"logprobs differ by {max(differences):.1e} nats")
    assert len(differences) == len(theirs) > 4
    assert max(differences) < 1e-5

    whole = example("accelerate_trainer").GrpoTrainer(model, seed=0)
    for version in range(1, 1 + UPDATES):
        whole.update(batch(version))
    weights = load_file(tmp_path / "weights.safetensors")
    expected = whole.weights()
    assert weights.keys() == expected.keys()
    worst = max(float((weights[n] - expected[n].detach()).abs().max()) for n in expected)
    print(f"weights differ by {worst:.1e} after {UPDATES} updates")
    assert worst < 1e-4
    read_by_the_engine(model, tmp_path / "weights.safetensors", whole.model)


def test_it_keeps_the_contract(local_stack: local.LocalStack, tmp_path: Path) -> None:
    report = try_trainer(local_stack, tmp_path, 240, str(TRAINER))
    assert {one["verdict"] for one in report["rules"]} == {"pass"}, report


def test_it_learns_the_quickstart(
    local_stack: local.LocalStack, namespace: str, tmp_path: Path
) -> None:
    learn_the_quickstart(local_stack, namespace, tmp_path, TRAINER)


def read_by_the_engine(model: Path, file: Path, expected: Any) -> None:
    """The likeliest tokens are those of the model in transformers."""
    prompt = list(b"abcdefgh")

    async def generate() -> list[int]:
        engine = TorchEngine(EngineSetup(model, 2, device="cpu"))
        await engine.load(Weights("default", 1, file))
        output = await engine.generate(EnginePrompt("default", prompt, 12, temperature=0.0))
        await engine.close(1)
        return list(output.tokens)

    ids = torch.tensor([prompt])
    for _ in range(12):
        ids = torch.cat([ids, expected(ids).logits[:, -1:].argmax(-1)], 1)
    assert asyncio.run(generate()) == ids[0, len(prompt) :].tolist()
