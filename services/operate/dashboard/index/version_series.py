"""The versions of one policy as columns of numbers, and how a curve becomes shorter. Pure."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.schemas.events import BatchAssembled, PolicyPublished

MOST_VERSIONS = 200_000
"""Versions of a policy that are kept. Further ones are not shown."""
MOST_NAMES = 60
"""Names of a policy's curves. Metrics of further names are shown on the version's page alone."""
OWN = ("reward", "staleness", "tokens", "samples", "dropped", "wait_s", "step_s", "tokens_per_s")
"""The curves that every policy has. The others are the metrics of its versions."""
NAN = math.nan


def number(value: float) -> float | None:
    """Returns a number as JSON has it: None instead of NaN and of infinity."""
    return value if math.isfinite(value) else None


@dataclass(slots=True)
class VersionRow:
    """What is known of a version besides its numbers."""

    status: str = ""
    published_at: float = 0.0
    batch: int = -1
    """The position of its batch, or -1."""
    publications: tuple[int, ...] = ()
    """The positions of its publications, in log order."""


class VersionSeries:
    """The versions of one policy."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.rows: dict[int, VersionRow] = {}
        self._indices: dict[int, int] = {}
        self._columns: dict[str, array[float]] = {name: array("d") for name in OWN}

    def on_batch(self, batch: BatchAssembled, packed: int) -> bool:
        """Adds a batch. Returns False if it is not the first one of its version."""
        row = self._row(batch.version)
        if row is None or row.batch >= 0:
            return False
        row.batch = packed
        oldest = [one.oldest_version for one in batch.samples if one.oldest_version >= 0]
        values = {
            "reward": NAN if batch.reward_mean is None else batch.reward_mean,
            "staleness": float(batch.version - 1 - min(oldest)) if oldest else NAN,
            "tokens": float(batch.sampled_tokens),
            "samples": float(len(batch.samples)),
            "dropped": float(len(batch.dropped)),
        }
        for name, value in values.items():
            self._set(batch.version, name, value)
        return True

    def on_published(self, event: PolicyPublished, packed: int, at: float) -> None:
        """Adds a publication. The time of the first one counts.

        One that is repeated after a restart has no numbers of the training.
        """
        row = self._row(event.version)
        if row is None:
            return
        row.status = event.status
        row.published_at = row.published_at or at
        row.publications = (*row.publications[:1], *row.publications[1:][-18:], packed)
        if event.status == "resumed":
            return
        self._set(event.version, "wait_s", event.wait_s if event.version else NAN)
        self._set(event.version, "step_s", event.step_s if event.version else NAN)
        for name, value in event.metrics.items():
            if name not in OWN:
                self._set(event.version, name, value)

    @property
    def newest(self) -> int:
        """The newest published version, or -1."""
        return max((version for version, row in self.rows.items() if row.published_at), default=-1)

    def names(self) -> list[str]:
        """Returns the names of the curves that have a number."""
        self._derive()
        known = self._columns.items()
        return [name for name, column in known if any(value == value for value in column)]

    def value(self, version: int, name: str) -> float | None:
        """Returns a number of a version, or None."""
        index, column = self._indices.get(version), self._columns.get(name)
        if index is None or column is None or index >= len(column):
            return None
        return number(column[index])

    def series(
        self, names: Iterable[str], points: int, first: int = 0, last: int | None = None
    ) -> dict[str, Any]:
        """Returns curves over the versions from `first` to `last`, as JSON values.

        Neighbouring versions are merged, so that at most `points` >= 1 remain.
        """
        self._derive()
        versions = [
            version
            for version in sorted(self.rows)
            if version >= first and (last is None or version <= last)
        ]
        groups = merged(versions, points)
        curves = {}
        for name in names:
            column = self._columns.get(name, array("d"))
            values = [
                [column[at] for one in group if (at := self._indices[one]) < len(column)]
                for group in groups
            ]
            curves[name] = shortened(values)
        return {
            "policy": self.policy,
            "versions": [group[-1] for group in groups],
            "first": [group[0] for group in groups],
            "at": [self.rows[group[-1]].published_at or None for group in groups],
            "series": curves,
        }

    def _derive(self) -> None:
        """Computes the tokens per second of each version, from the publication before it."""
        before: float | None = None
        for version in sorted(self.rows):
            at = self.rows[version].published_at
            tokens = self.value(version, "tokens")
            if before is not None and tokens is not None and at > before:
                self._set(version, "tokens_per_s", tokens / (at - before))
            before = at or before

    def _row(self, version: int) -> VersionRow | None:
        row = self.rows.get(version)
        if row is None and len(self.rows) < MOST_VERSIONS:
            row = self.rows[version] = VersionRow()
            self._indices[version] = len(self._indices)
        return row

    def _set(self, version: int, name: str, value: float) -> None:
        column = self._columns.get(name)
        if column is None:
            if len(self._columns) >= MOST_NAMES:
                return
            column = self._columns[name] = array("d")
        index = self._indices[version]
        if len(column) <= index:
            column.extend([NAN] * (index + 1 - len(column)))
        column[index] = value


def merged(versions: Sequence[int], points: int) -> list[Sequence[int]]:
    """Splits versions into at most `points` runs of neighbours, as equal as possible."""
    count = min(len(versions), max(1, points))
    edges = [round(index * len(versions) / count) for index in range(count + 1)] if count else []
    return [versions[low:high] for low, high in itertools.pairwise(edges)]


def shortened(groups: Sequence[Sequence[float]]) -> dict[str, list[float | None]]:
    """Returns the mean, the lowest and the highest number of each group; None if it has none."""
    curve: dict[str, list[float | None]] = {"mean": [], "low": [], "high": []}
    for group in groups:
        known = [value for value in group if math.isfinite(value)]
        curve["mean"].append(sum(known) / len(known) if known else None)
        curve["low"].append(min(known, default=None))
        curve["high"].append(max(known, default=None))
    return curve
