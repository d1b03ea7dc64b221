"""References of recipes to versions: adopted from a recorded run, stored, fetched and pruned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from headrace.errors import BlobError
from headrace.schemas.events import Blob, PolicyPublished
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.models.run_models import RunModel
from headrace.services.models.weights import model_folder, weights_digest
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.operate.run_references import (
    adopt,
    blobs_of,
    fetch_models,
    store_version,
    stored_version,
    with_models,
)
from headrace.services.operate.run_versions import RunVersion, description_of


def recipe(*models: str) -> Recipe:
    policies = {f"p{number}": {"model": model} for number, model in enumerate(models)}
    tasks = {"use": "count", "roles": {"policy": "p0"}}
    return parse_recipe({"name": "r", "tasks": tasks, "policies": policies}, "test")


def a_version(blobs: LocalBlobStore) -> RunVersion:
    weights = save({"w": torch.arange(6.0)})
    published = PolicyPublished(
        policy="p", version=7, status="trained", digest=weights_digest(weights),
        full=blobs.put(weights), full_version=7, tokenizer=blobs.put(tokenizer()),
        metrics={"loss": 0.5},
    )  # fmt: skip
    return RunVersion("ns", published, description_of("tiny-llama"), {})


def tokenizer() -> bytes:
    return (model_folder("tiny-llama") / "tokenizer.json").read_bytes()


def test_a_continued_run_keeps_its_versions() -> None:
    blob = Blob(sha256=bytes(range(32)), size=9)
    exact = RunModel("ns", "p", 7, blob)
    recorded = recipe(str(exact), "tiny-llama", str(exact))
    for mine in ("run:ns/p", "run:ns/p@7", str(exact)):
        assert adopt(recipe(mine, "tiny-llama", mine), recorded).digest == recorded.digest
    for mine in ("run:ns/p@8", "run:ns/q", "tiny-llama"):
        other = recipe(mine, "tiny-llama", mine)
        assert adopt(other, recorded) == other
    resolved = with_models(recipe("run:ns/p", "tiny-llama"), {"p0": exact})
    assert resolved.policies["p0"].model == str(exact)
    assert resolved.digest != recipe("run:ns/p", "tiny-llama").digest


def test_a_stored_version_is_made_again_from_the_blob_store_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_MODELS", str(tmp_path / "models"))
    blobs = LocalBlobStore(tmp_path / "blobs")
    version = a_version(blobs)
    files = store_version(version, blobs)
    # Metrics do not belong to the weights.
    other = version.published.model_copy(update={"metrics": {}})
    assert store_version(replace(version, published=other), blobs) == files
    read, _ = stored_version(files, blobs)
    assert read.published == other

    model = str(RunModel("ns", "p", 7, files))
    cluster = ClusterConfig(state=tmp_path)
    lines: list[str] = []
    fetch_models(recipe(model), cluster, lines.append, weights=False)
    folder = model_folder(model)
    assert {file.name for file in folder.iterdir()} == {
        "config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert lines == []
    fetch_models(recipe(model), cluster, lines.append)
    fetch_models(recipe(model, "tiny-llama"), cluster, lines.append)
    assert lines == ["fetching model ns/p@7"]
    folder = model_folder(model)
    assert weights_digest(folder / "model.safetensors") == version.published.digest
    assert (folder / "tokenizer.json").read_bytes() == tokenizer()
    left = {path.name.partition(".")[0] for path in (tmp_path / "models").iterdir()}
    assert left == {folder.name, f"{folder.name}-described"}  # And their lock files.


def test_what_a_recipe_refers_to_is_not_pruned(tmp_path: Path) -> None:
    blobs = LocalBlobStore(tmp_path / "blobs")
    files = store_version(a_version(blobs), blobs)
    models = ["tiny-llama", "run:ns/p", "run:!", str(RunModel("ns", "p", 7, files))]
    named = {blob.sha256.hex() for blob in blobs_of(models, blobs)}
    assert named == {blob.name for blob in blobs.stored()}
    blobs.get(files).unlink()
    assert blobs_of(models, blobs) == []


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b'{"published": 1, "description": {}}', b'{"published": "hex:zz"}']
)
def test_a_blob_that_lists_no_version_is_refused(tmp_path: Path, text: bytes) -> None:
    blobs = LocalBlobStore(tmp_path)
    with pytest.raises(BlobError, match="does not list the files of a version"):
        stored_version(blobs.put(text), blobs)


@pytest.mark.parametrize("name", ["..", "", "a/config.json", "model.safetensors", "evil.py"])
def test_a_list_may_name_only_files_that_describe_a_model(tmp_path: Path, name: str) -> None:
    blobs = LocalBlobStore(tmp_path)
    version = a_version(blobs)
    path = next(iter(version.description.values()))
    files = store_version(replace(version, description={name: path}), blobs)
    with pytest.raises(BlobError, match="does not list the files of a version"):
        stored_version(files, blobs)


def test_what_is_nested_too_deeply_is_no_list(tmp_path: Path) -> None:
    blobs = LocalBlobStore(tmp_path)
    files = blobs.put(b"[" * 1_000_000)
    with pytest.raises(BlobError, match="does not list the files of a version"):
        stored_version(files, blobs)
    assert blobs_of([str(RunModel("ns", "p", 1, files))], blobs) == []
