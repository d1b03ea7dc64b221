"""Runs processes that share a blob store, with their requests in every order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from headrace.services.models.blob_owners import DEAD_S, OWNERS

T = TypeVar("T")

NAME = "ab" + 62 * "0"
"""The only blob."""


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
