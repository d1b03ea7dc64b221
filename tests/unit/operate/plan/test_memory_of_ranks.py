"""The planner's formulas for several ranks, compared with the memory of processes that train."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.schemas.recipe.policy import Policy
from headrace.services.models.weights import model_folder
from headrace.services.operate.plan.memory_parts import TrainerMemory
from headrace.services.operate.plan.model_shape import read_shape

PROGRAM = Path(__file__).with_name("rank_memory.py")
BOUND_S = 280
LENGTH = 128
"""Tokens of a sequence."""
SIZES: dict[str, dict[str, Any]] = {
    "deep": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8,
             "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 4000},
    "words": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
              "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 40_000},
}  # fmt: skip
SIZES["tied"] = SIZES["words"] | {"tie_word_embeddings": True}
CHECKPOINTED = {"activation_checkpointing": True}
# A recipe refuses `offload` on a CPU that it names.
OFFLOADED = {"device": "auto", "offload": True}
CASES: list[tuple[str, int, str, dict[str, Any]]] = [
    ("deep", 2, "float32", {"max_tokens": 512}),
    ("deep", 2, "bfloat16", {"max_tokens": 512, **CHECKPOINTED}),
    ("deep", 2, "bfloat16", {"max_tokens": 512, **OFFLOADED}),
    ("words", 2, "float32", {"max_tokens": 256}),
    ("words", 4, "bfloat16", {"max_tokens": 256, **CHECKPOINTED}),
    ("tied", 2, "float32", {"max_tokens": 256}),
]
"""Model, ranks, dtype, and keys of `training`."""


def made(folder: Path, size: str) -> Path:
    """A model folder with random weights."""
    folder.mkdir()
    config = {"model_type": "llama", "max_position_embeddings": 256, **SIZES[size]}
    (folder / "config.json").write_text(json.dumps(config))
    make: Any = AutoModelForCausalLM.from_config
    make(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).save_pretrained(folder)
    shutil.copyfile(model_folder("tiny-llama") / "tokenizer.json", folder / "tokenizer.json")
    return folder


def peaks(policy: dict[str, Any], ranks: int) -> list[int]:
    """The most bytes that each rank takes while it trains."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    exact = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    rest = (str(ranks), str(port), json.dumps(policy), str(LENGTH))
    started = [
        subprocess.Popen(
            (sys.executable, str(PROGRAM), str(rank), *rest),
            stdout=subprocess.PIPE, text=True, env=os.environ | exact,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [one.communicate(timeout=BOUND_S)[0] for one in started]
        assert [one.returncode for one in started] == [0] * ranks
    finally:
        for one in started:
            one.kill()
    return [int(one) for one in said]


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(("size", "ranks", "dtype", "training"), CASES, ids=str)
def test_a_plan_of_several_ranks_is_right_within_fifteen_percent(
    tmp_path: Path, size: str, ranks: int, dtype: str, training: dict[str, Any]
) -> None:
    folder = made(tmp_path / "model", size)
    keys = {"model": str(folder), "dtype": dtype, "training": {"device": "cpu", **training}}
    memory = TrainerMemory(Policy.model_validate(keys), read_shape(folder), ranks, on_gpu=False)
    # With `offload` the host is the same CPU.
    planned = memory.total + sum(memory.host_parts().values())
    for rank, taken in enumerate(peaks(keys, ranks)):
        print(f"rank {rank}: {taken / 2**20:.0f} MiB, planned {planned / taken:.3f} of it")
        assert planned == pytest.approx(taken, rel=0.15)
