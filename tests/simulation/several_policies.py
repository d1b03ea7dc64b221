"""What a seed draws of several policies: roles, their own rewards, a barrier, a frozen one."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

from headrace.schemas.recipe.recipe import Recipe
from tests.simulation.data_algorithms import DATA, SYNC, with_data

SEVERAL, BARRIER = "several", "barrier"
"""Kinds of a scenario. No misbehaviour, and no excuse: two or three policies, with a barrier."""
NAMES = ("second", "third")
"""The other policies, and the roles that they play."""


def with_several(recipe: Recipe, chance: Random, *, barrier: bool | None = None) -> Recipe:
    """The recipe with one or two policies more, which differ in what they keep and in their speed.

    `barrier`: whether there is one. If it is None, chance decides.
    """
    tree = recipe.model_dump(mode="json")
    names = NAMES[: chance.choice([1, 1, 2])]
    for name in names:
        tree["policies"][name] = _another(tree["policies"]["default"], tree["mode"], chance)
    roles = {"policy": "default"} | {name: name for name in names}
    if tree["policies"]["default"]["groups"]["select"] is None and chance.random() < 0.2:
        roles["rival"] = "default"
    tree["tasks"]["roles"] = roles
    rewarded = [role for role in roles if chance.random() < 0.6]
    for agent in tree["agents"].values():
        agent["options"]["rewarded"] = rewarded
    if len(names) > 1 and chance.random() < 0.4:
        tree["policies"][names[-1]]["training"] = None
        tree["policies"][names[-1]]["groups"]["select"] = None
    if chance.random() < 0.5 if barrier is None else barrier:
        waiting = chance.choice([64, 2, 4])
        tree["barrier"] = {"versions": chance.choice([1, 1, 2, 3]), "waiting_batches": waiting}
    found = Recipe.model_validate(tree)
    for name in names:
        if found.policies[name].training is not None and chance.random() < 0.3:
            kinds = [kind for kind in DATA if kind != SYNC and chance.random() < 0.5]
            found = with_data(found, chance, kinds, name) if kinds else found
    return found


def _another(first: dict[str, Any], mode: str, chance: Random) -> dict[str, Any]:
    """A policy like the first one, with batches and a filter of its own."""
    policy = copy.deepcopy(first)
    policy["groups"] |= {"select": None, "filters": []}
    drops = chance.choice([None, None, "drop_many", "drop_many", "drop_all"])
    if drops is not None:
        policy["groups"]["filters"] = [f"tests.simulation.world:{drops}"]
    batches = policy["batches"]
    batches |= {"replay": None, "tokens": None, "groups": chance.choice([1, 2, 3])}
    if mode != "sync":
        batches |= {"max_staleness": chance.choice([0, 1, 4]), "prefetch": chance.choice([0, 1, 2])}
    return policy
