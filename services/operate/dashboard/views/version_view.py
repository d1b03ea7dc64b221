"""The page of a version: one optimizer step with all that went into it and came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from headrace.errors import HeadraceError, UsageError
from headrace.schemas.events import BatchAssembled, PolicyPublished
from headrace.services.base.texts import encodable
from headrace.services.models.blobs import BlobStore
from headrace.services.operate.dashboard.index.index_rows import EpisodeRow, rewards_of
from headrace.services.operate.dashboard.index.run_index import RunIndex
from headrace.services.operate.dashboard.views.cut_texts import Tree
from headrace.services.operate.dashboard.views.fact_reader import FactReader
from headrace.services.operate.dashboard.views.page_of import page_of
from headrace.services.operate.dashboard.views.run_views import evaluation_tree
from headrace.services.operate.show.facts import Fact, location_of
from headrace.services.operate.show.step_story import make_sample

BINS = 10
"""Bars of the histogram of rewards."""


async def version_tree(
    index: RunIndex,
    reader: FactReader,
    blobs: BlobStore,
    policy: str,
    version: int,
    query: Mapping[str, str],
) -> Tree:
    """Returns the page of a version. Raises UsageError if there is no such version."""
    series = index.series.get(policy)
    row = series.rows.get(version) if series is not None else None
    if series is None or row is None:
        raise UsageError(f"policy {policy[:80]!r} has no version {version}, or it was not read yet")
    batch = await _read(index, reader, row.batch)
    publications = [
        fact for packed in row.publications if (fact := await _read(index, reader, packed))
    ]
    known = sorted(series.rows)
    at = known.index(version)
    tree: Tree = {
        "policy": policy,
        "version": version,
        "status": row.status,
        "at": row.published_at or None,
        "previous": known[at - 1] if at else None,
        "next": known[at + 1] if at + 1 < len(known) else None,
        "remarks": [] if row.batch < 0 or batch is not None else ["its batch is gone"],
    }
    tree |= await _batch_parts(index, reader, batch, query)
    tree |= await _weights_parts(blobs, publications)
    result = index.progress.evaluations.of(policy).get(version)
    tree["evaluation"] = evaluation_tree(version, result)
    return tree


async def _read(index: RunIndex, reader: FactReader, packed: int) -> Fact[Any] | None:
    return None if packed < 0 else await reader.one(index.positions.unpack(packed))


async def _batch_parts(
    index: RunIndex, reader: FactReader, fact: Fact[BatchAssembled] | None, query: Mapping[str, str]
) -> Tree:
    empty: Tree = {"items": [], "total": 0, "next": None}
    if fact is None:
        rewards: Tree = {"edges": [], "counts": []}
        return {"batch": None, "samples": empty, "dropped": empty, "rewards": rewards}
    batch = fact.event
    samples = page_of(range(len(batch.samples)), query, int)
    trees = await _sample_trees(reader, batch, samples["items"])
    rows = [row for one in batch.samples if (row := _row(index, one.task, one.sample))]
    return {
        "batch": {
            "location": fact.location,
            "at": fact.recorded_at,
            "reward": batch.reward_mean,
            "tokens": batch.sampled_tokens,
            "recipe": batch.recipe.hex(),
        },
        "samples": {**samples, "items": trees},
        "dropped": page_of(
            batch.dropped,
            query,
            lambda one: {"task": one.task, "sample": one.sample, "reason": encodable(one.reason)},
            "dropped_cursor",
        ),
        "rewards": histogram(rewards_of(rows)),
    }


async def _sample_trees(
    reader: FactReader, batch: BatchAssembled, numbers: list[int]
) -> list[Tree]:
    """The samples with these numbers in the batch, with what their trajectories say."""
    refs = [batch.samples[number].trajectory for number in numbers]
    trees: list[Tree] = []
    async for trajectory in reader.log.fetch_each(refs):
        number = numbers[len(trees)]
        made = make_sample(batch, number, trajectory)
        trees.append(
            {
                "task": made.task,
                "sample": made.sample,
                "reward": made.reward,
                "ending": made.ending,
                "turns": made.turns,
                "tokens": made.tokens,
                "versions": list(made.versions),
                "staleness": made.staleness,
                "advantages": list(made.advantages),
                "use": made.use,
                "weight": batch.samples[number].weight,
                "location": location_of(batch.samples[number].trajectory),
                "gone": encodable(made.gone),
            }
        )
    return trees


def _row(index: RunIndex, task: int, sample: int) -> EpisodeRow | None:
    row = index.tasks.get(task)
    return None if row is None else row.samples.get(sample)


def histogram(values: list[float]) -> Tree:
    """Returns how many numbers lie between neighbouring edges. The last bar has both its edges."""
    if not values:
        return {"edges": [], "counts": []}
    low, high = min(values), max(values)
    if low == high:
        return {"edges": [low, high], "counts": [len(values)]}
    counts = [0] * BINS
    for value in values:
        counts[min(BINS - 1, int((value - low) / (high - low) * BINS))] += 1
    return {
        "edges": [low + (high - low) * number / BINS for number in range(BINS + 1)],
        "counts": counts,
    }


def _publication_tree(fact: Fact[PolicyPublished]) -> Tree:
    return {
        "at": fact.recorded_at,
        "status": fact.event.status,
        "location": fact.location,
        "writer": encodable(fact.writer),
    }


async def _weights_parts(blobs: BlobStore, facts: list[Fact[PolicyPublished]]) -> Tree:
    if not facts:
        return {"publications": [], "metrics": {}, "wait_s": None, "step_s": None, "weights": None}
    event = facts[-1].event
    trained = next((one.event for one in reversed(facts) if one.event.status != "resumed"), event)
    held: list[bool | None]
    files: list[tuple[str, int | None, int, Any]] = []
    if event.full is not None:
        files.append(("full", None, event.full_version, event.full))
    files += [("delta", one.from_version, one.to_version, one.blob) for one in event.deltas]
    if event.adapter is not None:
        files.append(("base", None, event.version, event.adapter.base))
    try:
        held = await asyncio.to_thread(lambda: [blobs.holds(blob) for *_, blob in files])
    except HeadraceError:  # The store does not answer, or this principal may not read it.
        held = [None for _ in files]
    return {
        "publications": [_publication_tree(fact) for fact in facts],
        "metrics": {
            encodable(name): value for name, value in trained.metrics.items() if value == value
        },
        "wait_s": trained.wait_s,
        "step_s": trained.step_s,
        "updates": trained.updates,
        "weights": {
            "digest": event.digest.hex(),
            "base": encodable(event.base),
            "dtype": event.dtype,
            "format": event.format,
            "bytes": sum(blob.size for *_, blob in files),
            "files": [
                {
                    "role": role,
                    "from": before,
                    "to": after,
                    "sha256": blob.sha256.hex(),
                    "bytes": blob.size,
                    "held": there,
                }
                for (role, before, after, blob), there in zip(files, held, strict=True)
            ],
        },
    }
