"""What the processes that train one model exchange. Each process is a rank, from 0 on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from headrace.errors import DependencyError, UsageError
from headrace.services.models.even_rounding import round_evenly
from headrace.trainer.sequences import Stopped, UnusableBatch

T = TypeVar("T")


class Ranks:
    """What this process is among those that train one model. One process alone exchanges nothing.

    All ranks must call the same methods in the same sequence: each call waits for the others. If
    another rank is gone or does not answer in time, a call raises DependencyError.
    """

    def __init__(self, rank: int = 0, size: int = 1, explain: Callable[[], str] = str) -> None:
        """`explain` says which ranks do not answer, after a call has failed."""
        self.rank = rank
        self.size = size
        self._explain = explain
        self._sharded: list[FSDPModule] = []

    @property
    def several(self) -> bool:
        """Whether there are other ranks."""
        return self.size > 1

    def shard(
        self, model: Any, dtype: torch.dtype, device: torch.device, offload: bool = False
    ) -> None:
        """Keeps 1 / `size` of each of the model's parameters in this process, on the device.

        The model has the same float32 weights in each rank. A layer is put together in `dtype`
        when it computes, so on the numbers that are published, and it rounds as in one process.
        Gradients are added up over the ranks in float32. Raises UsageError if transformers does not
        name the model's layers.

        With `offload`, shards and their gradients stay in the host's memory. One process then
        leaves the model where it is, for `MasterWeights`.
        """
        if not self.several:
            if not offload:
                model.to(device)
            return
        mesh = init_device_mesh(device.type, (self.size,))
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # as one process computes
        )
        layers = set(model._no_split_modules or ())
        named = [one for one in model.modules() if type(one).__name__ in layers]
        inside = {id(part) for one in named for part in one.modules() if part is not one}
        chosen = [one for one in named if id(one) not in inside]
        if not chosen:  # Without layers of its own, FSDP2 would reduce no gradient.
            raise UsageError(
                f"training.processes: transformers does not say what the layers of a "
                f"{type(model).__name__} are, so it can't be divided. Set it to 1"
            )
        kept = CPUOffloadPolicy(device.type != "cpu") if offload else OffloadPolicy()
        for module in (*chosen, model):
            fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=kept)
            # The weights of the tokens are those of the whole update, so the sum is the gradient.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        round_evenly(model, dtype)
        self._sharded = [*chosen, model]

    def reshard(self) -> None:
        """Drops what is put together of the model. Call it after each change of the weights."""
        for module in self._sharded:
            module.reshard()

    def sum(self, tensor: Tensor) -> Tensor:
        """Replaces the tensor with its sum over all ranks, and returns it."""
        if self.several:
            with self.noticing():
                dist.all_reduce(tensor)
        return tensor

    def gather(self, item: T) -> list[T]:
        """Returns the items of all ranks, in their order. They must be picklable."""
        if not self.several:
            return [item]
        found: list[Any] = [None] * self.size
        with self.noticing():
            dist.all_gather_object(found, item)
        return found

    def together(self, work: Callable[[], T]) -> T:
        """Does work that only this rank may fail in. Fails in all ranks if it fails in one.

        Raises the first rank's UnusableBatch or Stopped.
        """
        if not self.several:
            return work()
        failed: list[UnusableBatch | Stopped] = []
        made: list[T] = []
        try:
            made.append(work())
        except (UnusableBatch, Stopped) as error:
            failed.append(error)
        if self.sum(torch.tensor(len(failed))):
            raise next(errors[0] for errors in self.gather(failed) if errors)
        return made[0]

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Turns torch's errors about other ranks into DependencyErrors that name them."""
        try:
            yield
        except RuntimeError as error:
            if not self.several:
                raise
            raise self.failure(error) from error

    def failure(self, error: BaseException) -> DependencyError:
        """Returns an error that says which ranks do not answer."""
        text = " ".join(str(error).split())[:300]
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in text:
            return DependencyError(
                f"rank {self.rank} of {self.size} is out of memory, so all ranks end. They meet "
                "the same batch again. If it fails again, start a new namespace with a lower "
                f"training.max_tokens or more processes. The error was: {text}"
            )
        return DependencyError(
            f"rank {self.rank} of {self.size} can't go on: {self._explain()}. All ranks end, and "
            f"continue from the newest checkpoint. The error was: {text}"
        )


ALONE = Ranks()
"""A process that trains by itself."""


def whole_tensor(tensor: Tensor) -> Tensor:
    """Returns a tensor that was sharded over the ranks, or the tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor. It shares the tensor's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
