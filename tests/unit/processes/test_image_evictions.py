"""Which images are removed: the least recently used ones, and none that is needed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.services.processes.docker.image_evictions import StoredImage, evictions

IMAGES = st.lists(
    st.builds(StoredImage, st.uuids().map(str), st.integers(0, 100), st.integers(0, 50).map(float)),
    max_size=12,
    unique_by=lambda image: image.digest,
)


@given(IMAGES, st.integers(-50, 500), st.floats(0, 60), st.integers(0, 3), st.data())
def test_enough_goes_and_not_more(
    images: list[StoredImage], excess: int, since: float, at_least: int, data: st.DataObject
) -> None:
    needed = {image.digest for image in images if data.draw(st.booleans())}
    chosen = evictions(images, needed, excess_bytes=excess, unused_since=since, at_least=at_least)
    by_digest = {image.digest: image for image in images}
    gone = [by_digest[digest] for digest in chosen]
    left = [i for i in images if i.digest not in needed and i.digest not in chosen]
    assert not needed & set(chosen)
    assert len(set(chosen)) == len(chosen)
    # The order is that of the last use, and nothing older stays.
    assert [image.used_at for image in gone] == sorted(image.used_at for image in gone)
    assert all(image.used_at >= max((i.used_at for i in gone), default=0.0) for image in left)
    if left:
        assert sum(image.own_bytes for image in gone) >= excess
        assert len(gone) >= at_least
        assert all(image.used_at >= since for image in left)
    if gone:  # the last one had to go
        last, before = gone[-1], gone[:-1]
        assert (
            sum(image.own_bytes for image in before) < excess
            or len(before) < at_least
            or last.used_at < since
        )
