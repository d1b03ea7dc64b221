"""What a commit stores beside its offset: positions, a count of owners, and what is done after it.

The text is the list of the side partitions' positions, in the order of the partitions, for example
`[3,7]`. If owners are counted, it is `{"at":[3,7],"owners":2}`. If all records before offset 90 are
done but for those that are held for long, it has `"done":90`, too. If a broker would not accept a
text of this length, the positions are packed: `{"at":"…","width":5}` has big-endian numbers of
5 bytes each in base85, which is enough for MOST_POSITIONS of them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.errors import HeadraceError
from headrace.services.kafka.broker import METADATA_LIMIT, Partition


@dataclass(frozen=True, slots=True)
class CommitMetadata:
    """The metadata of one partition's commit."""

    positions: Mapping[Partition, int]
    """Side partition to its position when the committed record was first read."""
    owners: int = 0
    """Owners that worked on the open records and did not release the partition cleanly."""
    done: int = 0
    """Records before this offset are done, but for those that are held for long."""

    def text(self) -> str:
        """The metadata as text. Raises HeadraceError if it is longer than a broker accepts."""
        offsets = [self.positions[each] for each in sorted(self.positions)]
        counts = {"owners": self.owners, "done": self.done}
        more = {name: count for name, count in counts.items() if count}
        text = _json({"at": offsets, **more} if more else offsets)
        if len(text) > METADATA_LIMIT:
            text = _json(_packed(offsets) | more)
        if len(text) > METADATA_LIMIT:
            raise HeadraceError(
                f"The positions of {len(offsets)} side partitions need {len(text)} bytes of commit "
                f"metadata, but a broker accepts {METADATA_LIMIT}. Use fewer partitions."
            )
        return text


def read_metadata(metadata: str, partitions: Sequence[Partition]) -> CommitMetadata:
    """Reads a commit's metadata. Without metadata all positions are 0.

    Raises HeadraceError if it was written for another number of side partitions.
    """
    if not metadata:
        return CommitMetadata(dict.fromkeys(partitions, 0))
    content = json.loads(metadata)
    if isinstance(content, list):
        content = {"at": content}
    offsets, owners, done = content["at"], content.get("owners", 0), content.get("done", 0)
    if isinstance(offsets, str):
        offsets = _unpacked(offsets, content["width"])
    if len(offsets) != len(partitions):
        raise HeadraceError(
            f"A commit has the positions of {len(offsets)} side partitions, but this worker reads "
            f"{len(partitions)}. It was written by a run of another recipe or with another number "
            f"of partitions. Use another --namespace."
        )
    return CommitMetadata(dict(zip(sorted(partitions), offsets, strict=True)), owners, done)


def _packed(offsets: Sequence[int]) -> dict[str, object]:
    """Returns offsets as text, with as many bytes for each as the largest one needs."""
    width = max(1, (max(offsets).bit_length() + 7) // 8)
    packed = b"".join(one.to_bytes(width, "big") for one in offsets)
    return {"at": base64.b85encode(packed).decode(), "width": width}


def _unpacked(text: str, width: int) -> list[int]:
    packed = base64.b85decode(text)
    return [int.from_bytes(packed[at : at + width], "big") for at in range(0, len(packed), width)]


def _json(content: object) -> str:
    return json.dumps(content, separators=(",", ":"))
