"""What a curator is: a class that says which items of a data set are worth a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from headrace.schemas.events import GroupClosed
from headrace.services.tasks.curation.item_statistics import ItemRecord

Share = Annotated[float, Field(ge=0, le=1)]
"""A number from 0 to 1."""


class Curator(BaseModel):
    """Says with which chance an item becomes a task. The fields of a subclass are its options.

    The task source draws the random number. It follows from `tasks.seed` and the id of the task, so
    the log shows again why each item was chosen.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    def chance(self, item: ItemRecord | None, epoch: int) -> float:
        """Returns the chance that the item is submitted, from 0 (never) to 1 (always).

        `item` has its statistics, or is None if no group of it has counted yet. `epoch` is the
        number of the pass over the data set, from 0. The answer must follow from these, the
        options and the state: no clock, no random number.
        """
        raise NotImplementedError

    def on_group(self, group: GroupClosed) -> None:
        """Notes a group that counts: each task's first one, in the order of the log."""

    def state(self) -> dict[str, Any]:
        """Returns what `on_group` has changed, as JSON values."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues with what `state` returned, in another process."""
