"""Items and opponents are chosen, amid kills: the log gives every choice again."""

from __future__ import annotations

import json
from collections import Counter
from random import Random
from typing import Any

import pytest

from headrace.schemas.events import ItemMeasured
from headrace.services.operate.verify.invariants.choice_checks import check_opponents
from headrace.services.operate.verify.invariants.log_facts import Facts
from tests.simulation.data_algorithms import CURATED, LEAGUE, STAGED, with_data
from tests.simulation.scenario import Scenario, calm, draw_only
from tests.simulation.simulate import simulate
from tests.tiers import first_in_every_change

SEEDS = first_in_every_change(range(4))
KILLS = ("kill", "source", "item-statistics", "assemble-groups", "repeat", "aimed")


def curating(**changes: Any) -> Scenario:
    """No faults, and four epochs of few items, chosen by all curators."""
    scenario = calm()
    tree = with_data(scenario.recipe, Random(0), [CURATED]).model_dump(mode="json")
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
    facts = facts_of(1, curating())
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
    facts = facts_of(2, curating(**changes))
    found = [one.event.labels["curation.stage"] for one in facts.tasks.values()]
    assert list(dict.fromkeys(found)) == ["one", "two", "three"]


@pytest.mark.parametrize("data", [(CURATED,), (CURATED, STAGED)])
@pytest.mark.parametrize("seed", SEEDS)
def test_choices_come_through_kills(seed: int, data: tuple[str, ...]) -> None:
    facts = facts_of(seed, draw_only(seed, (*KILLS, *data)))
    assert facts.events(ItemMeasured)


@pytest.mark.parametrize("seed", SEEDS)
def test_opponents_come_through_kills(seed: int) -> None:
    facts = facts_of(seed, draw_only(seed, ("kill", "source", "trainer", "inference", LEAGUE)))
    pinned = {use.version for one in facts.tasks.values() for use in one.event.roles.values()}
    assert pinned > {None}, pinned


def test_another_opponent_than_the_logs_is_found() -> None:
    scenario = draw_only(0, (LEAGUE,))
    facts = facts_of(0, scenario)
    assert list(check_opponents(facts, scenario.recipe)) == []
    for one in facts.tasks.values():
        rival = one.event.roles["rival"]
        if rival.version is not None:
            rival.__dict__["version"] = rival.version + 1
    assert list(check_opponents(facts, scenario.recipe))
