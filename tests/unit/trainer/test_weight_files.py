"""The weights that other trainers give, as one safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from headrace.errors import BlobError, UsageError
from headrace.services.models.weights import read_entries, weights_digest
from headrace.trainer.contract.weight_files import check_layout, pack_weights

TENSORS = {
    "b.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "a.scale": torch.tensor(1.5),
    "c.steps": torch.tensor([3], dtype=torch.int64),
}
SAVED = save(TENSORS)


def test_all_forms_give_the_same_weights(tmp_path: Path) -> None:
    half = {"b.weight": TENSORS["b.weight"]}
    rest = {name: one for name, one in TENSORS.items() if name not in half}
    (tmp_path / "model-00001.safetensors").write_bytes(save(half))
    (tmp_path / "model-00002.safetensors").write_bytes(save(rest))
    (tmp_path / "all").write_bytes(SAVED)
    forms: list[Any] = [
        SAVED, tmp_path, str(tmp_path / "all"), TENSORS, iter(TENSORS.items()),
        {**TENSORS, "a.scale": np.float32(1.5), "c.steps": np.array([3])},
    ]  # fmt: skip
    for form in forms:
        packed = pack_weights(form)
        assert weights_digest(packed) == weights_digest(SAVED)
        loaded = load(packed)
        assert all(torch.equal(loaded[name], one) for name, one in TENSORS.items())


def test_tensors_that_are_not_contiguous_keep_their_values() -> None:
    turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
    packed = pack_weights({"a": turned, "b": torch.from_numpy(turned)})
    assert load(packed)["a"].tolist() == load(packed)["b"].tolist() == turned.tolist()


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({}, UsageError, "no weights"),
        ([("a", np.zeros(1)), ("a", np.zeros(1))], UsageError, "twice"),
        ({"a": np.zeros(1, np.complex64)}, UsageError, "complex64"),
        (b"torn", BlobError, "header"),
    ],
)
def test_what_is_no_weights_is_refused(given: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        pack_weights(given)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no weights"):
        pack_weights(tmp_path)


def test_weights_have_the_dtype_of_the_recipe_and_the_tensors_of_before() -> None:
    one = pack_weights({"a": np.zeros(2, np.float32), "n": np.zeros(1, np.int64)})
    check_layout(one, "float32", None)
    check_layout(one, "float32", one)
    with pytest.raises(UsageError, match=r"'a' is F32, but .* dtype bfloat16"):
        check_layout(one, "bfloat16", None)
    other = pack_weights({"a": np.zeros(3, np.float32), "n": np.zeros(1, np.int64)})
    with pytest.raises(UsageError, match="other tensors"):
        check_layout(other, "float32", one)
    assert list(read_entries(one)) == ["a", "n"]
