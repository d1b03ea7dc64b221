"""Java's own test vectors (`UtilsTest.testMurmur2` in Apache Kafka), and what follows from them."""

from __future__ import annotations

import pytest

from headrace.services.kafka.convert import partition_of


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
