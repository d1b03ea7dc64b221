"""Owner markers: no order of a writer's and a prune's requests loses a blob that is needed."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.services.models import blob_owners
from headrace.services.models.blob_owners import (
    DEAD_S,
    OWNERS,
    BlobOwners,
    Marker,
    Removal,
    SmallFiles,
    StoredBlob,
)

T = TypeVar("T")

NAME = "ab" + 62 * "0"
A, B = "cluster.a", "cluster.b"


class Waits(Exception):
    """An actor has reached a request that it has not sent yet."""


@dataclass
class Actor:
    """A process that sends requests to the store, one after the other.

    Instead of a thread, it runs from the beginning for each request, with the answers so far.
    """

    name: str
    work: Callable[[Actor], None]
    writes: bool = False
    may_die: bool = False
    may_pause: bool = False
    """It may be stopped before it looks at the clock, until all others have ended."""
    answers: list[Any] = field(default_factory=list)
    """All that its state depends on."""
    next: tuple[str, Callable[[], Any]] | None = None
    """The request that it sends next; None if it has ended."""
    killed: bool = False
    paused: bool = False
    seen: int = -1
    """What `progress` was when it last went to sleep."""
    _at: int = 0

    def ask(self, what: str, request: Callable[[], T]) -> T:
        """Waits for its turn, then sends a request, whose answer comes at once."""
        if self._at == len(self.answers):
            self.next = self.next or (what, request)
            raise Waits
        self._at += 1
        answer: T = self.answers[self._at - 1]
        return answer

    def note(self, look: Callable[[], T]) -> T:
        """Asks without waiting for its turn."""
        if self._at == len(self.answers) and self.next is None:
            self.answers.append(look())
        return self.ask("", look)

    def run(self) -> None:
        """Runs to the next request."""
        self.next, self._at = None, 0
        with suppress(Waits):
            self.work(self)

    def step(self, progress: int) -> None:
        """Sends the next request."""
        assert self.next is not None
        self.answers.append(self.next[1]())
        self.run()
        if self.sleeps:
            self.seen = progress

    @property
    def sleeps(self) -> bool:
        return self.next is not None and self.next[0] == "sleep"


@dataclass
class Store:
    """A store with one blob that may be there, and the time."""

    files: dict[str, float] = field(default_factory=dict)
    blob: bool = True
    now: float = 0.0
    put: set[str] = field(default_factory=set)
    """Owners whose put has returned: from then on their events may name the blob."""

    def check(self) -> None:
        """Raises AssertionError if a blob is lost that an event may name."""
        for owner in self.put:
            assert self.blob, f"the blob of {owner} is lost"
            assert f"{OWNERS}/ab/{NAME[2:]}.{owner}" in self.files, f"the marker of {owner} is lost"


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


Make = Callable[[], tuple[Store, list[Actor]]]
Choose = Callable[[Store, list[Actor], int], int | None]
"""Returns which of so many choices to take, or None to stop."""


def run(make: Make, choose: Choose) -> Store | None:
    """Runs the actors once. Returns the store at the end; None if `choose` has stopped them.

    Raises AssertionError if a blob is lost.
    """
    store, actors = make()
    for actor in actors:
        actor.run()
    while choices := _choices(actors):
        choice = choose(store, actors, len(choices))
        if choice is None:
            return None
        choices[choice](store, _progress(actors))
        store.check()
    return store


def explore(make: Make) -> tuple[int, list[Store]]:
    """Runs the actors in all orders of their requests. Returns how many states, and the last ones.

    An order is not continued if another one has led to the same store and the same answers before.
    """
    states: set[Any] = set()
    ends: list[Store] = []
    prefixes: list[list[int]] = [[]]
    while prefixes:
        prefix, taken = prefixes.pop(), list[int]()

        def choose(
            store: Store,
            actors: list[Actor],
            count: int,
            prefix: list[int] = prefix,
            taken: list[int] = taken,
        ) -> int | None:
            at = len(taken)
            choice = prefix[at] if at < len(prefix) else 0
            if at >= len(prefix):
                state = (
                    tuple(sorted(store.files.items())), store.blob, store.now, tuple(store.put),
                    tuple((repr(one.answers), one.killed, one.paused, one.seen) for one in actors),
                )  # fmt: skip
                if state in states:
                    return None
                states.add(state)
                prefixes.extend([*taken, other] for other in range(1, count))
            taken.append(choice)
            return choice

        if (end := run(make, choose)) is not None:
            ends.append(end)
    return len(states), ends


def _progress(actors: list[Actor]) -> int:
    """How far the prunes are. Writers that sleep wait for nothing else."""
    return sum(len(one.answers) + one.killed + one.paused for one in actors if not one.writes)


def _choices(actors: list[Actor]) -> list[Callable[[Store, int], None]]:
    """What may happen next."""
    running = [one for one in actors if one.next is not None and not one.killed]
    alive = [one for one in running if not one.paused]
    if not alive:
        return [partial(_resume, one) for one in running]
    awake = [one for one in alive if not one.sleeps or one.seen < _progress(actors)]
    if not awake:  # All others wait for it, or are dead: time passes.
        return [partial(_wait, alive[0])]
    found: list[Callable[[Store, int], None]] = []
    for one in awake:
        found.append(partial(_step, one))
        if one.may_die:
            found.append(partial(_stop, one, "killed"))
        if one.may_pause and one.next is not None and one.next[0] == "clock":
            found.append(partial(_stop, one, "paused"))
    return found


def _step(actor: Actor, store: Store, progress: int) -> None:
    actor.step(progress)


def _stop(actor: Actor, how: str, store: Store, progress: int) -> None:
    setattr(actor, how, True)


def _wait(actor: Actor, store: Store, progress: int) -> None:
    store.now += DEAD_S
    actor.step(progress)


def _resume(actor: Actor, store: Store, progress: int) -> None:
    store.now += DEAD_S
    actor.paused = actor.may_pause = False
    actor.step(progress)


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


def test_a_prune_without_a_time_limit_loses_a_blob(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_owners, "REMOVAL_S", 10 * DEAD_S)

    def make() -> tuple[Store, list[Actor]]:
        store = at_first(A)
        return store, [prune(store, A, may_pause=True), writer(store, B)]

    with pytest.raises(AssertionError, match=r"is lost"):
        explore(make)
