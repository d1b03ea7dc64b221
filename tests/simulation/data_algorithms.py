"""What a seed draws of data algorithms: replay, batches by tokens, selections, synchronous runs.

Curators and a league are only there if they are asked for.
"""

from __future__ import annotations

from collections.abc import Collection
from random import Random
from typing import Any

from headrace.schemas.recipe.recipe import Recipe

REPLAY, TOKENS, BEST_OF, SYNC = "replay", "tokens", "best_of", "sync"
DATA = (REPLAY, TOKENS, BEST_OF, SYNC)
"""No misbehaviour, and no excuse: what is asked of batch assembly."""
CURATED, STAGED, LEAGUE = "curators", "curriculum", "league"
ASKED = (CURATED, STAGED, LEAGUE)
"""As DATA, but chance draws none of them: what is asked of the task source."""
CURATORS = (
    {"use": "pass_rate", "tries": 2, "low": 0.1, "high": 0.9},
    {"use": "greso", "window": 4, "warmup_epochs": 0},
    {"use": "difficulty", "target": 0.6, "floor": 0.3},
)


def with_data(
    recipe: Recipe, chance: Random, kinds: Collection[str] = (), name: str = "default"
) -> Recipe:
    """The recipe with these kinds of DATA and ASKED for a policy. If no kind is given, chance draws
    some of DATA."""
    kinds = kinds or {kind for kind in DATA if chance.random() < 0.5}
    tree = recipe.model_dump(mode="json")
    policy = tree["policies"][name]
    batches = policy["batches"]
    if SYNC in kinds:
        tree["mode"] = "sync"
        for one in tree["policies"].values():
            one["batches"] |= {"max_staleness": 0, "prefetch": 0}
    if REPLAY in kinds:
        tree["tasks"]["options"]["items"] = 24
        _add_replay(policy, chance)
    if TOKENS in kinds:
        batches["tokens"] = chance.choice([4, 20, 60])
    if BEST_OF in kinds:
        by: dict[str, Any] = chance.choice([{}, {"by": "tokens", "max_tokens": 12}])
        by |= {"advantages": chance.choice(["selected", "all"])}
        policy["groups"]["select"] = {"use": "best_of", "samples": chance.choice([1, 2]), **by}
    if CURATED in kinds:  # four epochs of few items, chosen by all curators
        tree["tasks"] |= {"options": {"items": 6}, "epochs": 4, "passing": 0.6}
        tree["tasks"]["curators"] = CURATORS
    if STAGED in kinds:  # a stage whose gate opens some time, and one of the same items
        first = {"name": "one", "use": "count", "options": {"items": 5}, "pass_rate": 0.4}
        stages = [first | {"groups": 8, "passes": 4}, first | {"name": "two"}]
        tree["tasks"] |= {"use": "curriculum", "options": {"stages": stages}, "epochs": 6}
    if LEAGUE in kinds:  # in a part of the tasks, a past version plays one of the roles
        tree["tasks"]["options"]["items"] = 24
        tree["tasks"]["roles"]["rival"] = name
        tree["tasks"]["league"] = {"roles": ["rival"], "every": 1, "past": 4, "share": 0.5}
    if SYNC in kinds:
        tree["scheduler"]["live_episodes"] = None
    return Recipe.model_validate(tree)


def _add_replay(policy: dict[str, Any], chance: Random) -> None:
    """Replay, and enough batches and groups that there is something to replay."""
    policy["groups"]["filters"] = []
    batches = policy["batches"]
    batches["prefetch"] = min(1, batches["prefetch"])
    groups = batches["groups"] = max(2, batches["groups"])
    uses = chance.choice([2, 3, 3])
    most = min(1 - 1 / uses, (groups - 1) / groups)
    share = chance.choice([0.2, int(100 * most) / 100])
    age = batches["prefetch"] + chance.choice([1, 3, 8])
    weight = chance.choice([1.0, 0.5])
    if policy["training"]["teacher"]:
        weight = 1.0  # the loss `distill` takes no other
    batches["replay"] = {"share": share, "max_uses": uses, "max_age": age, "weight": weight}
