"""Lets the starts of many episodes share what they have in common, which saves memory."""

from __future__ import annotations

from collections.abc import Hashable
from sys import intern
from typing import Any

from headrace.schemas.events import EpisodeStarted, TaskSubmitted

MOST_SHARED = 4_096
"""At most so many values are shared."""
NAMES = ("source", "tenant", "agent")
"""Texts that many tasks have in common."""


class SharedStarts:
    """Replaces what a decoded start has in common with others by equal values that are shared.

    It takes a third of the memory then.
    """

    def __init__(self) -> None:
        self._shared: dict[Hashable, Any] = {}

    def of(self, started: EpisodeStarted, sibling: TaskSubmitted | None) -> EpisodeStarted:
        """Changes a start that was just decoded, and returns it: it stays equal.

        `sibling` is the task as another sample of it has it, if any.
        """
        submitted = started.submitted
        if sibling is None or sibling != submitted:
            sibling = submitted
            self._share_parts(submitted)
        versions = self._share(("versions", tuple(started.versions.items())), started.versions)
        started.__dict__.update(submitted=sibling, versions=versions)
        return started

    def _share_parts(self, submitted: TaskSubmitted) -> None:
        changes: dict[str, object] = {name: intern(getattr(submitted, name)) for name in NAMES}
        changes["roles"] = self._share(tuple(submitted.roles.items()), submitted.roles)
        changes["environment"] = self._share(submitted.environment, submitted.environment)
        changes["options"] = self._share(submitted.options, submitted.options)
        if submitted.item_id == submitted.task_id:
            changes["item_id"] = submitted.task_id
        if not submitted.labels:
            changes["labels"] = self._share("labels", submitted.labels)
        submitted.__dict__.update(changes)

    def _share(self, key: Hashable, value: Any) -> Any:
        """Returns the first value that came with this key."""
        if len(self._shared) >= MOST_SHARED:
            self._shared.clear()
        return self._shared.setdefault(key, value)
