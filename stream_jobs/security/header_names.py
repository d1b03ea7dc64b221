"""Lets Faust read records with headers whose names are not UTF-8.

aiokafka raises UnicodeDecodeError for such a record each time that it tries. So one record, which
any program may write, would stop the job for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from aiokafka.consumer import fetcher  # type: ignore[import-untyped]
from aiokafka.errors import CorruptRecordException  # type: ignore[import-untyped]
from aiokafka.record.default_records import (  # type: ignore[import-untyped]
    DefaultRecordBatch,
    _DefaultRecordBatchPy,
)
from aiokafka.record.memory_records import _MemoryRecordsPy  # type: ignore[import-untyped]


def accept_any_header_names() -> None:
    """Makes aiokafka's consumers in this process read names with U+FFFD for what is not UTF-8."""
    fetcher.MemoryRecords = _AnyRecords


class _AnyRecords(_MemoryRecordsPy):  # type: ignore[misc]
    """What a broker has sent for one partition: batches of records."""

    def next_batch(self) -> Any:
        data = self._next_slice
        batch = super().next_batch()
        return _AnyBatch(batch, data) if isinstance(batch, DefaultRecordBatch) else batch


class _AnyBatch:
    """A batch. aiokafka's compiled code reads it, and its Python code from such a record on."""

    def __init__(self, batch: Any, data: memoryview) -> None:
        self._batch = batch
        self._data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def __iter__(self) -> Iterator[Any]:
        done = 0
        try:
            for record in self._batch:
                yield record
                done += 1
        except (UnicodeDecodeError, CorruptRecordException):  # The latter without compiled code.
            yield from islice(_LenientBatch(self._data), done, None)


class _LenientBatch(_DefaultRecordBatchPy):  # type: ignore[misc]
    _buffer: bytearray

    def _maybe_uncompress(self) -> None:
        super()._maybe_uncompress()
        self._buffer = _LenientBytes(self._buffer)


class _LenientBytes(bytearray):
    """Bytes whose parts can be decoded, whatever they are."""

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return _LenientBytes(found) if isinstance(found, bytearray) else found

    def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
        return super().decode(encoding, "replace")
