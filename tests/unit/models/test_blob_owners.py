"""Owner markers: no order of a writer's and a prune's requests loses a blob that is needed."""

from __future__ import annotations

import re
from pathlib import PurePath
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import DependencyError
from headrace.services.models import blob_owners
from headrace.services.models.blob_owners import (
    DEAD_S,
    GIVE_UP_S,
    OWNERS,
    REMOVALS,
    BlobOwners,
    Marker,
    Removal,
    SmallFiles,
    StoredBlob,
)
from tests.unit.models.request_orders import NAME, Actor, Store, explore, run

A, B = "cluster.a", "cluster.b"


class Requests(SmallFiles):
    """The small files as one actor uses them."""

    def __init__(self, store: Store, actor: Actor) -> None:
        self._store = store
        self._actor = actor

    def touch(self, path: str) -> None:
        # What is there at the beginning has time 0, and what is written later has time 1.
        path = self._same_in_every_run(path)
        self._actor.ask(f"touch {path}", lambda: self._store.files.update({path: 1.0}))

    def times(self, folder: str) -> dict[str, float]:
        def find() -> dict[str, float]:
            return {path: at for path, at in self._store.files.items() if path.startswith(folder)}

        return self._actor.ask(f"list {folder}", find)

    def delete(self, path: str) -> None:
        path = self._same_in_every_run(path)
        self._actor.ask(f"delete {path}", lambda: self._store.files.pop(path, None))

    def _same_in_every_run(self, path: str) -> str:
        return re.sub(r"\.[0-9a-f]{32}$", f".{self._actor.name}", path)


def writer(store: Store, owner: str, kind: type[BlobOwners] = BlobOwners) -> Actor:
    """Marks the blob and then puts it, as `put` does."""

    def work(actor: Actor) -> None:
        def sleep(seconds: float) -> None:
            actor.ask("sleep", lambda: None)

        files = Requests(store, actor)
        owners = kind(files, owner, clock=lambda: actor.note(lambda: store.now), sleep=sleep)
        owners.add(NAME, lambda: actor.ask("holds", lambda: store.blob))

        def put() -> None:
            store.blob = True
            store.put.add(owner)

        def touch() -> bool:
            if store.blob:
                store.put.add(owner)
            return store.blob

        if not actor.ask("touch blob", touch):
            actor.ask("put blob", put)

    return Actor(f"writer of {owner}", work, writes=True)


def prune(store: Store, owner: str, *, may_die: bool = False, may_pause: bool = False) -> Actor:
    """Removes the old marker of an owner, and the blob if it has no other."""

    def work(actor: Actor) -> None:
        files = Requests(store, actor)
        clock = lambda: actor.ask("clock", lambda: store.now)  # noqa: E731
        blob = StoredBlob(NAME, 1, 0.0, PurePath(NAME))

        def remove_blob(_: StoredBlob, __: float) -> bool:
            def remove() -> bool:
                was, store.blob = store.blob, False
                return was

            return actor.ask("remove blob", remove)

        removal = Removal(NAME, frozenset({Marker(NAME, owner, 0.0)}), blob)
        BlobOwners(files, None, clock=clock).remove([removal], remove_blob)

    return Actor(f"prune of {owner}", work, may_die=may_die, may_pause=may_pause)


def at_first(*owners: str) -> Store:
    """A store in which these owners have put the blob long ago."""
    return Store({f"{OWNERS}/ab/{NAME[2:]}.{owner}": 0.0 for owner in owners})


@pytest.mark.parametrize("fault", ["none", "dies", "pauses"])
@pytest.mark.parametrize("who", [A, B])
def test_a_blob_that_is_put_during_a_prune_is_never_lost(who: str, fault: str) -> None:
    """The writer has the owner of the prune, or another one."""

    def make() -> tuple[Store, list[Actor]]:
        store = at_first(A)
        pruning = prune(store, A, may_die=fault == "dies", may_pause=fault == "pauses")
        return store, [pruning, writer(store, who)]

    states, ends = explore(make)
    assert states > 50
    assert {who} == set().union(*(store.put for store in ends))


@settings(max_examples=300)
@given(st.integers(0, 2**64), st.sets(st.sampled_from([A, B])))
def test_two_prunes_and_two_writers_lose_nothing(seed: int, before: set[str]) -> None:
    """In orders that are drawn at random, because there are too many."""
    random = Random(seed)

    def make() -> tuple[Store, list[Actor]]:
        store = at_first(*before)
        prunes = [prune(store, A, may_die=True), prune(store, B, may_pause=True)]
        return store, [*prunes, writer(store, A), writer(store, B)]

    end = run(make, lambda store, actors, count: random.randrange(count))
    assert end is not None
    assert end.put == {A, B}


def test_two_prunes_leave_nothing_that_nobody_needs() -> None:
    def make() -> tuple[Store, list[Actor]]:
        store = at_first(A, B)
        return store, [prune(store, A), prune(store, B)]

    for store in explore(make)[1]:
        assert not store.blob
        assert store.files == {}


class IgnoresNotices(BlobOwners):
    """A writer that does not wait."""

    def _notices(self, name: str, first_seen: dict[str, float]) -> bool:
        return False


def test_without_notices_a_blob_is_lost() -> None:
    """So `explore` finds what it looks for."""

    def make() -> tuple[Store, list[Actor]]:
        store = at_first(A)
        return store, [prune(store, A), writer(store, B, IgnoresNotices)]

    with pytest.raises(AssertionError, match=r"is lost"):
        explore(make)


@pytest.mark.parametrize(("lost", "why"), [("owners", "not listed"), ("", "has been removing")])
def test_a_writer_that_can_not_be_sure_gives_up(lost: str, why: str) -> None:
    """The store lists no markers, or a prune is repeated without end."""
    now = [0.0]

    class Files(SmallFiles):
        def touch(self, path: str) -> None:
            pass

        def times(self, folder: str) -> dict[str, float]:
            return {} if lost else {f"{REMOVALS}/ab.{now[0]}": now[0]}

        def delete(self, path: str) -> None:
            pass

    def sleep(seconds: float) -> None:
        now[0] += seconds

    owners = BlobOwners(Files(), A, clock=lambda: now[0], sleep=sleep)
    with pytest.raises(DependencyError, match=why):
        owners.add(NAME, lambda: False)
    assert now[0] == pytest.approx(GIVE_UP_S, abs=1.0)


def test_a_prune_without_a_time_limit_loses_a_blob(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_owners, "REMOVAL_S", 10 * DEAD_S)

    def make() -> tuple[Store, list[Actor]]:
        store = at_first(A)
        return store, [prune(store, A, may_pause=True), writer(store, B)]

    with pytest.raises(AssertionError, match=r"is lost"):
        explore(make)
