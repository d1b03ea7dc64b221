"""Which policy a job works for."""

from __future__ import annotations

from headrace.errors import UsageError
from headrace.schemas.recipe.recipe import Recipe


def trained_policy(recipe: Recipe, policy: str | None) -> str:
    """Returns `policy`, or if it is None, the only policy that trains.

    Raises UsageError if `policy` does not train, or is None and not exactly one policy trains.
    """
    trained = [name for name, settings in recipe.policies.items() if settings.training is not None]
    if policy in trained:
        return policy
    if policy is None and len(trained) == 1:
        return trained[0]
    raise UsageError(
        f"--policy is {policy}, but this job needs one policy that trains: name one of "
        f"{', '.join(trained) or '(no policy of the recipe trains)'}"
    )
