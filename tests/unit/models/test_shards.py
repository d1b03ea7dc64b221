"""Weights as files of a model folder: one, or several with an index."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.errors import BlobError
from headrace.services.models.shards import WEIGHTS, write_shards
from headrace.services.models.weights import weights_digest


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(5, 7),
        "b.weight": torch.randn(3).to(torch.bfloat16),
        "c.bias": torch.randint(0, 9, (2, 2)),
        "empty": torch.empty(0),
    }


def saved(folder: Path) -> Path:
    path = folder / "source.safetensors"
    save_file(tensors(), path)
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(shard_bytes=st.integers(1, 400))
def test_files_of_any_size_hold_the_same_tensors(tmp_path: Path, shard_bytes: int) -> None:
    source = saved(tmp_path)
    folder = tmp_path / str(shard_bytes)
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    counted: list[int] = []
    files = write_shards([source], folder, shard_bytes=shard_bytes, on_bytes=counted.append)
    assert weights_digest(*files) == weights_digest(source)
    assert sum(counted) == 5 * 7 * 4 + 3 * 2 + 4 * 8
    if len(files) == 1:
        assert files == [folder / WEIGHTS]
    else:
        index = json.loads((folder / f"{WEIGHTS}.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(counted)
        assert index["weight_map"] == {
            name: file.name for file in files for name in load_file(file)
        }
        for file in files:
            held = sum(one.nbytes for one in load_file(file).values())
            assert held <= shard_bytes or len(load_file(file)) == 1
    again = write_shards(files, tmp_path, shard_bytes=1 << 20)
    assert weights_digest(*again) == weights_digest(source)
    again[0].unlink()


def test_a_changed_tensor_replaces_the_one_of_the_source(tmp_path: Path) -> None:
    new = torch.ones(5, 7)
    [file] = write_shards(
        [saved(tmp_path)], tmp_path, changed={"a.weight": lambda: new.numpy().tobytes()}
    )
    expected = tensors() | {"a.weight": new}
    for name, tensor in load_file(file).items():
        assert torch.equal(tensor, expected[name])


def test_two_files_with_one_tensor_have_no_digest(tmp_path: Path) -> None:
    source = saved(tmp_path)
    with pytest.raises(BlobError, match=r"another file has tensor 'a\.weight' too"):
        weights_digest(source, source)
