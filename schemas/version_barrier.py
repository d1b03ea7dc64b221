"""The version barrier, as batch assembly and the scheduler count it.

Batch n of a policy is assembled only if n is at most `barrier.versions` above the newest published
version of every other policy of the set. Since that number is at least 1, the slowest policy is
never held, so one can always go on. A skipped version counts as published.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.schemas.recipe.recipe import Recipe


def others_of(recipe: Recipe, policy: str) -> tuple[str, ...]:
    """Returns the other policies of a policy's set; none if it is in no set."""
    learning = [name for name, one in recipe.policies.items() if one.training is not None]
    chosen = (recipe.barrier.policies or learning) if recipe.barrier is not None else ()
    return tuple(name for name in chosen if name != policy) if policy in chosen else ()


def is_ahead(version: int, published: int | None, versions: int) -> bool:
    """Whether a version is too far ahead of another policy's newest published one."""
    return published is None or version - published > versions


def held_at_barrier(
    recipe: Recipe, batches: Mapping[str, int], published: Mapping[str, int]
) -> set[str]:
    """Returns the policies whose next batch the barrier holds; none of them if it holds the set.

    `batches` and `published` have the newest version of both by policy.
    """
    if recipe.barrier is None:
        return set()
    others = {name: others_of(recipe, name) for name in batches}
    ahead = recipe.barrier.versions
    held = {
        name
        for name, of_set in others.items()
        if any(is_ahead(batches[name] + 1, published.get(one), ahead) for one in of_set)
    }
    return held if any(one and name not in held for name, one in others.items()) else set()
