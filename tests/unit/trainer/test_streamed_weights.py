"""Streamed weights are, byte by byte, those that the library of safetensors writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.services.models.weights import weights_digest
from headrace.trainer.model_loading import weights_file
from headrace.trainer.ranks import streamed_weights
from headrace.trainer.ranks.ranks import ALONE
from headrace.trainer.ranks.streamed_weights import StreamedWeights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bytes_are_those_of_the_library(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed_weights, "PIECE", 7)
    tied = torch.randn(5, 3)
    tensors = {
        "z.tied": tied,
        "steps": torch.tensor(3),
        "a.mask": torch.ones(9, dtype=torch.bool),
        "head": tied,
        "empty": torch.zeros(0, 4),
        "b": torch.randn(4, 6).T,
    }
    streamed = StreamedWeights(tensors, dtype, ALONE)
    expected = weights_file(tensors, dtype)
    assert streamed.in_memory() == expected
    streamed.write(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == expected
    assert streamed.digest() == weights_digest(expected)
