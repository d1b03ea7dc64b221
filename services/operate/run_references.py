"""Resolves models that are versions of runs, and makes their folders in the cache.

A resolved reference names a blob: JSON with the publication of the version and the files that
describe its model. The weights stay the blobs that the publication names.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.errors import BlobError, UsageError
from headrace.schemas.events import Blob, PolicyPublished
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.base.files import private_folder
from headrace.services.base.json_text import load_json
from headrace.services.models.blobs import BlobStore, disk_errors
from headrace.services.models.run_models import RunModel
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.operate.run_versions import (
    RunVersion,
    VersionWriter,
    describes,
    write_description,
)

MANIFEST_LIMIT = 16 * 1024 * 1024
"""The most bytes of a blob that lists a version's files."""
HEX = "hex:"
"""Before bytes in a manifest, which is JSON."""

UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a list raises that is not one."""


def references(recipe: Recipe) -> dict[str, RunModel]:
    """Returns the policies whose model is a version of a run, each with its reference."""
    found = {name: RunModel.parse(policy.model) for name, policy in recipe.policies.items()}
    return {name: model for name, model in found.items() if model is not None}


def with_models(recipe: Recipe, models: Mapping[str, RunModel]) -> Recipe:
    """Returns the recipe with other references as the models of some policies."""
    policies = {
        name: policy.model_copy(update={"model": str(models[name])}) if name in models else policy
        for name, policy in recipe.policies.items()
    }
    return recipe.model_copy(update={"policies": policies})


def adopt(recipe: Recipe, recorded: Recipe) -> Recipe:
    """Returns the recipe with the versions that a recorded run of it was resolved to."""
    theirs = references(recorded)
    return with_models(
        recipe,
        {
            name: theirs[name]
            for name, mine in references(recipe).items()
            if name in theirs and mine.covers(theirs[name])
        },
    )


def store_version(version: RunVersion, blobs: BlobStore) -> Blob:
    """Stores the list of a version's files, and those that describe it. Returns the list's blob."""
    tree = {
        "namespace": version.namespace,
        "published": version.published.model_copy(update={"metrics": {}}).model_dump(),
        "description": {
            name: blobs.put(path.read_bytes()).model_dump()
            for name, path in sorted(version.description.items())
        },
    }
    text = json.dumps(tree, sort_keys=True, default=lambda data: f"{HEX}{data.hex()}")
    return blobs.put(text.encode(), "application/json")


def stored_version(files: Blob, blobs: BlobStore) -> tuple[RunVersion, dict[str, Blob]]:
    """Reads the list that `store_version` wrote. The version's description is still empty.

    Also returns the blobs of the description by name. Raises BlobError if the list is gone or is
    not such a list.
    """
    if files.size > MANIFEST_LIMIT:
        raise BlobError(f"blob {files.sha256.hex()} is too large to list a version's files")
    try:
        tree = _from_json(load_json(blobs.get(files).read_bytes()))
        published = PolicyPublished.model_validate(tree["published"])
        description = {
            name: Blob.model_validate(blob) for name, blob in tree["description"].items()
        }
        if strange := [name for name in description if not describes(name)]:
            raise ValueError(f"{strange[0][:80]!r} is not a file that describes a model")
        return RunVersion(str(tree["namespace"]), published, {}, {}), description
    except UNREADABLE as error:
        raise BlobError(
            f"blob {files.sha256.hex()} does not list the files of a version: {error}"
        ) from error


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _from_json(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_from_json(one) for one in value]
    if isinstance(value, str) and value.startswith(HEX):
        return bytes.fromhex(value.removeprefix(HEX))
    return value


def blobs_of(models: Iterable[str], blobs: BlobStore) -> list[Blob]:
    """Returns the blobs that these models of recipes refer to."""
    named: list[Blob] = []
    for model in models:
        with suppress(UsageError, BlobError):  # A list that is gone can't be used any more.
            reference = RunModel.parse(model)
            if reference is None or reference.files is None:
                continue
            version, description = stored_version(reference.files, blobs)
            named += [reference.files, *description.values(), *version.published.weight_blobs()]
            tokenizer = version.published.tokenizer
            named += [] if tokenizer is None else [tokenizer]
    return named


def fetch_models(
    recipe: Recipe, cluster: ClusterConfig, say: Callable[[str], None], *, weights: bool = True
) -> None:
    """Makes the folders of the recipe's versions in the cache, unless they are there. Blocks.

    Without `weights` they only describe the models, which is enough to make prompts. An adapter is
    merged into its base. Raises UsageError if a reference is not resolved, BlobError if blobs are
    gone, and DependencyError if the blob store can't be reached.
    """
    for model in references(recipe).values():
        folder = model.folder(weights=weights)
        if folder.is_dir():
            continue
        with disk_errors(f"make {folder.parent}"):
            private_folder(folder.parent)
        with _sole_writer(folder.with_suffix(".lock")):
            if not folder.is_dir():
                assert model.files is not None
                if weights:
                    say(f"fetching model {model.namespace}/{model.policy}@{model.version}")
                _make(folder, model.files, cluster.open_blobs(None), weights)


def _make(folder: Path, files: Blob, blobs: BlobStore, weights: bool) -> None:
    version, description = stored_version(files, blobs)
    described = {name: blobs.get(blob) for name, blob in description.items()}
    version = replace(version, description=described)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix="new-"))
    try:
        made = temporary / "model"
        made.mkdir()
        if weights:
            VersionWriter(version, blobs, temporary / "scratch").write(made, "merged")
        else:
            write_description(version, blobs, made)
        made.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _sole_writer(path: Path) -> Iterator[None]:
    """Lets other processes wait until the block ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
