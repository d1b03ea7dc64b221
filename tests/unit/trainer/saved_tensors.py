"""Counts the bytes that torch keeps between a forward pass and its backward pass."""

from __future__ import annotations

import weakref
from types import TracebackType

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Kept:
    """A tensor that autograd has saved. It counts until autograd drops it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SavedTensors:
    """The most bytes that were saved at once, without parameters. A storage counts once."""

    def __init__(self) -> None:
        self.most = 0
        self._now = 0
        self._uses: dict[int, tuple[int, int]] = {}
        """Number of uses and bytes of each storage, by its address."""
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        whole = tensor._base if tensor._is_view() else tensor
        if isinstance(whole, torch.nn.Parameter):
            return kept
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        uses, _ = self._uses.get(address, (0, 0))
        self._uses[address] = uses + 1, size
        if not uses:
            self._now += size
            self.most = max(self.most, self._now)
        weakref.finalize(kept, self._drop, address)
        return kept

    def _drop(self, address: int) -> None:
        uses, size = self._uses.pop(address)
        if uses > 1:
            self._uses[address] = uses - 1, size
        else:
            self._now -= size

    def _unpack(self, kept: _Kept) -> Tensor:
        return kept.tensor
