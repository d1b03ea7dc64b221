"""What to say where the log does not hold what is to be read: what was lost, and what to do."""

from __future__ import annotations

from headrace.errors import RecordsLost
from headrace.services.kafka.broker import Partition

_TO_DO = "docs/operations.md, `Records that are gone`, says how to go on"


def records_lost(
    place: Partition, offset: int | None, bounds: tuple[int, int] | None, reader: str = ""
) -> RecordsLost:
    """The error for an offset that can't be read.

    `bounds` are the partition's first offset and its end; None where they can't be had. `reader`
    is who stands there: a consumer group, or empty for a reference.
    """
    where = f"{place.topic}/{place.number}"
    who = f"{reader} goes on at" if reader else "what is needed is"
    if offset is None or bounds is None:
        wanted = "an offset" if offset is None else f"offset {offset}"
        return RecordsLost(f"{where}: {who} {wanted}, which the log does not hold. {_TO_DO}")
    first, end = bounds
    if offset < first:
        lost, why = (offset, first - 1), f"the log begins at {first} now: older ones were deleted"
    elif offset > end:
        lost, why = (end, offset - 1), f"the log ends at {end}: was the topic made anew?"
    else:
        lost, why = (offset, offset), f"it holds {first} to {end}, and there a gap"
    count = lost[1] - lost[0] + 1
    return RecordsLost(
        f"{where}: {count:,} {'record is' if count == 1 else 'records are'} lost, offsets "
        f"{lost[0]} to {lost[1]}: {who} {offset}, and {why}. {_TO_DO}"
    )
