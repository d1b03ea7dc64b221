"""Finds out which records retention has removed."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.schemas.events import Ref
from headrace.services.kafka.broker import Broker, Partition


class KeptRecords:
    """Tells records that are kept from those that retention has removed.

    It removes the oldest records of a partition. Each partition is looked up once, so records that
    are removed later still count as kept.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._first: dict[Partition, int] = {}

    async def kept(self, refs: Sequence[Ref]) -> list[Ref]:
        """Returns those of the references whose records the log still has, in the given order."""
        partitions = [Partition(ref.topic, ref.partition) for ref in refs]
        unknown = list(set(partitions) - self._first.keys())
        if unknown:
            bounds = await self._broker.ends(unknown)
            self._first.update({partition: first for partition, (first, _) in bounds.items()})
        return [
            ref
            for ref, partition in zip(refs, partitions, strict=True)
            if ref.offset >= self._first[partition]
        ]

    async def count_missing(self, refs: Sequence[Ref]) -> int:
        """Counts how many of these records are no longer in the log."""
        return len(refs) - len(await self.kept(refs))
