"""The version barrier, as batch assembly and the scheduler count it.

Batch n of a policy is assembled only if n is at most `barrier.versions` above the newest published
version of every other policy of the set. Since that number is at least 1, the slowest policy is
never held, so one can always go on. A skipped version counts as published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    batches: Mapping[str, int], published: Mapping[str, int], others: Mapping[str, Sequence[str]],
    versions: int,
) -> set[str]:  # fmt: skip
    """Returns the policies whose next batch the barrier holds; none of them if it holds the set.

    `batches` and `published` are the newest versions of both. `others` are those of `others_of`.
    """
    found = {
        name
        for name, batch in batches.items()
        if any(is_ahead(batch + 1, published.get(one), versions) for one in others[name])
    }
    return set() if all(name in found for name, one in others.items() if one) else found
