"""Version 0 of a policy, which a KL divergence holds the policy near."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from headrace.errors import UsageError
from headrace.services.models.weights import weights_digest

DIGEST = "version_0"
"""The tensor of a checkpoint with the digest of version 0's weights."""


def digest_tensor(digest: bytes) -> Tensor:
    """Returns a digest as it is in a checkpoint: [32] uint8."""
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


class Reference:
    """A copy of the weights that learn, as they are in version 0."""

    def __init__(self, learning: Sequence[Tensor], weights: bytes) -> None:
        """`learning` are the tensors in the model. `weights` is version 0 as it is published."""
        self._learning = learning
        self._first = [one.detach().clone() for one in learning]
        self._digest = digest_tensor(weights_digest(weights))

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Exchanges the weights that learn for those of version 0. Nothing is copied."""
        own = [one.data for one in self._learning]
        try:
            for parameter, first in zip(self._learning, self._first, strict=True):
                parameter.data = first
            yield
        finally:
            for parameter, data in zip(self._learning, own, strict=True):
                parameter.data = data

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
                "the model has other weights than when the run started, and "
                "training.kl_coefficient holds the policy near those of the start. Restore the "
                "model folder that the run started with, or start a new namespace"
            )
