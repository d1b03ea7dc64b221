"""Version 0 of a policy, which a KL divergence holds the policy near."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from headrace.errors import UsageError
from headrace.trainer.ranks.ranks import ALONE, Ranks, own_part

DIGEST = "version_0"
"""The tensor of a checkpoint with the digest of version 0's weights."""


def digest_tensor(digest: bytes) -> Tensor:
    """Returns a digest as it is in a checkpoint: [32] uint8."""
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


class Reference:
    """A copy of the weights that learn, as they are in version 0."""

    def __init__(self, learning: Sequence[Tensor], digest: bytes, ranks: Ranks = ALONE) -> None:
        """`learning` are the tensors in the model. `digest` is that of version 0's weights."""
        self._learning = learning
        self._ranks = ranks
        self._first = [own_part(one.detach()).clone() for one in learning]
        self._digest = digest_tensor(digest)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Exchanges the weights that learn for those of version 0.

        One process copies nothing. Several copy their shards, because FSDP refers to their memory.
        """
        if self._ranks.several:
            self._exchange()
            try:
                yield
            finally:
                self._exchange()
            return
        own = [one.data for one in self._learning]
        try:
            for parameter, first in zip(self._learning, self._first, strict=True):
                parameter.data = first
            yield
        finally:
            for parameter, data in zip(self._learning, own, strict=True):
                parameter.data = data

    def _exchange(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # With `offload`, a GPU may still copy shards of the forward pass before.
            torch.cuda.synchronize()
        with torch.no_grad():
            for parameter, first in zip(self._learning, self._first, strict=True):
                own = own_part(parameter)
                kept = own.clone()
                own.copy_(first)
                first.copy_(kept)
        self._ranks.reshard()

    def state(self) -> dict[str, Tensor]:
        """Returns what a checkpoint records: the digest, not the weights."""
        return {DIGEST: self._digest}

    def check(self, tensors: dict[str, Tensor]) -> None:
        """Raises UsageError if a checkpoint is of a run with another version 0.

        A checkpoint of an earlier release, or of a run without a KL divergence, does not say it.
        """
        recorded = tensors.get(DIGEST)
        if recorded is not None and not torch.equal(self._digest, recorded):
            raise UsageError(
                "the model has other weights than when the run started, and training compares "
                "the policy with those of the start (training.kl_coefficient, or its loss). "
                "Restore the model folder that the run started with, or start a new namespace"
            )
