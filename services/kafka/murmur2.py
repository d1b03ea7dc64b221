"""The partition of a key, by MurmurHash2 as Kafka's Java clients use it.

Source: `org.apache.kafka.common.utils.Utils.murmur2` and `toPositive`. librdkafka's partitioner
`murmur2_random` and aiokafka's default give the same result, so all clients agree on the partition
of a task's events.
"""

from __future__ import annotations

_SEED = 0x9747B28C
_MULTIPLIER = 0x5BD1E995
_MASK = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """The hash as an unsigned 32-bit number (Java prints the same bits signed)."""
    length = len(data)
    value = (_SEED ^ length) & _MASK
    whole = length & ~3
    for start in range(0, whole, 4):
        block = int.from_bytes(data[start : start + 4], "little") * _MULTIPLIER & _MASK
        block = (block ^ block >> 24) * _MULTIPLIER & _MASK
        value = (value * _MULTIPLIER & _MASK) ^ block
    if whole < length:
        value = (value ^ int.from_bytes(data[whole:], "little")) * _MULTIPLIER & _MASK
    value = (value ^ value >> 13) * _MULTIPLIER & _MASK
    return value ^ value >> 15


def partition_of(key: bytes, partitions: int) -> int:
    """The number of the key's partition in a topic with `partitions` partitions."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions
