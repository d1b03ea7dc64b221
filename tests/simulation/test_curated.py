"""Items are chosen by their statistics, amid kills: the log gives every choice again."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from headrace.schemas.events import ItemMeasured
from tests.checker import Facts
from tests.simulation.scenario import Scenario, calm, draw_only
from tests.simulation.simulate import simulate

KILLS = ("kill", "source", "item-statistics", "assemble-groups", "repeat", "aimed")
CURATORS = (
    {"use": "pass_rate", "tries": 2, "low": 0.1, "high": 0.9},
    {"use": "greso", "window": 4, "warmup_epochs": 0},
    {"use": "difficulty", "target": 0.6, "floor": 0.3},
)


def curating(scenario: Scenario, **changes: Any) -> Scenario:
    """The scenario with four epochs of few items, chosen by all curators."""
    tree = scenario.recipe.model_dump(mode="json")
    tree["tasks"] |= {"options": {"items": 6}, "epochs": 4, "curators": CURATORS, "passing": 0.6}
    tree["tasks"] |= changes
    scenario.recipe = type(scenario.recipe).model_validate(tree)
    return scenario


def facts_of(seed: int, scenario: Scenario) -> Facts:
    result = simulate(seed, scenario=scenario)
    assert result.violations == []  # among them: other choices, and wrong statistics
    assert result.facts is not None
    return result.facts


def skipped(facts: Facts) -> Counter[str]:
    found: Counter[str] = Counter()
    for one in facts.tasks.values():
        found.update(json.loads(one.event.labels.get("curation.skipped", "{}")))
    return found


def test_items_are_skipped_and_counted_over_epochs() -> None:
    facts = facts_of(1, curating(calm()))
    assert {one.groups for one in facts.events(ItemMeasured)} >= {1, 2, 3}
    assert skipped(facts)
    assert len(facts.tasks) + skipped(facts).total() <= 24


def test_a_curriculum_goes_through_its_stages() -> None:
    stages = [
        {"name": "one", "use": "count", "options": {"items": 4}, "pass_rate": 0.1, "groups": 4},
        {"name": "two", "use": "count", "options": {"items": 3}, "passes": 2},
        {"name": "three", "use": "count", "options": {"items": 2}},
    ]
    changes = {"use": "curriculum", "options": {"stages": stages}, "curators": [], "epochs": 6}
    facts = facts_of(2, curating(calm(), **changes))
    found = [one.event.labels["curation.stage"] for one in facts.tasks.values()]
    assert list(dict.fromkeys(found)) == ["one", "two", "three"]


@pytest.mark.parametrize("seed", range(4))
def test_choices_come_through_kills(seed: int) -> None:
    facts = facts_of(seed, curating(draw_only(seed, KILLS)))
    assert facts.events(ItemMeasured)
