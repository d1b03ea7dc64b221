"""Which weights are needed: pure, by versions and times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import PolicyPublished, RunStateEntered
from headrace.schemas.topics import NAME
from headrace.schemas.untrusted.trusted_keys import TrustedKeys
from headrace.services.models.blob_owners import UNKNOWN, Marker, StoredBlob
from headrace.services.models.blobs import describe
from headrace.services.namespace.run_life import RunLife
from headrace.services.operate.prune.needs import (
    DEADLINE_S,
    ENDED_S,
    GRACE_S,
    PUT_S,
    UNNAMED_S,
    Namespace,
    OwnerNeeds,
    Published,
    needed_blobs,
    needed_versions,
    prunable_blobs,
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


@pytest.mark.parametrize("field", ["logprobs", "tensor_digests"])
def test_a_version_needs_what_describes_it_as_long_as_its_weights(field: str) -> None:
    space = Namespace("test", ended_at=0.0)
    for version in (1, 2):
        published = PolicyPublished(
            policy="default", version=version, status="trained", digest=bytes(32),
            full_version=version,
        )  # fmt: skip
        described = {field: describe(bytes([version]), "")}
        space.add(published.model_copy(update=described), NOW)
    first, second = (describe(bytes([version]), "").sha256.hex() for version in (1, 2))
    assert needed_blobs(space, 1, {}, NOW + 100) == {second}
    assert space.blobs() == {first, second}


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


def namespace(
    *, ended_at: float | None = None, recipe: str = '{"tasks": {"deadline_s": 60}}'
) -> Namespace:
    started = RunStateEntered(namespace="n", state="started", digest=bytes(32), recipe=recipe)
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


def test_a_run_that_goes_on_needs_the_opponents_of_its_tasks() -> None:
    recipe = {"tasks": {"deadline_s": 60, "league": {"roles": ["a"], "every": 20, "past": 2}}}
    space = namespace(recipe=json.dumps(recipe))
    # A task of an hour ago, when version 62 was the newest, may be played against 40 or 60.
    assert needed_blobs(space, 1, {}, NOW) - needed_blobs(namespace(), 1, {}, NOW) == {
        "default-40", "default-60",
    }  # fmt: skip
    ended = namespace(recipe=json.dumps(recipe), ended_at=0.0)
    assert needed_blobs(ended, 1, {}, NOW) == {"default-99", "tokenizer"}


@pytest.mark.parametrize(
    "recipe",
    ["", "no JSON", "[" * 100_000, "[]", '{"tasks": 3, "policies": [1]}',
     '{"tasks": {"league": 3}}', '{"tasks": {"league": {"roles": 3}}}',
     '{"tasks": {"deadline_s": "soon"}, "policies": {"p": 1}}',
     '{"reads_from": 3, "scheduler": 3}', '{"reads_from": ["../x", 3]}',
     f'{{"tasks": {{"deadline_s": 1{"0" * 400}}}}}'],
)  # fmt: skip
def test_a_recipe_of_another_team_may_be_anything(recipe: str) -> None:
    made = Namespace("n")
    made.add(RunStateEntered(namespace="n", state="started", digest=bytes(32), recipe=recipe), 1.0)
    assert (made.deadline_s(), made.models(), made.signers()) == (DEADLINE_S, [], {})
    # Commands without --namespace read the newest run, whoever started it.
    life = made.life
    assert (life.signers, life.trusted) == ({}, TrustedKeys())
    assert all(map(NAME.match, life.reads_from))


@pytest.mark.parametrize("signers", ["3", '"ed25519:x"', "{}", "null"])
def test_signers_of_another_team_may_be_anything(signers: str) -> None:
    recipe = f'{{"policies": {{"p": {{"signers": {signers}}}}}}}'
    made = Namespace("n")
    made.add(RunStateEntered(namespace="n", state="started", digest=bytes(32), recipe=recipe), 1.0)
    assert made.signers() == {}


def stored(name: str, age_s: float) -> StoredBlob:
    return StoredBlob(name, 7, NOW - age_s, Path(name or "put-x"))


OLD = 2 * UNNAMED_S
OURS, THEIRS = "cluster.ours", "cluster.theirs"


def marker(name: str, owner: str = OURS, age_s: float = OLD) -> Marker:
    return Marker(name, owner, NOW - age_s)


def pruned(
    blobs: list[StoredBlob], markers: list[Marker], unnamed: bool = False, **claims: OwnerNeeds
) -> dict[str, str]:
    """What may be removed, and its kind."""
    mine = {f"cluster.{name}": claim for name, claim in claims.items()}
    artifacts = {"artifact"} if unnamed else None
    found = prunable_blobs(blobs, markers, mine, artifacts, NOW)
    return {one.what: one.kind for one in found}


def test_only_what_was_published_goes_unless_asked_for() -> None:
    names = ("old", "new", "stray", "artifact")
    blobs = [stored(name, OLD) for name in (*names, "")]
    blobs += [stored("put-again", PUT_S - 1), stored("to-be-named", UNNAMED_S - 1)]
    markers = [marker(name) for name in (*names, "put-again", "to-be-named")]
    ours = OwnerNeeds(published={"old", "new", "put-again"}, needed={"new"})

    assert pruned(blobs, markers, ours=ours) == {"old": "blob"}
    unnamed = {"old": "blob", "stray": "blob", "put-x": "blob"}
    assert pruned(blobs, markers, True, ours=ours) == unnamed


@pytest.mark.parametrize("unnamed", [False, True])
def test_a_blob_that_another_owner_has_marked_stays(unnamed: bool) -> None:
    ours = OwnerNeeds(published={"shared"})
    both = [marker("shared"), marker("shared", THEIRS)]
    (item,) = prunable_blobs(
        [stored("shared", OLD)], both, {OURS: ours}, () if unnamed else None, NOW
    )
    assert (item.kind, item.size) == ("marker", 0)
    assert item.removal is not None
    assert item.removal.markers == {both[0]}

    for needed, expected in ((set[str](), {"shared": "blob"}), ({"shared"}, {})):
        theirs = OwnerNeeds({"shared"}, needed)
        found = pruned([stored("shared", OLD)], both, unnamed, ours=ours, theirs=theirs)
        assert found == expected


def test_a_blob_from_before_there_were_markers_goes_only_with_unnamed() -> None:
    blobs = [stored(name, OLD) for name in ("unmarked", "unknown", "needed", "of-another-broker")]
    blobs.append(stored("unmarked-and-new", UNNAMED_S - 1))
    markers = [marker("unknown"), marker("unknown", UNKNOWN)]
    ours = OwnerNeeds(published={"unmarked", "unknown", "needed"}, needed={"needed"})

    assert pruned(blobs, markers, ours=ours) == {"unknown": "marker"}
    gone = {"unmarked": "blob", "unknown": "blob", "of-another-broker": "blob"}
    assert pruned(blobs, markers, True, ours=ours) == gone


def test_the_marker_of_a_writer_that_died_goes_after_a_day() -> None:
    markers = [
        marker("died"),
        marker("puts-now", age_s=UNNAMED_S - 1),
        marker("theirs", THEIRS),
        marker("needed"),
    ]
    assert pruned([], markers, ours=OwnerNeeds(needed={"needed"})) == {"died": "marker"}


def test_a_forgotten_namespace_needs_nothing() -> None:
    blobs = [stored(name, 1.0) for name in ("mine", "shared", "needed")]
    markers = [marker(name, age_s=1.0) for name in ("mine", "shared", "needed", "absent")]
    markers.append(marker("shared", THEIRS))
    other = OwnerNeeds(needed={"needed"})
    assert pruned(blobs, markers, ours=OwnerNeeds(forgotten=True), other=other) == {
        "mine": "blob",
        "shared": "marker",
        "needed": "marker",
        "absent": "marker",
    }


NAMES = st.sampled_from("abcd")


@given(
    st.sets(NAMES),
    st.sets(st.tuples(NAMES, st.sampled_from([OURS, THEIRS, UNKNOWN]))),
    st.sets(NAMES),
    st.sets(NAMES),
    st.booleans(),
)
def test_what_has_a_foreign_marker_or_is_needed_never_goes(
    present: set[str],
    marks: set[tuple[str, str]],
    published: set[str],
    needed: set[str],
    unnamed: bool,
) -> None:
    claims = {OURS: OwnerNeeds(published | needed, needed)}
    blobs = [stored(name, OLD) for name in present]
    markers = [marker(name, owner) for name, owner in marks]
    for item in prunable_blobs(blobs, markers, claims, () if unnamed else None, NOW):
        assert item.removal is not None
        assert item.what not in needed
        owners = {one.owner for one in item.removal.markers}
        assert THEIRS not in owners
        if not unnamed:
            assert UNKNOWN not in owners or item.what not in present
        if item.kind == "blob":
            assert (item.what, THEIRS) not in marks
            assert unnamed or (item.what, OURS) in marks
