"""Which policy's statistics choose the items of a recipe's tasks, and whether it can do so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from headrace.schemas.recipe.policy import Policy

CURRICULUM = "curriculum"
"""The data set whose stages end by statistics."""


class CuratedTasks(Protocol):
    """The keys of `[tasks]` that matter here."""

    @property
    def purpose(self) -> str:
        """What the tasks are for."""

    @property
    def use(self) -> str:
        """The data set."""

    @property
    def curators(self) -> tuple[str | dict[str, Any], ...]:
        """The curators."""

    @property
    def curated_by(self) -> str | None:
        """The policy that the recipe names."""


def curating_policy(tasks: CuratedTasks, policies: Mapping[str, Policy]) -> str | None:
    """Returns the policy whose statistics count; None if the recipe uses no statistics."""
    if tasks.purpose != "train" or not (tasks.curators or tasks.use == CURRICULUM):
        return None
    trained = [name for name, policy in policies.items() if policy.training is not None]
    return tasks.curated_by or (trained[0] if len(trained) == 1 else None)


def check_curation(tasks: CuratedTasks, policies: Mapping[str, Policy]) -> None:
    """Raises ValueError if items can't be chosen by the statistics of a policy."""
    trained = [name for name, policy in policies.items() if policy.training is not None]
    names = ", ".join(trained) or "(no policy trains)"
    if tasks.curated_by is not None and tasks.curated_by not in trained:
        raise ValueError(
            f"tasks.curated_by: {tasks.curated_by!r} is not a policy that trains. Choose from "
            f"{names}"
        )
    if tasks.curators and tasks.purpose == "evaluate":
        raise ValueError(
            "tasks.curators: a run with tasks.purpose = 'evaluate' trains nothing, so it has no "
            "statistics. Remove one"
        )
    uses = "tasks.curators" if tasks.curators else f"the data set {CURRICULUM!r}"
    wanted = tasks.purpose == "train" and (tasks.curators or tasks.use == CURRICULUM)
    if wanted and tasks.curated_by is None and len(trained) != 1:
        raise ValueError(
            f"tasks.curated_by: {uses} needs the policy whose statistics count. Choose from {names}"
        )
