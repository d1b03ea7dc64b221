"""The folder of an export appears whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from headrace.errors import BlobError, UsageError
from headrace.schemas.events import PolicyPublished
from headrace.services.models import shards
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.models.weights import read_chunks, weights_digest
from headrace.services.operate.export.model_export import export_version
from headrace.services.operate.run_versions import RunVersion, description_of

RUN = {"recipe_digest": "ab", "packages": {"torch": "1"}}


def a_version(blobs: LocalBlobStore) -> RunVersion:
    weights = save({"w": torch.arange(6.0), "v": torch.ones(2)})
    published = PolicyPublished(
        policy="p", version=7, status="trained", digest=weights_digest(weights),
        full=blobs.put(weights), full_version=7, base="tiny-llama",
    )  # fmt: skip
    return RunVersion("ns", published, description_of("tiny-llama"), RUN)


@pytest.fixture
def blobs(tmp_path: Path) -> LocalBlobStore:
    return LocalBlobStore(tmp_path / "blobs")


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "blobs")


def test_a_folder_says_where_it_comes_from(tmp_path: Path, blobs: LocalBlobStore) -> None:
    version = a_version(blobs)
    (tmp_path / "out").mkdir()  # An empty folder may be there.
    facts = export_version(version, blobs, tmp_path / "out")
    assert facts == json.loads((tmp_path / "out" / "headrace.json").read_text())
    assert facts == {
        "namespace": "ns", "policy": "p", "version": 7,
        "digest": version.published.digest.hex(), "base_model": "tiny-llama", "dtype": "float32",
        **RUN,
    }  # fmt: skip
    assert left(tmp_path) == ["out"]
    assert left(tmp_path / "out") == [
        "config.json", "headrace.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip


def test_the_configuration_has_the_dtype_of_the_weights(
    tmp_path: Path, blobs: LocalBlobStore
) -> None:
    version = a_version(blobs)
    config = json.loads(version.description["config.json"].read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "float16"}))
    published = version.published.model_copy(update={"dtype": "bfloat16"})
    files = {**version.description, "config.json": tmp_path / "config.json"}
    export_version(RunVersion("ns", published, files, RUN), blobs, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["dtype"], written["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert written["architectures"] == ["LlamaForCausalLM"]


def test_only_a_model_folder_is_replaced_and_only_by_force(
    tmp_path: Path, blobs: LocalBlobStore
) -> None:
    version, folder = a_version(blobs), tmp_path / "out"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="is not empty"):
        export_version(version, blobs, folder)
    with pytest.raises(UsageError, match="is not a model folder"):
        export_version(version, blobs, folder, force=True)
    assert left(folder) == ["thesis.txt"]
    (folder / "config.json").write_text("{}")
    export_version(version, blobs, folder, force=True)
    assert "thesis.txt" not in left(folder)
    assert left(tmp_path) == ["out"]
    with pytest.raises(UsageError, match="is not a folder: make it first"):
        export_version(version, blobs, tmp_path / "no" / "out")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="exists and is not a folder"):
        export_version(version, blobs, tmp_path / "file", force=True)


def test_ctrl_c_leaves_nothing_and_a_forced_folder_as_it_was(
    tmp_path: Path, blobs: LocalBlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, folder = a_version(blobs), tmp_path / "out"
    export_version(version, blobs, folder)
    before = (folder / "headrace.json").stat().st_ino

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_version(version, blobs, folder, force=True)
    with pytest.raises(KeyboardInterrupt):
        export_version(version, blobs, tmp_path / "new")
    assert left(tmp_path) == ["out"]
    assert (folder / "headrace.json").stat().st_ino == before


def test_weights_that_the_disk_damaged_are_not_exported(
    tmp_path: Path, blobs: LocalBlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = a_version(blobs)
    monkeypatch.setattr(
        shards, "read_chunks", lambda *of: (bytes(len(chunk)) for chunk in read_chunks(*of))
    )
    with pytest.raises(BlobError, match=r"version ns/p@7\. \d of its \d+ tensors"):
        export_version(version, blobs, tmp_path / "out")
    assert left(tmp_path) == []


def test_damaged_or_pruned_weights_are_not_exported(tmp_path: Path, blobs: LocalBlobStore) -> None:
    version = a_version(blobs)
    full = version.published.full
    assert full is not None
    path = blobs.get(full)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(BlobError, match="is damaged"):
        export_version(version, blobs, tmp_path / "out")
    path.unlink()
    with pytest.raises(BlobError, match="is not in"):
        export_version(version, blobs, tmp_path / "out")
    assert left(tmp_path) == []
