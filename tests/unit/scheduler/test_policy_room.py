"""How many groups of a policy may start, and what it costs to find out if thousands wait."""

from __future__ import annotations

import pytest

from headrace.schemas.frontier import Frontier
from headrace.schemas.recipe.batch_settings import Batches
from headrace.schemas.staleness import Staleness
from headrace.services.scheduler.policy_room import PolicyRoom

GROUPS = 10_000
"""Each took 18 ms to close when all that had closed were judged again: three minutes in all."""


@pytest.mark.parametrize("tokens", [None, 1_000_000])
def test_a_group_that_closes_is_judged_alone(
    tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = 0
    behind = Staleness.behind

    def counted(self: Staleness, oldest: int, newest: int) -> int:
        nonlocal judged
        judged += 1
        return behind(self, oldest, newest)

    monkeypatch.setattr(Staleness, "behind", counted)
    settings = Batches(groups=256, max_staleness=40, tokens=tokens)
    room = PolicyRoom(settings, 1_000)
    room.published = 0
    for number in range(GROUPS):
        room.start(number)
        room.close(number, 0, 100)
    assert judged == GROUPS

    # And a batch frees all that it decides, or makes stale.
    room.on_batch(41, Frontier(256), ())
    assert judged == 2 * GROUPS - 256
    assert not room.open
    room.start(GROUPS)
    room.close(GROUPS, 41, 700)
    room.published = 41
    assert room.room == 256 * 41 - 1


@pytest.mark.parametrize("tokens", [None, 1_000_000, 600])
def test_batches_that_wait_are_full_by_tokens_or_by_groups(tokens: int | None) -> None:
    room = PolicyRoom(Batches(groups=8, max_staleness=20, tokens=tokens), 1_000)
    room.published = 0
    started = 0
    while room.room:
        room.start(started)
        started += 1
        room.close(started - 1, 0, 100)
        if started >= 8:
            room.on_batch(1, Frontier(8), ())  # the trainer is busy with it
    assert started == 8 + 2 * (8 if tokens != 600 else 6)
