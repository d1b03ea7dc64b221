"""Java's own test vectors (`UtilsTest.testMurmur2` in Apache Kafka), and what follows from them."""

from __future__ import annotations

from typing import Any, cast

import pytest

from headrace.services.kafka.broker import Partition, Position, Record
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.convert import MAX_HEADERS, partition_of, to_record
from headrace.services.kafka.fetcher import CACHE_BYTES, Fetcher


@pytest.mark.parametrize(
    ("key", "signed"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
@pytest.mark.parametrize("partitions", [1, 10, 128, 2**31 - 1])
def test_a_key_has_the_partition_that_java_gives_it(
    key: bytes, signed: int, partitions: int
) -> None:
    assert partition_of(key, partitions) == (signed & 0x7FFFFFFF) % partitions


def test_keys_spread_over_all_partitions() -> None:
    assert {partition_of(str(task).encode(), 4) for task in range(100)} == {0, 1, 2, 3}


class StrangeMessage:
    """A message of confluent-kafka whose headers another program wrote."""

    def __init__(self, headers: list[tuple[str, bytes | None]] | None) -> None:
        self._headers = headers
        self._asked = False

    def headers(self) -> list[tuple[str, bytes | None]]:
        assert not self._asked, "a second answer can be a list with null pointers"
        self._asked = True
        if self._headers is None:  # what confluent-kafka does if a name is not UTF-8
            raise SystemError("<method 'headers'> returned a result with an exception set")
        return self._headers

    def topic(self) -> str:
        return "n.tasks.v1"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return 7

    def timestamp(self) -> tuple[int, int]:
        return 1, 2_000

    def key(self) -> bytes:
        return b"key"

    def value(self) -> bytes:
        return b"value"


@pytest.mark.parametrize(
    "headers", [None, [("x", b"")] * (MAX_HEADERS + 1)], ids=["not UTF-8", "too many"]
)
def test_a_record_whose_headers_cannot_be_read_comes_without_them(
    headers: list[tuple[str, bytes | None]] | None,
) -> None:
    record = to_record(cast("Any", StrangeMessage(headers)))
    assert record == Record(Partition("n.tasks.v1", 0), 7, 2.0, b"key", b"value", [])


def test_a_header_without_a_value_is_empty() -> None:
    record = to_record(cast("Any", StrangeMessage([("theirs", None), ("other", b"1")])))
    assert record.headers == [("theirs", b""), ("other", b"1")]


def test_the_cache_of_a_fetcher_stays_bounded_whatever_the_records_are() -> None:
    fetcher = Fetcher(KafkaSettings("127.0.0.1:1", "test"))
    partition, half = Partition("n.trajectories.v1", 0), CACHE_BYTES // 2
    for offset in range(8):
        fetcher._keep(Record(partition, offset, 0.0, None, None, [("large", bytes(half))]))
    assert list(fetcher._cache) == [Position(partition, 7)]
    for _ in range(4):  # read again, because a fetch went back
        fetcher._keep(Record(partition, 9, 0.0, None, bytes(half), []))
    assert list(fetcher._cache) == [Position(partition, 9)]
    fetcher._thread.shutdown()
