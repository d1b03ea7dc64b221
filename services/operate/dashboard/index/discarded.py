"""What was not trained on, and why. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from headrace.schemas.events import BatchAssembled, GroupClosed
from headrace.schemas.frontier import Frontier
from headrace.services.operate.dashboard.index.index_rows import DiscardedRow, short

MOST = 200_000
"""Rows that are kept. The oldest are forgotten, but still counted."""

_Key = tuple[str, int, int]


class Discarded:
    """The groups and samples that were dropped.

    A dropped group is named by its own record and later by the batch that decides it. Both are one
    row, whichever is read first.
    """

    def __init__(self, most: int = MOST) -> None:
        self._rows: OrderedDict[_Key, DiscardedRow] = OrderedDict()
        self._most = most
        self._counts: dict[tuple[str, str, str], list[float]] = {}
        """By policy, reason and kind: the count, and the times of the first and the last."""
        self._forgotten: dict[tuple[str, int], Frontier] = {}
        """By policy and sample: the tasks of the rows that were forgotten."""

    def on_group(self, group: GroupClosed, at: float) -> None:
        """Adds the first record of a group."""
        policy = short(group.policy)
        if group.verdict == "dropped":
            self._add(DiscardedRow(policy, short(group.reason), "group", group.task, -1, None, at))
        for one in group.excluded:
            reason = short(one.reason)
            self._add(DiscardedRow(policy, reason, "sample", group.task, one.sample, None, at))

    def on_batch(self, batch: BatchAssembled, at: float) -> None:
        """Adds the first record of a batch."""
        policy = short(batch.policy)
        for one in batch.dropped:
            reason = short(one.reason)
            self._add(
                DiscardedRow(policy, reason, "batch", one.task, one.sample, batch.version, at)
            )

    def rows(self, policy: str | None, reason: str | None) -> Iterator[DiscardedRow]:
        """Yields the rows that are kept, the newest first."""
        for row in sorted(self._rows.values(), key=lambda row: -row.at):
            if policy in (None, row.policy) and reason in (None, row.reason):
                yield row

    def reasons(self) -> list[dict[str, Any]]:
        """Returns how often each policy dropped what for which reason, the most frequent first."""
        return [
            {
                "policy": policy,
                "reason": reason,
                "kind": kind,
                "count": int(count),
                "first": first,
                "last": last,
            }
            for (policy, reason, kind), (count, first, last) in sorted(
                self._counts.items(), key=lambda item: -item[1][0]
            )
            if count
        ]

    def _add(self, row: DiscardedRow) -> None:
        key = (row.policy, row.task, row.sample)
        known = self._rows.get(key)
        if known is not None:
            group, batch = (known, row) if known.kind != "batch" else (row, known)
            self._rows[key] = replace(group, version=batch.version)
            if group is row:
                self._count(known, -1)
                self._count(row, 1)
            return
        forgotten = self._forgotten.get((row.policy, row.sample))
        if forgotten is not None and row.task in forgotten:
            return
        if len(self._rows) >= self._most:
            (policy, task, sample), _ = self._rows.popitem(last=False)
            self._forgotten.setdefault((policy, sample), Frontier()).add(task)
        self._rows[key] = row
        self._count(row, 1)

    def _count(self, row: DiscardedRow, by: int) -> None:
        key = row.policy, row.reason, row.kind
        known = self._counts.setdefault(key, [0.0, row.at, row.at])
        known[0] += by
        known[1], known[2] = min(known[1], row.at), max(known[2], row.at)
