"""The contract of curators, as a check that their authors can call in a test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.events import GroupClosed
from headrace.services.tasks.curation.curator import Curator
from headrace.services.tasks.curation.item_statistics import ItemStatistics

GROUPS, ITEMS, SAMPLES, EPOCHS = 400, 20, 4, 4


def check_contract(curator: Curator, seed: int = 0) -> None:
    """Plays groups of items of all kinds, and checks all that a curator must keep.

    A chance is a number from 0 to 1. It follows from the statistics, the epoch, the options and the
    state, so a second call and a second process with the same groups give the same. The state is
    JSON, and a copy that restores it continues with the same chances. Raises UsageError, which says
    what is wrong, and what the curator raises itself. `curator` should be new. It stays as it is.
    """
    name = type(curator).__name__
    first, second = _copy(curator), _copy(curator)
    statistics = ItemStatistics("default")
    for offset, group in enumerate(_groups(Random(seed))):
        statistics.on_group(group, offset)
        first.on_group(group)
        second.on_group(group)
        if offset % 40 == 7:  # Another process takes over.
            second = _restored(second)
        chances = [_chances(one, statistics, group.epoch) for one in (first, first, second)]
        if chances[0] != chances[1]:
            raise UsageError(
                f"{name}.chance gave {chances[0]}, and for the same items at once {chances[1]}. "
                "Return a chance, and draw no random number: the task source draws it"
            )
        if chances[0] != chances[2]:
            raise UsageError(
                f"{name} gave the chances {chances[0]}, and a copy with the same groups, which was "
                f"restored from {name}.state(), gave {chances[2]}. Let `state` return all that "
                "`on_group` changes, and use no clock and no random number"
            )


def _copy(curator: Curator) -> Curator:
    return type(curator).model_validate(curator.model_dump())


def _restored(curator: Curator) -> Curator:
    name, state = type(curator).__name__, curator.state()
    try:
        text = json.dumps(state)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}.state() returned {state!r}, not JSON: {error}") from error
    other = _copy(curator)
    other.restore(json.loads(text))
    return other


def _chances(curator: Curator, statistics: ItemStatistics, epoch: int) -> list[float]:
    found = []
    for item_id in ("unknown", *statistics):
        chance = curator.chance(statistics.get(item_id), epoch)
        if not isinstance(chance, int | float) or not 0 <= chance <= 1:
            raise UsageError(
                f"{type(curator).__name__}.chance returned {chance!r} for "
                f"{statistics.get(item_id)}. Return a number from 0 to 1"
            )
        found.append(float(chance))
    return found


def _groups(random: Random) -> Iterator[GroupClosed]:
    """Yields groups of items that always pass, never pass, and pass now and then."""
    for task in range(GROUPS):
        item = random.randrange(ITEMS)
        rewards = [float(random.random() < (0.0, 1.0, 0.5, 0.9)[item % 4]) for _ in range(SAMPLES)]
        mean = sum(rewards) / SAMPLES
        fields: dict[str, Any] = {"mean": mean, "deviation": (mean * (1 - mean)) ** 0.5}
        yield GroupClosed(
            task=task,
            policy="default",
            item_id=f"item {item}",
            epoch=task * EPOCHS // GROUPS,
            verdict="scored",
            rewarded=SAMPLES,
            passed=int(sum(rewards)),
            sampled_tokens=100 * SAMPLES,
            newest_version=task // 16,
            ended=task * 1000,
            **fields,
        )
