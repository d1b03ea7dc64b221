"""The trainer's logprobs of an episode's tokens, or why they are unknown."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from headrace.errors import HeadraceError
from headrace.schemas.events import BatchAssembled, PolicyPublished, TrajectoryRecorded
from headrace.services.base.texts import encodable
from headrace.services.models.blobs import BlobStore
from headrace.services.operate.dashboard.index.index_rows import EpisodeRow
from headrace.services.operate.dashboard.index.run_index import RunIndex
from headrace.services.operate.dashboard.index.version_series import number
from headrace.services.operate.dashboard.views.fact_reader import FactReader
from headrace.services.operate.show.facts import Fact
from headrace.trainer.metrics.recorded_logprobs import read_logprobs, trained_turns
from headrace.trainer.sequences import Floats

Logprobs = Mapping[int, list[float | None]]
"""One number for each token, by turn."""


class _Unknown(Exception):
    """Why the logprobs are unknown, as a whole sentence."""


@dataclass(frozen=True)
class TrainerLogprobs:
    """Finds the logprobs in the blobs that versions name. Leaves no trace there."""

    index: RunIndex
    reader: FactReader
    blobs: BlobStore

    async def of(
        self, fact: Fact[TrajectoryRecorded], row: EpisodeRow
    ) -> tuple[Logprobs, list[str]]:
        """Returns the logprobs of the turns that a policy trains, and why others are unknown.

        An episode that several batches used has the logprobs of the first one.
        """
        found: dict[int, list[float | None]] = {}
        remarks: list[str] = []
        turns = fact.event.turns
        for policy in dict.fromkeys(turn.policy for turn in turns if turn.trainable):
            counts = trained_turns(turns, policy)
            if not counts:
                continue
            try:
                logprobs = await self._sample(fact, row, policy)
                if len(logprobs) != sum(counts.values()):
                    raise _Unknown("The batch states another number of tokens than the trajectory.")
            except _Unknown as why:
                remarks.append(
                    encodable(f"Policy {policy}: the trainer's logprobs are unknown. {why}")
                )
                continue
            ends = np.cumsum([0, *counts.values()])
            for turn, (first, end) in zip(counts, pairwise(ends), strict=True):
                found[turn] = [number(float(one)) for one in logprobs[first:end]]
        return found, remarks

    async def _sample(self, fact: Fact[TrajectoryRecorded], row: EpisodeRow, policy: str) -> Floats:
        version = (row.trained or {}).get(policy)
        series = self.index.series.get(policy)
        if version is None or series is None or version not in series.rows:
            raise _Unknown("No batch has trained on this episode.")
        known = series.rows[version]
        batch = await self._event(known.batch, BatchAssembled, f"Batch {version}")
        trajectory = fact.event
        index = next(
            (
                index
                for index, one in enumerate(batch.samples)
                if (one.task, one.sample) == (trajectory.task, trajectory.sample)
            ),
            None,
        )
        if index is None or batch.samples[index].trajectory != fact.ref:
            raise _Unknown(f"Batch {version} trains on another attempt of this episode.")
        published = await self._event(
            next(iter(known.publications), -1), PolicyPublished, f"Version {version}"
        )
        return await self._read(published, batch, index)

    async def _read(self, published: PolicyPublished, batch: BatchAssembled, index: int) -> Floats:
        version, blob = published.version, published.logprobs
        if published.status == "skipped":
            raise _Unknown(f"The trainer skipped batch {version}.")
        if blob is None:
            raise _Unknown(
                f"Version {version} names none: training.record_logprobs was off, or the trainer "
                "was of an older release."
            )
        try:
            path = await asyncio.to_thread(self.blobs.get, blob)
            logprobs = await asyncio.to_thread(read_logprobs, path, batch, index)
        except HeadraceError as error:
            raise _Unknown(f"Those of version {version} can't be read: {error}.") from error
        except (OSError, ValueError) as error:
            raise _Unknown(f"The blob of version {version} can't be used: {error}.") from error
        if logprobs is None:
            raise _Unknown(f"The trainer dropped this episode from batch {version}.")
        return logprobs

    async def _event(self, packed: int, kind: type[Any], what: str) -> Any:
        """Returns an event by its position, -1 if it was not read. Raises _Unknown."""
        if packed < 0:
            raise _Unknown(f"{what} is not in the log yet.")
        fact = await self.reader.one(self.index.positions.unpack(packed))
        if fact is None or not isinstance(fact.event, kind):
            raise _Unknown(f"{what} is gone from the log.")
        return fact.event
