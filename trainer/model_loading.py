"""Loads a causal language model from a folder, adds adapters, and writes the weights that learn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from headrace.errors import BlobError, UsageError
from headrace.schemas.recipe.policy import Lora, Policy
from headrace.services.models.even_rounding import WIDE_ATTENTION
from headrace.services.models.lora import adapter_tensors, attach, base_tensors, start
from headrace.services.models.torch_models import DTYPES, overwrite, pick_device, read_config
from headrace.services.models.weights import ADAPTER, weights_digest
from headrace.trainer.forward.activation_checkpointing import checkpoint_layers


def load_model(folder: Path, seed: int, attention: str = WIDE_ATTENTION) -> Any:
    """Loads the folder's model in float32, with that implementation of attention.

    If the folder has no weights, they are random by `seed`. Raises UsageError if transformers can't
    make a model of the folder, or if its weights are damaged or incomplete.
    """
    torch.manual_seed(seed)
    try:
        if any(folder.glob("*.safetensors")):
            read: Any = AutoModelForCausalLM.from_pretrained
            model, found = read(
                folder,
                dtype=torch.float32,
                attn_implementation=attention,
                local_files_only=True,
                output_loading_info=True,
                trust_remote_code=False,
            )
            if missing := sorted(found["missing_keys"]):
                raise ValueError(f"its weights lack {', '.join(missing[:3])}")
            return model
        configuration = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        make: Any = AutoModelForCausalLM.from_config
        return make(configuration, dtype=torch.float32, attn_implementation=attention)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UsageError(
            f"model folder {folder} can't be loaded: {error}. Check its config.json and its "
            f"safetensors files"
        ) from error


def position_limit(model: Any) -> int | None:
    """Returns the most tokens of a sequence if the model has a table of positions, as GPT-2 has.

    None if positions are computed: such a model reads sequences of any length.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    tables = [
        # OPT, for example, leaves the first two rows of its table unused.
        module.num_embeddings - int(getattr(module, "offset", 0))
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) and module is not model.get_input_embeddings()
    ]
    return int(limit) if limit in tables else None


def import_model(folder: Path) -> None:
    """Imports the code of the folder's model, which transformers otherwise does on first use.

    Does nothing if transformers does not have such a model: `load_model` reports that.
    """
    with suppress(UsageError, KeyError):
        MODEL_FOR_CAUSAL_LM_MAPPING[type(read_config(folder))]


@dataclass(frozen=True, slots=True)
class FrozenBase:
    """The frozen weights that an adapter belongs to."""

    file: Callable[[], bytes]
    """Returns the weights as a safetensors file, always the same bytes. Thread-safe."""
    digest: bytes
    """`weights_digest` of the file."""
    targets: tuple[str, ...]
    """The full names of the layers that have an adapter."""


def add_adapter(model: Any, folder: Path, lora: Lora, seed: int, dtype: torch.dtype) -> FrozenBase:
    """Freezes a model in `dtype` and adds a LoRA adapter in float32 (arXiv 2106.09685).

    The adapter is version 0: the one in the folder's file `ADAPTER`, or else one that is random by
    `seed` and adds nothing yet. Raises UsageError if the recipe's targets or the folder's adapter
    do not fit the model.
    """
    model.requires_grad_(False)
    for parameter in model.parameters():
        # Buffers stay in float32, as they do in the engines.
        parameter.data = parameter.data.to(dtype)
    try:
        targets = attach(model, lora.targets, lora.rank, lora.alpha, torch.float32)
        start(model, seed)
        if (folder / ADAPTER).exists():
            _read_adapter(model, folder / ADAPTER)
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(f"the adapter does not fit model folder {folder}: {error}") from error
    file = partial(weights_file, base_tensors(model), dtype)
    return FrozenBase(file, weights_digest(file()), targets)


def _read_adapter(model: Any, path: Path) -> None:
    try:
        overwrite(adapter_tensors(model), load_file(path))
    except BlobError as error:
        raise ValueError(
            f"{path.name} has other layers, or another rank, than the recipe's `lora`. Change "
            f"`lora.targets` or `lora.rank`: {error}"
        ) from error


def attention_of(policy: Policy) -> str:
    """Returns the attention that a policy trains with, as transformers names it.

    It is that of the policy's engine: the torch engine, and vLLM on a CPU, compute it in a dtype
    that is wider than bfloat16.
    """
    on_cpu = policy.training is not None and pick_device(policy.training.device).type == "cpu"
    return WIDE_ATTENTION if on_cpu or policy.engine.use == "torch" else "sdpa"


def prepare_layers(model: Any, policy: Policy) -> None:
    """Turns on activation checkpointing if the recipe says so."""
    if policy.training is not None and policy.training.activation_checkpointing:
        checkpoint_layers(model)


def load_policy(folder: Path, policy: Policy) -> tuple[Any, FrozenBase | None]:
    """Loads version 0 of a policy: its model, and its frozen base if it has an adapter.

    Raises UsageError if the folder or the recipe's settings can't be used.
    """
    model = load_model(folder, policy.seed, attention_of(policy))
    prepare_layers(model, policy)
    if policy.lora is None:
        return model, None
    return model, add_adapter(model, folder, policy.lora, policy.seed, DTYPES[policy.dtype])


def initial_weights(folder: Path, policy: Policy) -> bytes:
    """Returns version 0 of a policy that has no adapter, as `weights_file`."""
    return weights_file(load_model(folder, policy.seed).state_dict(), DTYPES[policy.dtype])


def trained_weights(model: Any, dtype: torch.dtype) -> bytes:
    """Returns a model's adapter, or else the whole model, as `weights_file`."""
    return weights_file(trained_tensors(model), dtype)


def trained_tensors(model: Any) -> dict[str, Tensor]:
    """Returns the tensors of a model's adapter, or else of the whole model, by name.

    They are the model's own: a tied one is the same under each of its names.
    """
    return adapter_tensors(model) or model.state_dict(keep_vars=True)


def weights_file(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> bytes:
    """Returns tensors as a safetensors file. Floats are in `dtype`; tied tensors are written once.

    A tied tensor has the first of its names.
    """
    written: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            kept = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()
            written[name] = kept.contiguous().cpu()
    return save(written, metadata={"format": "pt"})
