"""Writes what a fine-tuning has learned as a model folder, as versions of a run are exported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.schemas.events import Adapter, PolicyPublished
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.models.weights import model_folder
from headrace.services.operate.export.model_export import export_version
from headrace.services.operate.run_versions import Layout, RunVersion, description_of
from headrace.services.operate.sft.sft_job import SftJob, SftTarget
from headrace.trainer.model_loading import FrozenBase
from headrace.trainer.publish import context_length
from headrace.trainer.versions import VersionStore


def write_model(
    job: SftJob,
    weights: Path,
    base: FrozenBase | None,
    updates: int,
    facts: Mapping[str, Any],
    target: SftTarget,
) -> dict[str, Any]:
    """Writes weights as a model folder. Returns what its `headrace.json` says. Blocks.

    `weights` is a safetensors file in a temporary folder on the target's disk, and is removed. It
    is an adapter if there is a `base`. The model folder then has both, as the trainer reads them,
    or one whole model if the target says `merge`. Raises what `export_version` raises.
    """
    policy = job.policy
    folder = model_folder(policy.model)
    blobs = LocalBlobStore(weights.parent / "blobs")
    versions = VersionStore(blobs)
    adapter = None
    if base is not None and policy.lora is not None:
        adapter = Adapter(
            base=versions.keep_base(base.file),
            base_digest=base.digest,
            rank=policy.lora.rank,
            alpha=policy.lora.alpha,
            targets=base.targets,
        )
    stored = versions.add(updates, weights)
    weights.unlink()
    published = PolicyPublished(
        policy=job.name,
        version=updates,
        status="trained",
        digest=stored.digest,
        full=stored.full,
        full_version=stored.full_version,
        tensor_digests=stored.tensors,
        base=policy.model,
        dtype=policy.dtype,
        tokenizer=blobs.put((folder / "tokenizer.json").read_bytes(), "application/json"),
        context=context_length(json.loads((folder / "config.json").read_text())),
        adapter=adapter,
        updates=updates,
    )
    version = RunVersion("", published, description_of(policy.model), {"fine_tuning": facts})
    layout: Layout = "merged" if target.merge else "trainer"
    return export_version(version, blobs, target.folder, layout=layout, force=target.force)
