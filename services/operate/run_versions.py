"""Writes the versions that a run has published as model folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from headrace.errors import BlobError
from headrace.schemas.events import PolicyPublished
from headrace.schemas.recipe.policy import SamplingSettings
from headrace.services.inference.engine import AdapterWeights, Weights
from headrace.services.models.blobs import BlobStore, disk_errors
from headrace.services.models.hub import DESCRIPTION
from headrace.services.models.shards import SHARD_BYTES, write_shards
from headrace.services.models.weights import (
    ADAPTER,
    ADAPTER_CONFIG,
    adapter_config,
    hub_model,
    model_folder,
    name_differences,
    tensor_digests,
    weights_digest,
)

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
BASE = "base"
"""The folder of the base beside an adapter."""
Layout = Literal["merged", "peft", "trainer"]
"""Of an adapter. `merged`: added to its base, a whole model. `peft`: as PEFT reads it. `trainer`:
base and adapter in one folder, as the trainer reads them."""


@dataclass(frozen=True, slots=True)
class RunVersion:
    """A version of a policy, and all that its model folder is made of."""

    namespace: str
    published: PolicyPublished
    description: Mapping[str, Path]
    """The files that describe the model, by name."""
    run: Mapping[str, Any]
    """The recipe's digest and the versions of packages, as the start of the run recorded them."""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    """How the run samples the policy's tokens."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """As the recipe gives them."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.published.policy}@{self.published.version}"


def description_of(model: str) -> dict[str, Path]:
    """Returns the files of a recipe's `model` besides its weights, by name."""
    folder = model_folder(model)
    found = [path for one in DESCRIPTION for path in sorted(folder.glob(one))]
    return {path.name: path for path in found if path.is_file()}


def describes(name: str) -> bool:
    """Whether a file of this name may describe a model."""
    return Path(name).name == name and any(fnmatchcase(name, one) for one in DESCRIPTION)


def write_description(version: RunVersion, blobs: BlobStore, folder: Path) -> None:
    """Writes the files of a version's model folder besides its weights. Blocks."""
    published = version.published
    with disk_errors(f"write {folder}"):
        for name, path in version.description.items():
            shutil.copyfile(path, folder / name)
        if published.tokenizer is not None:
            shutil.copyfile(blobs.get(published.tokenizer), folder / TOKENIZER)
        if not (folder / TOKENIZER_CONFIG).exists():
            # Otherwise transformers guesses a class that may split text in another way.
            default = {"tokenizer_class": "PreTrainedTokenizerFast"}
            (folder / TOKENIZER_CONFIG).write_text(json.dumps(default))
        config = json.loads((folder / CONFIG).read_text("utf-8"))
        if not config.get("architectures"):
            from headrace.services.models.torch_models import architecture

            config["architectures"] = [architecture(folder)]  # vLLM needs it.
        config["dtype"] = published.dtype
        if "torch_dtype" in config:
            config["torch_dtype"] = published.dtype  # An older name of the same key.
        (folder / CONFIG).write_text(json.dumps(config, indent=2))


class VersionWriter:
    """Writes one version as a model folder. All methods block."""

    def __init__(
        self,
        version: RunVersion,
        blobs: BlobStore,
        scratch: Path,
        *,
        on_bytes: Callable[[int], None] = lambda count: None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Fetches and verifies the weights. Deltas are applied in the folder `scratch`.

        Raises BlobError if the weights are gone or damaged, and DependencyError if the blob store
        can't be reached.
        """
        self._version = version
        self._blobs = blobs
        self._on_bytes = on_bytes
        self._shard_bytes = shard_bytes
        from headrace.services.inference.local_weights import LocalWeights  # It imports numpy.

        self.weights: Weights = LocalWeights(blobs, scratch / "weights").weights(version.published)

    @property
    def size(self) -> int:
        """The bytes of the whole model's weights."""
        adapter = self.weights.adapter
        return (self.weights.path if adapter is None else adapter.base).stat().st_size

    def write(self, folder: Path, layout: Layout, home: Path | None = None) -> None:
        """Writes the model folder. `folder` must be empty; `layout` matters only for an adapter.

        `home` is the path that the folder will have, if it moves. Every tensor is read back and
        compared with the published digest. Merged tensors have no such digest, but the adapter and
        the base that they are computed from do. Raises BlobError if a tensor differs, and
        DependencyError if the disk can't take the files.
        """
        adapter = self.weights.adapter
        if adapter is not None and layout == "peft":
            self._write_peft(folder, adapter, home or folder)
            return
        write_description(self._version, self._blobs, folder)
        if adapter is None:
            self._write_tensors(folder, self.weights.path, self._version.published.digest)
        elif layout == "trainer":
            self._write_tensors(folder, adapter.base, adapter.digest)
            self._copy_adapter(folder)
        else:
            from headrace.services.models.lora import Merger  # It imports torch.

            scale = adapter.alpha / adapter.rank
            merger = Merger(folder, adapter.base, self.weights.path, scale)
            self._write_tensors(folder, adapter.base, None, merger.changed())

    def _write_tensors(
        self,
        folder: Path,
        source: Path,
        digest: bytes | None,
        changed: Mapping[str, Callable[[], bytes]] | None = None,
    ) -> None:
        files = write_shards(
            [source],
            folder,
            changed=changed,
            shard_bytes=self._shard_bytes,
            on_bytes=self._on_bytes,
        )
        if digest is not None:
            self._verify(source, digest, *files)

    def _write_peft(self, folder: Path, adapter: AdapterWeights, home: Path) -> None:
        config = adapter_config(adapter.rank, adapter.alpha, adapter.targets)
        hub = hub_model(self._version.published.base)
        if hub is not None:
            repository, revision = hub
            config |= {"base_model_name_or_path": repository, "revision": revision}
        else:
            config["base_model_name_or_path"] = str(home / BASE)
            with disk_errors(f"make {folder / BASE}"):
                (folder / BASE).mkdir()
            write_description(self._version, self._blobs, folder / BASE)
            self._write_tensors(folder / BASE, adapter.base, adapter.digest)
        write_description(self._version, self._blobs, folder)
        with disk_errors(f"write {folder}"):
            for name in (CONFIG, GENERATION):
                (folder / name).unlink(missing_ok=True)  # They belong to a whole model.
            (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2))
        self._copy_adapter(folder)

    def _copy_adapter(self, folder: Path) -> None:
        with disk_errors(f"write {folder / ADAPTER}"):
            shutil.copyfile(self.weights.path, folder / ADAPTER)
        self._verify(self.weights.path, self._version.published.digest, folder / ADAPTER)

    def _verify(self, source: Path, digest: bytes, *files: Path) -> None:
        """`source` is the verified file that was written to `files`."""
        if weights_digest(*files) != digest:
            differences = name_differences(tensor_digests(source), tensor_digests(*files))
            raise BlobError(
                f"what was written to {files[0].parent} differs from version {self._version}. "
                f"{differences}. The disk may be damaged. Try again, or use another disk"
            )
