"""Which images a host removes: those that nobody needs, the least recently used first."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image that Headrace pulled."""

    digest: str
    own_bytes: int
    """Bytes that its removal frees: those of the layers that no other image has."""
    used_at: float
    """When it was used last, in seconds since the epoch."""


def evictions(
    images: Iterable[StoredImage],
    needed: Collection[str],
    *,
    excess_bytes: int,
    unused_since: float,
    at_least: int = 0,
) -> list[str]:
    """Returns the digests of the images to remove, in this order.

    It removes images until `excess_bytes` are freed and `at_least` images are gone, and all images
    that were used last before `unused_since`. It keeps the digests in `needed` in any case.
    """
    removed: list[str] = []
    left = excess_bytes
    for image in sorted(images, key=lambda image: (image.used_at, image.digest)):
        if image.digest in needed:
            continue
        if left <= 0 and len(removed) >= at_least and image.used_at >= unused_since:
            break
        removed.append(image.digest)
        left -= image.own_bytes
    return removed
