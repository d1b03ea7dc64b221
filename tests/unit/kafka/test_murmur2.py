"""Java's own test vectors (`UtilsTest.testMurmur2` in Apache Kafka), and what follows from them."""

from __future__ import annotations

import pytest

from headrace.services.kafka.murmur2 import murmur2, partition_of


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
def test_it_hashes_as_java_does(key: bytes, signed: int) -> None:
    assert murmur2(key) == signed % 2**32


def test_negative_hashes_have_partitions_too() -> None:
    assert partition_of(b"21", 10) == (-973932308 & 0x7FFFFFFF) % 10
    assert {partition_of(str(task).encode(), 4) for task in range(100)} == {0, 1, 2, 3}
