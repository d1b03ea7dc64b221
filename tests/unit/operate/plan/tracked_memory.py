"""Tracks the bytes of all tensors that live at the same time, and the most there were."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TrackedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts each storage once, from the operation that makes it until nothing refers to it.

    What a kernel allocates inside itself is not counted.
    """

    def __init__(self, before: Iterable[Tensor]) -> None:
        """`before` are the tensors that there are already."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        for one in before:
            self._add(one)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor):
                self._add(one)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.now -= size
