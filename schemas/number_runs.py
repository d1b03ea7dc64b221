"""A set of numbers as bytes: its inclusive runs, packed and compressed.

The bytes are an i32[] (see `packed.py`), compressed with zlib. It has two values for each run: how
many numbers are missing since the run before, or since the lowest number for the first run, and
how many numbers follow one another.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from headrace.schemas import packed

MAX_BYTES = 32 * 1024 * 1024
"""Maximum size of the runs in bytes, before they are compressed."""
FASTEST = 1


def pack_numbers(numbers: Iterable[int]) -> tuple[int, bytes]:
    """Returns the lowest of some ascending numbers, and the packed runs. (0, b"") without numbers.

    Raises OverflowError if a gap does not fit into int32.
    """
    ascending = iter(numbers)
    low = next(ascending, None)
    if low is None:
        return 0, b""
    values = [0]
    begin = last = low
    for number in ascending:
        if number != last + 1:
            values += (last + 1 - begin, number - last - 1)
            begin = number
        last = number
    values.append(last + 1 - begin)
    return low, zlib.compress(packed.pack_i32(values), FASTEST)


def unpack_numbers(low: int, data: bytes) -> Iterator[range]:
    """Yields the runs, ascending. Raises ValueError if the bytes are not what `pack_numbers` makes.

    The bytes are checked before the first run is yielded.
    """
    if not data:
        return iter(())
    unpacking = zlib.decompressobj()
    try:
        values = packed.unpack_i32(unpacking.decompress(data, MAX_BYTES))
    except zlib.error as error:
        raise ValueError(f"runs that zlib can't read: {error}") from error
    if unpacking.unconsumed_tail or not unpacking.eof or len(values) % 2:
        raise ValueError(f"runs that are cut off, or longer than {MAX_BYTES} bytes")
    gaps, lengths = values[::2], values[1::2]
    if gaps[:1] != [0] or min(gaps[1:], default=1) < 1 or min(lengths) < 1:
        raise ValueError("runs that are empty, or that do not ascend")
    return _runs(low, gaps, lengths)


def _runs(low: int, gaps: list[int], lengths: list[int]) -> Iterator[range]:
    at = low
    for gap, length in zip(gaps, lengths, strict=True):
        yield range(at + gap, at + gap + length)
        at += gap + length
