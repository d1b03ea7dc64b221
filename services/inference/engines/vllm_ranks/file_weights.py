"""Brings new weights to a rank by the path of a file: a backend of vLLM's weight transfer.

The worker has pulled the file and checked its digest, names and shapes before. Each rank maps it
into memory, and vLLM's loader of the model copies the rank's shard out of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

FILE_BACKEND = "headrace-file"
"""The name of this backend among those of vLLM."""


@dataclass
class FileInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be set up."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The weights of one version."""

    path: str
    """A safetensors file with all tensors of the model, under the trainer's names."""


class FileWeights(WeightTransferEngine[FileInit, FileUpdate]):  # type: ignore[misc]
    """Loads a rank's shard from a file that all ranks can read."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Does nothing: nobody connects to anybody."""

    def start_weight_update(self) -> None:
        """Has vLLM take weights as a checkpoint has them, layer by layer."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Loads the rank's shard of each tensor."""
        with safe_open(update_info.path, framework="pt") as file:
            self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

    def finish_weight_update(self) -> None:
        """Brings the weights into the form that vLLM's kernels read."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Does nothing: nothing is open between two updates."""
