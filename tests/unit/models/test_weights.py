"""Weights: the safetensors container is read within its bounds, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from headrace.errors import BlobError, UsageError
from headrace.services.models.weights import (
    MAX_HEADER_BYTES,
    model_folder,
    name_differences,
    tensor_digests,
    weights_digest,
)

A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.arange(4, dtype=np.int64)


def container(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def entry(start: int, end: int, dtype: str = "U8", shape: list[Any] | None = None) -> Any:
    shape = [end - start] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_the_digest_is_of_the_tensors_not_of_the_layout(tmp_path: Path) -> None:
    plain = save({"a": A, "b": B})
    noted = save({"b": B, "a": A}, metadata={"format": "pt"})
    header = {"b": entry(0, 32, "I64", [4]), "a": entry(32, 56, "F32", [2, 3])}
    turned = container(header, B.tobytes() + A.tobytes())
    file = tmp_path / "weights.safetensors"
    file.write_bytes(plain)

    assert plain != noted
    digests = {weights_digest(data) for data in (plain, noted, turned, file)}
    assert len(digests) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"a": A + 1, "b": B},
        {"a": A.reshape(3, 2), "b": B},
        {"a": A.view(np.int32), "b": B},
        {"a": A, "c": B},
        {"a": A},
        {"a": A, "b": B, "c": B[:0]},
    ],
)
def test_the_digest_tells_tensors_apart(other: dict[str, Any]) -> None:
    assert weights_digest(save(other)) != weights_digest(save({"a": A, "b": B}))


def test_a_tensors_digest_is_that_of_a_file_with_it_alone(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    file.write_bytes(save({"a": A}))
    found = tensor_digests(save({"b": B}), file)
    assert found == {
        "a": weights_digest(save({"a": A})).hex(),
        "b": weights_digest(save({"b": B})).hex(),
    }
    assert list(found) == ["a", "b"]


def test_few_of_many_different_tensors_are_named() -> None:
    table = {f"layer.{number}": "same" for number in range(400)}
    other = table | {f"layer.{number}": "other" for number in range(5)}
    assert name_differences(table, other) == (
        "5 of its 400 tensors differ: layer.0, layer.1, layer.2, …"
    )
    assert name_differences(table, table | {"more": "x"}) == "1 of its 401 tensors differ: more"


def test_an_empty_file_of_tensors_has_a_digest() -> None:
    assert len(weights_digest(save({}))) == 32


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file has 0"),
        (b"\x02\0\0", "the file has 3"),
        (container({}, length=100), "the file has"),
        (container({}, length=2**63), "the file has"),
        (container(b"{nonsense"), "not JSON"),
        (container(b"[" * 100_000), "not JSON"),
        (container(b"\xff\xfe{}"), "not JSON"),
        (container(b"[]"), "not a JSON object"),
        (container(b'{"a":1,"a":1}'), "twice"),
        (container({"a": 1}), "must have dtype"),
        (container({"a": {**entry(0, 0), "more": 1}}), "must have dtype"),
        (container({"a": entry(0, 1, "X9")}, b"x"), "unknown dtype"),
        (container({"a": {**entry(0, 1), "dtype": []}}, b"x"), "unknown dtype"),
        (container({"a": entry(0, 1, shape=[-1])}, b"x"), "no usable shape"),
        (container({"a": entry(0, 1, shape=[True])}, b"x"), "no usable shape"),
        (container({"a": entry(0, 1, shape=[1] * 17)}, b"x"), "no usable shape"),
        (container({"a": entry(1, 0, shape=[])}, b"x"), "no usable data_offsets"),
        (container({"a": entry(0, 2**70, shape=[2**62])}), "no usable data_offsets"),
        (container({"a": entry(0, 1, "F32", [2**40] * 16)}, b"x"), "more or fewer bytes"),
        (container({"a": entry(0, 4), "b": entry(2, 6)}, b"123456"), "overlaps"),
        (container({"a": entry(0, 2), "b": entry(3, 6)}, b"123456"), "gap"),
        (container({"a": entry(0, 2)}, b"123"), "the file ends at"),
        (container({"a": entry(0, 3)}, b"12"), "the file ends at"),
    ],
)
def test_an_unsound_file_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(BlobError, match=reason):
        weights_digest(data)


def test_a_header_above_the_bound_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "large"
    with file.open("wb") as handle:
        handle.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        handle.truncate(MAX_HEADER_BYTES + 100)
    with pytest.raises(BlobError, match="its header says"):
        weights_digest(file)


def test_a_file_that_is_not_there_is_a_blob_error(tmp_path: Path) -> None:
    with pytest.raises(BlobError, match="can't read"):
        weights_digest(tmp_path / "none")


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "a"]), inner
        )
    ),
    max_leaves=12,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "BF16"]) | trees,
        "shape": st.lists(st.integers(0, 3) | scalars, max_size=3) | trees,
        "data_offsets": st.lists(st.integers(0, 12) | scalars, min_size=2, max_size=2) | trees,
    }
)


@given(
    st.binary(max_size=64)
    | st.builds(container, trees | st.binary(max_size=40), st.binary(max_size=12))
    | st.builds(
        container, st.dictionaries(st.text(max_size=2), entries, max_size=3), st.binary(max_size=12)
    )
)
def test_hostile_files_are_refused_and_nothing_else(data: bytes) -> None:
    try:
        digest = weights_digest(data)
    except BlobError:
        return
    assert len(digest) == 32


def test_a_model_is_found_by_name_or_path() -> None:
    folder = model_folder("tiny-llama")
    assert model_folder(str(folder)) == folder


def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"no tokenizer\.json.*tiny-llama"):
        model_folder(str(tmp_path))
    with pytest.raises(UsageError, match="small-llama, tiny-chat, tiny-llama"):
        model_folder("huge-llama")
