"""Loading a causal language model from a folder, and reading its logits where they are needed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from services.errors import UsageError
from trainer.collate import Inputs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""By the recipe's name."""


def load_model(folder: Path, seed: int) -> Any:
    """The folder's model in float32: its weights where there are any, else random by `seed`.

    UsageError where transformers can't make a model of the folder, or its weights are not whole.
    """
    torch.manual_seed(seed)
    try:
        if any(folder.glob("*.safetensors")):
            read: Any = AutoModelForCausalLM.from_pretrained
            model, found = read(
                folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
            if missing := sorted(found["missing_keys"]):
                raise ValueError(f"its weights lack {', '.join(missing[:3])}")
            return model
        configuration = AutoConfig.from_pretrained(folder, local_files_only=True)
        make: Any = AutoModelForCausalLM.from_config
        return make(configuration, dtype=torch.float32)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"model folder {folder} can't be loaded: {error}") from error


def import_model(folder: Path) -> None:
    """Imports the code of the folder's model, which transformers does only as one is made.

    Nothing where it knows no such model.
    """
    with suppress(OSError, ValueError, KeyError):
        configuration = AutoConfig.from_pretrained(folder, local_files_only=True)
        MODEL_FOR_CAUSAL_LM_MAPPING[type(configuration)]


def weights_file(model: Any, dtype: torch.dtype) -> bytes:
    """A model's weights as a safetensors file; floats in `dtype`, tied tensors once."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            kept = tensor.to(dtype) if tensor.is_floating_point() else tensor
            tensors[name] = kept.contiguous().cpu()
    return save(tensors, metadata={"format": "pt"})


def pick_device(name: str) -> torch.device:
    """The device of that name; `auto` is a GPU where there is one. UsageError for an absent one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"training.device {name!r}: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"training.device {name!r}: torch sees no GPU; use `cpu` or `auto`")
    return device


class ChosenLogits:
    """Runs a causal LM so that only chosen places pass its head, the widest layer by far."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._inputs: Inputs | None = None
        model.get_output_embeddings().register_forward_pre_hook(self._choose)

    def __call__(self, inputs: Inputs) -> Tensor:
        """[N, V]: what the model expects at each trained token."""
        self._inputs = inputs
        try:
            logits: Tensor = self._model(input_ids=inputs.ids, use_cache=False).logits
        finally:
            self._inputs = None
        return logits.squeeze(0)

    def _choose(self, module: Any, hidden: tuple[Tensor]) -> tuple[Tensor] | None:
        inputs = self._inputs
        return None if inputs is None else (hidden[0][inputs.rows, inputs.before].unsqueeze(0),)
