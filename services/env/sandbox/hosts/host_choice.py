"""Which host of a pool gets an episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostLoad:
    """What counts of a host."""

    up: bool
    """Whether it answered its last call."""
    episodes: int
    """The worker's episodes that it has, or will have."""
    slots: int
    """Most containers that it should have at once."""
    has_image: bool
    """Whether it has the episode's image, or is pulling it."""


def choose_host(hosts: Sequence[HostLoad]) -> int:
    """Returns the index of the host that an episode should go to.

    A host with the image and a free slot goes first, then any host with a free slot, then any host.
    Among equals, the one with the smallest share of its slots taken. Hosts that don't answer get an
    episode only if no other is left.
    """
    allowed = [index for index, host in enumerate(hosts) if host.up] or list(range(len(hosts)))

    def rank(index: int) -> tuple[int, float, bool, int]:
        host = hosts[index]
        free = host.episodes < host.slots
        order = 0 if free and host.has_image else 1 if free else 2
        return order, host.episodes / host.slots, not host.has_image, index

    return min(allowed, key=rank)
