"""What the rules of routing share: numbers that look random and are equal in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

USED = 4
"""Requests go to at most so many of a worker's partitions. If another worker gets one of them, it
gets only a part of what is in flight."""
IN_ONE = 256
"""A worker that has less gets all in one partition. Kafka needs less CPU if more records come in
one batch."""
COMPARED = 8
"""At most so many workers are compared for one request, beside the one that it prefers."""
MOST_FORGOTTEN = 64
"""About so many workers that have gone are kept in memory."""


def mixed(text: str) -> int:
    """A number that looks random, and is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def place_in_order(task: int, worker: str) -> int:
    """A number that looks random, and is the same in every process.

    Each task prefers the worker with the greatest one (rendezvous hashing). If a worker goes, only
    the tasks that preferred it prefer another one.
    """
    return (_of_task(task) ^ _of_worker(worker)) * _ODD & _BITS


_BITS = 2**64 - 1
_ODD = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: with it, the highest bits of a product depend on all others."""


@lru_cache(64)
def _of_task(task: int) -> int:
    return mixed(str(task))


@lru_cache(16_384)
def _of_worker(worker: str) -> int:
    return mixed(worker)


def partition_for(episode: str, held: Sequence[int], load: float) -> int:
    """Returns one of a worker's partitions for a request. `held` are all of them, at least one.

    `load` is how many requests or environments the worker has. The requests of an episode go to
    one partition as long as neither changes.
    """
    return held[mixed(episode) % min(USED, len(held), 1 + int(load // IN_ONE))]
