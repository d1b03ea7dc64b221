"""The engines that run a model, and the models of the tests of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from headrace.services.inference.engine import Engine, EngineSetup, Weights
from headrace.services.inference.engines.engine_thread import ThreadedEngine
from headrace.services.inference.engines.row import AnyRow, Outcome
from headrace.services.inference.engines.torch_engine import TorchEngine

MakeEngine = Callable[..., Engine]

needs_vllm = (
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: `make test-vllm`"),
)
needs_gpu = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch sees none"),
)
VLLM = [
    pytest.param("vllm", marks=needs_vllm),
    # Its model is in two ranks. Their start takes half a minute.
    pytest.param("vllm-tp2", marks=(*needs_vllm, pytest.mark.long)),
    pytest.param("vllm-cuda", marks=(*needs_vllm, *needs_gpu)),
]
"""vLLM's build must be for the device."""
KINDS = ["torch", pytest.param("torch-cuda", marks=needs_gpu), *VLLM]
"""The engine, and its device if that is not the CPU."""
DRIVE_S = 540.0
"""Bound of a test, less than that of faulthandler. vLLM's start takes minutes on a busy machine."""
NARROW = [
    "torch-bfloat16",
    pytest.param("torch-cuda-bfloat16", marks=needs_gpu),
    pytest.param("vllm-bfloat16", marks=needs_vllm),
    pytest.param("vllm-tp2-bfloat16", marks=(*needs_vllm, pytest.mark.long)),
    pytest.param("vllm-cuda-bfloat16", marks=(*needs_vllm, *needs_gpu)),
]
"""The same in bfloat16."""


def dtype_of(kind: str) -> torch.dtype:
    """The dtype of the weights that an engine of `KINDS` or `NARROW` serves."""
    return torch.bfloat16 if kind.endswith("-bfloat16") else torch.float32


def make_engine_of(
    kind: str, model: Path, slots: int, *, adapters: int = 0, rank: int = 0, **options: Any
) -> Engine:
    name, *words = kind.split("-")
    device = "cuda" if "cuda" in words else "cpu"
    dtype = str(dtype_of(kind)).removeprefix("torch.")
    if "tp2" in words:
        options["tensor_parallel_size"] = 2
    setup = EngineSetup(
        model, slots, device=device, dtype=dtype, options=options, adapters=adapters, rank=rank
    )
    if name == "torch":
        return TorchEngine(setup)
    # Imported here: it takes seconds, and need not be installed.
    from headrace.services.inference.engines.vllm_engine import VllmEngine

    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("on a machine with a GPU vLLM is built for it")
    return VllmEngine(setup)


def drive(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs an asynchronous test, in bounded time."""
    asyncio.run(asyncio.wait_for(main(), DRIVE_S))


def hold(engine: Engine, *steps: int) -> None:
    """Has the engine wait, before these steps from now, until weights are brought to it; and
    weights, until the first of these steps is there.

    However busy the machine, they come while what is under way is under way. The scripted engine
    draws by a clock, and isn't held.
    """
    if not isinstance(engine, ThreadedEngine):
        return
    advance, load, done, change = engine._advance, engine.load, 0, engine._changing
    there = threading.Event()

    def step(joining: list[AnyRow]) -> list[Outcome]:
        nonlocal done, change
        if done in steps:
            there.set()
            given_up = time.monotonic() + 60
            while engine._changing is change and time.monotonic() < given_up:
                time.sleep(0.001)
            change = engine._changing
        done += 1
        return advance(joining)

    async def bring(weights: Weights) -> None:
        await asyncio.to_thread(there.wait, 60)
        await load(weights)

    engine._advance = step  # type: ignore[method-assign]
    engine.load = bring  # type: ignore[method-assign]


def slow(engine: Engine) -> None:
    """Has every step of the engine take a millisecond and more, however quick the machine."""
    if not isinstance(engine, ThreadedEngine):
        return
    advance = engine._advance

    def step(joining: list[AnyRow]) -> list[Outcome]:
        time.sleep(0.001)
        return advance(joining)

    engine._advance = step  # type: ignore[method-assign]


def make_model(folder: Path, **settings: Any) -> Path:
    """Configuration and two versions of weights, sharp enough that greedy draws are no ties."""
    config = transformers.LlamaConfig(
        **{
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "initializer_range": 0.3,
            "tie_word_embeddings": False,
        }
        | settings
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    for version in (0, 1):
        torch.manual_seed(version)
        state = transformers.LlamaForCausalLM(config).state_dict()
        save_file(state, folder / f"{version}.safetensors")
    return folder
