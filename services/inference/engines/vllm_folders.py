"""Makes the folders from which vLLM reads models and adapters, as Transformers and PEFT do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headrace.services.inference.engine import AdapterWeights
from headrace.services.models.weights import ADAPTER


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
    config = {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": list(adapter.targets),
    }
    with TemporaryDirectory(prefix="headrace-adapter-") as folder:
        (Path(folder) / "adapter_config.json").write_text(json.dumps(config))
        (Path(folder) / ADAPTER).symlink_to(weights.absolute())
        yield folder
