"""Loads version 0 so that each rank reads its own shard, and none holds the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.errors import BlobError
from headrace.schemas.recipe.policy import Policy
from headrace.services.models.torch_models import DTYPES
from headrace.services.models.weights import read_entries
from headrace.trainer.model_loading import FrozenBase, attention_of, load_policy, prepare_layers
from headrace.trainer.ranks.ranks import Ranks


def load_shards(
    folder: Path, policy: Policy, ranks: Ranks, device: torch.device
) -> tuple[Any, FrozenBase | None]:
    """Loads version 0 of a policy onto the device, sharded if there are several ranks.

    With `training.offload` the weights stay in the host's memory.

    A rank then reads only its own rows of each tensor, if the folder has each of the model's
    tensors once, under one of its own names. Otherwise it loads the whole model first. Returns what
    `load_policy` returns, and raises what it raises.
    """
    dtype = DTYPES[policy.dtype]
    offload = policy.training is not None and policy.training.offload
    if ranks.several and policy.lora is None:
        files = _files(folder)
        model = _empty_model(folder, policy) if files else None
        if model is not None and (stored := _stored_names(model, files)):
            prepare_layers(model, policy)
            ranks.shard(model.eval(), dtype, device, offload)
            _fill(model, files, stored, device, torch.device("cpu") if offload else device)
            return model, None
    whole, base = load_policy(folder, policy)
    ranks.shard(whole.eval(), dtype, device, offload)
    return whole, base


def _files(folder: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Returns the file and the shape of each tensor by name; none if a file is damaged."""
    try:
        return {
            name: (path, tuple(entry.shape))
            for path in sorted(folder.glob("*.safetensors"))
            for name, entry in read_entries(path).items()
        }
    except BlobError:
        return {}  # The usual way says what is wrong.


def _empty_model(folder: Path, policy: Policy) -> Any:
    """Returns a float32 model without memory for its parameters. Its buffers are real."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    make: Any = AutoModelForCausalLM.from_config
    with _parameters_on_meta():
        return make(config, dtype=torch.float32, attn_implementation=attention_of(policy))


def _stored_names(model: Any, files: Mapping[str, tuple[Path, tuple[int, ...]]]) -> dict[str, str]:
    """Returns the name that each parameter has in the files. A tied one has several in the model.

    Empty if the files do not have exactly the model's parameters, each of them once.
    """
    every = dict(model.named_parameters(remove_duplicate=False))
    stored = {id(every[name]): name for name in files if name in every}
    if (
        len(stored) != len(files)
        or set(stored) != set(map(id, every.values()))
        or any(tuple(every[name].shape) != files[name][1] for name in stored.values())
        or set(model.state_dict()) != set(every)
    ):
        return {}
    return {name: stored[id(one)] for name, one in model.named_parameters()}


def _fill(
    model: Any,
    files: Mapping[str, tuple[Path, tuple[int, ...]]],
    stored: Mapping[str, str],
    device: torch.device,
    home: torch.device,
) -> None:
    """Reads this rank's rows of each parameter. Parameters are at `home`, buffers on `device`."""
    buffers = {name: one.detach().clone() for name, one in model.named_buffers()}
    model.to_empty(device=home)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.data = buffers[name].to(device)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor), f"{name} is not sharded"
            local = parameter.to_local()
            _, (first, *_) = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            with safe_open(files[stored[name]][0], framework="pt") as file:
                local.copy_(file.get_slice(stored[name])[first : first + len(local)])


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Gives parameters that are made no memory. torch's own switch would do so to buffers, too."""
    plain = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        plain(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]
