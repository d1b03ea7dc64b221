"""What a commit notes beside its offset: the companions' positions, and the owners that died.

The text is the positions alone, in the order of their partitions, as `[3,7]`; where owners are
counted, `{"at":[3,7],"owners":2}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.errors import HeadraceError
from headrace.services.kafka.broker import METADATA_LIMIT, Partition


@dataclass(frozen=True, slots=True)
class CommitMetadata:
    """The note beside a commit."""

    positions: Mapping[Partition, int]
    """Where the companions stood when the record at the commit was first read."""
    owners: int = 0
    """Owners that began to work on what is open here, and have not handed it over in order."""

    def text(self) -> str:
        """As commit metadata. HeadraceError where it is more than a broker takes."""
        offsets = [self.positions[place] for place in sorted(self.positions)]
        content = {"at": offsets, "owners": self.owners} if self.owners else offsets
        text = json.dumps(content, separators=(",", ":"))
        if len(text) > METADATA_LIMIT:
            raise HeadraceError(
                f"the positions of {len(offsets)} partitions take {len(text)} bytes of commit "
                f"metadata, more than the {METADATA_LIMIT} that a broker takes: use fewer "
                f"partitions"
            )
        return text


def read_note(metadata: str, places: Sequence[Partition]) -> CommitMetadata:
    """The note beside a commit; positions of 0 where there is none.

    HeadraceError where it was made for other partitions than `places`.
    """
    if not metadata:
        return CommitMetadata(dict.fromkeys(places, 0))
    content = json.loads(metadata)
    offsets, owners = (content, 0) if isinstance(content, list) else content.values()
    if len(offsets) != len(places):
        raise HeadraceError(
            f"a commit notes {len(offsets)} companion positions where {len(places)} are read: "
            f"it was made with another recipe or number of partitions"
        )
    return CommitMetadata(dict(zip(sorted(places), offsets, strict=True)), owners)
