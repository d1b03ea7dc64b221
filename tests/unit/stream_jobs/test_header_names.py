"""Records whose header names are not UTF-8, as a broker sends them to aiokafka."""

from __future__ import annotations

import pytest
from aiokafka.consumer import fetcher  # type: ignore[import-untyped]
from aiokafka.errors import CorruptRecordException  # type: ignore[import-untyped]
from aiokafka.record.default_records import (  # type: ignore[import-untyped]
    _DefaultRecordBatchBuilderPy,
)

from headrace.stream_jobs.security.header_names import accept_any_header_names
from tests.integration.stranger import NotText

NONE, GZIP, ZSTD = 0, 1, 4


@pytest.fixture(autouse=True)
def accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "MemoryRecords", fetcher.MemoryRecords)  # restored at the end
    accept_any_header_names()


def batch(names: list[str], codec: int = NONE) -> bytes:
    builder = _DefaultRecordBatchBuilderPy(2, codec, False, -1, -1, -1, 1 << 20)
    for offset, name in enumerate(names):
        headers = [(name, b"1"), ("ok", None)]
        builder.append(offset, 1_000 + offset, b"key", b"value %d" % offset, headers)
    return bytes(builder.build())


@pytest.mark.parametrize("codec", [NONE, GZIP, ZSTD])
def test_all_records_of_a_batch_are_read_whatever_their_headers(codec: int) -> None:
    names = ["good", NotText("a"), "good", NotText("b")]
    records = fetcher.MemoryRecords(batch(names, codec) + batch(["last"], codec))
    read = []
    while records.has_next():
        one = records.next_batch()
        assert one.validate_crc()
        assert (one.is_control_batch, one.producer_id) == (False, -1)
        read.append([(r.offset, r.timestamp, r.key, r.value, r.headers) for r in one])
    expected = [
        (at, 1_000 + at, b"key", b"value %d" % at, [(name, b"1"), ("ok", None)])
        for at, name in enumerate(["good", "\ufffd", "good", "\ufffd"])
    ]
    assert read[0] == expected
    assert [one[3:] for one in read[1]] == [(b"value 0", [("last", b"1"), ("ok", None)])]


def test_a_batch_that_is_not_whole_is_still_an_error() -> None:
    torn = bytearray(batch([NotText("a"), "b"]))
    torn[-1] ^= 0xFF
    one = fetcher.MemoryRecords(bytes(torn)).next_batch()
    assert not one.validate_crc()
    with pytest.raises(CorruptRecordException):
        list(one)
