"""The state that a learner continues from: copied in memory, or saved as a checkpoint.

One process writes a safetensors file. Several write one folder together, each its own shards, in
the format of `torch.distributed.checkpoint`. Either can be loaded by any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor, distribute_tensor

from headrace.errors import BlobError, DependencyError, UsageError
from headrace.services.models.torch_models import check_fit, overwrite
from headrace.trainer.critic.critic import Critic
from headrace.trainer.forward.master_weights import MasterWeights
from headrace.trainer.forward.reference import Reference, digest_tensor
from headrace.trainer.model_loading import FrozenBase
from headrace.trainer.optimizer_state import above, optimizer_tensors, restore_optimizer, under
from headrace.trainer.ranks.ranks import Ranks, own_part


@dataclass
class LearnerState:
    """All that training changes. The version and the offset in the log are not part of it."""

    model: Any
    masters: MasterWeights
    optimizer: torch.optim.Optimizer
    critic: Critic | None
    reference: Reference | None
    base: FrozenBase | None
    device: torch.device
    ranks: Ranks
    updates_done: int = 0

    def save(self, path: Path) -> None:
        """Writes all of it to a file, or to a folder if there are several ranks.

        Raises OSError if the disk can't take it.
        """
        try:
            if self.ranks.several:
                with self.ranks.noticing():
                    save_shards(self._tensors(), checkpoint_id=path)
            else:
                save_file(_on_cpu(self._tensors()), path)
        except SafetensorError as error:  # The library raises it for a full disk.
            raise OSError(f"{path}: {error}") from error
        except CheckpointException as error:
            raise OSError(f"{path}: {'; '.join(map(str, error.failures.values()))}") from error

    def load(self, path: Path) -> None:
        """Restores what `save` wrote, in whatever number of processes.

        Raises UsageError if it is of another model or base, or of another version 0 and the loss
        has a KL divergence from it, and DependencyError if a shard can't be read.
        """
        if not path.is_dir():
            self._restore({name: self._like(name, one) for name, one in load_file(path).items()})
            return
        try:
            self._restore(self._read_shards(path))
        except (CheckpointException, OSError) as error:
            raise DependencyError(
                f"rank {self.ranks.rank} can't read the checkpoint {path}: {error}. All machines "
                "of a trainer need the same --state folder"
            ) from error

    def _read_shards(self, path: Path) -> dict[str, Tensor]:
        found = FileSystemReader(path).read_metadata().state_dict_metadata
        tensors = {
            name: self._like(name, torch.zeros(kind.size, dtype=kind.properties.dtype))
            for name, kind in found.items()
            if isinstance(kind, TensorStorageMetadata)
        }
        with self.ranks.noticing():
            load_shards(tensors, checkpoint_id=path, no_dist=not self.ranks.several)
        return tensors

    def copied(self) -> Callable[[], None]:
        """Copies it to the CPU. Returns what restores the copy."""
        tensors = self._tensors()
        copies = _on_cpu(tensors, copied=True)

        def restore() -> None:
            self._restore({name: _in_place_of(tensors[name], one) for name, one in copies.items()})

        return restore

    def _tensors(self) -> dict[str, Tensor]:
        """Returns model, optimizer, warmup and random state by name. A frozen base is its digest.

        The tensors may share the learner's memory. Those of several ranks are DTensors.
        """
        state = self._trained()
        state |= above("optimizer", optimizer_tensors(self.optimizer))
        if self.critic is not None:
            state |= above("critic", self.critic.state())
        state["random"] = torch.get_rng_state()
        state["updates_done"] = torch.tensor(self.updates_done)
        if self.reference is not None:
            state |= self.reference.state()
        if self.device.type == "cuda":
            state["random.cuda"] = torch.cuda.get_rng_state(self.device)
        return {name: tensor.detach() for name, tensor in state.items()}

    def _trained(self) -> dict[str, Tensor]:
        """Returns the tensors that the optimizer changes, and those that identify the model."""
        state = {f"model.{name}": one for name, one in self.masters.by_name.items()}
        if self.base is None:
            return state | {f"buffer.{name}": one for name, one in self.model.named_buffers()}
        return state | {"base": digest_tensor(self.base.digest)}

    def _like(self, name: str, tensor: Tensor) -> Tensor:
        """Returns a whole tensor of a checkpoint, or this rank's shard of it."""
        kind, _, rest = name.partition(".")
        own: Tensor | None = self.masters.by_name.get(rest) if kind == "model" else None
        if kind == "optimizer" and tensor.ndim:
            own = list(self.masters.by_name.values())[int(rest.partition(".")[0])]
        if not isinstance(own, DTensor) or own.shape != tensor.shape:
            return tensor
        # Each rank has the whole tensor, so nothing is sent.
        shard = distribute_tensor(tensor, own.device_mesh, own.placements, src_data_rank=None)
        return _in_place_of(own, shard.to_local())

    def _restore(self, tensors: dict[str, Tensor]) -> None:
        own = self._trained()
        kinds = ("model.", "buffer.", "base")
        given = {name: one for name, one in tensors.items() if name.startswith(kinds)}
        try:
            check_fit(own, given)
        except BlobError as error:
            raise UsageError(
                f"the checkpoint is of another model than the recipe's: {error}. Use the recipe of "
                f"the run that wrote it, or start a new namespace"
            ) from error
        if self.base is not None and not torch.equal(own["base"], given["base"]):
            raise UsageError(
                "the checkpoint's adapter is of another base than the recipe's model. Restore the "
                "weights that the run started with, or start a new namespace"
            )
        if self.reference is not None:
            self.reference.check(tensors)
        overwrite(own, given)
        self.masters.update_copies()
        self.ranks.reshard()
        restore_optimizer(self.optimizer, under("optimizer", tensors))
        if self.critic is not None:
            self.critic.restore(under("critic", tensors))
        torch.set_rng_state(tensors["random"].cpu())
        if self.device.type == "cuda" and "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"].cpu(), self.device)
        self.updates_done = int(tensors["updates_done"])


def _on_cpu(tensors: Mapping[str, Tensor], copied: bool = False) -> dict[str, Tensor]:
    """Returns this rank's parts of tensors on the CPU. They may share memory, unless `copied`."""
    # One copy: from a GPU, `to` makes it anyway.
    return {
        name: own_part(tensor).to("cpu", copy=copied).contiguous()
        for name, tensor in tensors.items()
    }


def _in_place_of(tensor: Tensor, part: Tensor) -> Tensor:
    """Returns this rank's part as a tensor that is sharded as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return part
    # `DTensor.from_local` would move the part to the mesh's device, where `offload` has no shards.
    made = torch.empty_like(tensor)
    own_part(made).copy_(part)
    return made
