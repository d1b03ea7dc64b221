"""Which weights are needed: pure, by versions and times."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import RunStateEntered
from headrace.services.models.blobs import StoredBlob
from headrace.services.namespace.run_life import RunLife
from headrace.services.operate.prune.needs import (
    ENDED_S,
    GRACE_S,
    PUT_S,
    UNNAMED_S,
    Namespace,
    Published,
    needed_blobs,
    needed_versions,
    needless_blobs,
)

NOW = 1_000_000.0


def history(count: int, every_s: float = 100.0, policy: str = "default") -> list[Published]:
    """Versions 0 to count - 1, the newest published now."""
    return [
        Published(
            policy, n, NOW - (count - 1 - n) * every_s, frozenset({f"{policy}-{n}"}), "tokenizer"
        )
        for n in range(count)
    ]


@pytest.mark.parametrize(
    ("keep", "checkpoints", "newest_since", "needed"),
    [
        (1, (), None, {9}),
        (3, (), None, {7, 8, 9}),
        (1, (4, 77), None, {4, 9}),
        # Version 7 was the newest until 8 was published, 100 s ago.
        (1, (), NOW - 100, {7, 8, 9}),
        (1, (), NOW - 99, {8, 9}),
        (20, (), None, set(range(10))),
    ],
)
def test_the_newest_checkpoints_and_what_episodes_hold_are_needed(
    keep: int, checkpoints: tuple[int, ...], newest_since: float | None, needed: set[int]
) -> None:
    assert needed_versions(history(10), keep, checkpoints, newest_since) == needed


def test_a_version_needs_the_whole_weights_and_the_deltas_that_it_builds_on() -> None:
    space = namespace(ended_at=0.0)
    space.publications.append(
        Published("default", 100, NOW + 1, frozenset({"default-98", "delta-99", "delta-100"}), "t")
    )
    needed = needed_blobs(space, 1, {}, NOW)
    assert needed == {"default-98", "delta-99", "delta-100", "tokenizer", "t"}


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=30).map(sorted),
    st.integers(1, 5),
    st.floats(0, 1e6),
)
def test_what_was_the_newest_since_then_is_always_needed(
    times: list[float], keep: int, since: float
) -> None:
    publications = [Published("p", n, at) for n, at in enumerate(times)]
    needed = needed_versions(publications, keep, (), since)
    newest_then = max((n for n, at in enumerate(times) if at <= since), default=0)
    assert set(range(newest_then + 1, len(times))) <= needed
    assert len(times) - 1 in needed
    assert newest_then in needed or times[newest_then + 1] <= since


def namespace(*, ended_at: float | None = None) -> Namespace:
    started = RunStateEntered(
        namespace="n", state="started", digest=bytes(32), recipe='{"tasks": {"deadline_s": 60}}'
    )
    return Namespace("n", RunLife(started), ended_at, history(100))


def test_a_run_that_goes_on_needs_what_an_episode_may_hold() -> None:
    kept = {
        int(name.split("-")[1]) for name in needed_blobs(namespace(), 1, {}, NOW) if "-" in name
    }
    assert kept == set(range(99 - int((60 + GRACE_S) / 100) - 1, 100))
    ended = namespace(ended_at=NOW - ENDED_S)
    assert needed_blobs(ended, 1, {"default": [5]}, NOW) == {"default-99", "default-5", "tokenizer"}
    just_ended = namespace(ended_at=NOW - ENDED_S + 1)
    assert len(needed_blobs(just_ended, 1, {}, NOW)) > 30


def stored(name: str, age_s: float) -> StoredBlob:
    return StoredBlob(name, 7, NOW - age_s, Path(name or "put-x"))


def test_only_what_was_published_goes_unless_asked_for() -> None:
    blobs = [stored(name, 2 * UNNAMED_S) for name in ("old", "new", "theirs", "artifact", "")]
    blobs += [stored("old-but-put-again", PUT_S - 1), stored("about-to-be-named", UNNAMED_S - 1)]
    published = {"old", "new", "old-but-put-again"}

    def gone(named: set[str] | None) -> list[str]:
        return [one.what for one in needless_blobs(blobs, published, {"new"}, named, NOW)]

    assert gone(None) == ["old"]
    assert gone({*published, "artifact"}) == ["old", "theirs", "put-x"]
