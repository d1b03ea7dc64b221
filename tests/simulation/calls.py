"""The calls of models: all that began in a run, and whether limits were kept over all processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

from headrace.schemas.recipe.recipe import Recipe
from headrace.services.worker.limits.limits_of import Limit, call_limits
from tests.simulation.virtual_time import OWNER, Owner, loop

EXACT_S = 1e-9
"""Virtual times are sums of floats."""


@dataclass(eq=False)
class MadeCall:
    """One call of a model. Times are in virtual seconds."""

    policy: str
    owner: Owner | None
    begun_s: float
    ended_s: float = inf


def made_calls() -> list[MadeCall]:
    """All calls on this loop, as they began."""
    found: list[MadeCall] = loop().__dict__.setdefault("made_calls", [])
    return found


def pauses(owner: Owner | None) -> list[list[float]]:
    """From when to when a process was frozen."""
    by_owner: dict[Owner | None, list[list[float]]] = loop().__dict__.setdefault("pauses", {})
    return by_owner.setdefault(owner, [])


@contextmanager
def calling(policy: str) -> Iterator[None]:
    """Surrounds a call of a policy's model."""
    call = MadeCall(policy, OWNER.get(), loop().time())
    made_calls().append(call)
    try:
        yield
    finally:
        call.ended_s = loop().time()


def exceeded(recipe: Recipe) -> Iterator[str]:
    """Complaints about limits that were not kept, in any window of time."""
    for policy in recipe.policies:
        calls = [call for call in made_calls() if call.policy == policy]
        for name, limit in call_limits(recipe, policy).items():
            yield from _too_often(name, limit, calls) if limit.period_ms else ()
            yield from _too_many(name, limit, calls) if not limit.period_ms else ()


def _too_often(name: str, limit: Limit, calls: list[MadeCall]) -> Iterator[str]:
    begun = sorted(call.begun_s for call in calls)
    for first, after in zip(begun, begun[limit.units :], strict=False):
        if after - first < limit.period_s - EXACT_S:
            yield f"limit: {name}: more than {limit.units} calls began from {first} to {after} s"
            return


def _too_many(name: str, limit: Limit, calls: list[MadeCall]) -> Iterator[str]:
    """A process that is frozen makes no progress with its calls: they don't count meanwhile."""
    moves: list[tuple[float, int]] = []
    for call in calls:
        begin_s = call.begun_s
        for frozen_s, thawed_s in pauses(call.owner):
            if begin_s < thawed_s and frozen_s < call.ended_s:
                moves += [(begin_s, 1), (max(begin_s, frozen_s), -1)]
                begin_s = thawed_s
        if begin_s < call.ended_s:
            moves += [(begin_s, 1), (call.ended_s, -1)]
    running = 0
    for at_s, change in sorted(moves):
        running += change
        if running > limit.units:
            yield f"limit: {name}: {running} of {limit.units} calls were in flight at {at_s} s"
            return
