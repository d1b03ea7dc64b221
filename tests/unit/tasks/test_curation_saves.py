"""How many rollouts a curator saves if 70 % of the items teach nothing, in a closed loop."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

from headrace.services.tasks.curation.choose_items import Chosen, Curation
from headrace.services.tasks.curation.item_statistics import ItemStatistics
from tests.unit.tasks.test_curation import curated
from tests.unit.tasks.test_item_statistics import a_closed_group

SAMPLES, EPOCHS = 8, 3
PASSING = (0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.3, 0.5, 0.7)
"""The chance to pass of an item, by the last digit of its id: of seven, all rewards are equal."""


def rollouts_for_a_useful_group(items: int, *curators: Any) -> float:
    """Plays EPOCHS times `items` tasks, with items / 40 groups in flight.

    A group is useful if its rewards differ. docs/dataflow.md has the figures of 10,000 items.
    """
    curation = Curation(curated(*curators, options={"items": items}), ItemStatistics("default"))
    random = Random(0)
    live: deque[Chosen] = deque()
    closed = useful = 0
    for _ in range(EPOCHS * items):
        (*_, chosen) = curation.search()
        assert isinstance(chosen, Chosen)
        curation.accept(chosen)
        live.append(chosen)
        if len(live) > items // 40:
            done = live.popleft()
            passing = PASSING[int(done.item.item_id[-1])]
            rewards = [float(random.random() < passing) for _ in range(SAMPLES)]
            useful += len(set(rewards)) > 1
            group = a_closed_group(closed, done.item.item_id, *rewards, epoch=done.epoch)
            curation.on_group(group, closed)
            closed += 1
    return closed * SAMPLES / useful


def test_a_useful_group_needs_at_most_0_6_of_the_rollouts() -> None:
    items = 1_500
    uniform = rollouts_for_a_useful_group(items, "uniform")
    greso = rollouts_for_a_useful_group(items, "greso")
    pass_rate = rollouts_for_a_useful_group(items, "pass_rate")
    print(f"uniform {uniform:.1f}, greso {greso:.1f}, pass_rate {pass_rate:.1f}")
    assert greso / uniform <= 0.6
    assert pass_rate / uniform <= 0.6
