"""Data sets that are made of others: mixtures with weights, and curricula with gates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

from pydantic import Field, PrivateAttr, model_validator

from headrace.errors import UsageError
from headrace.schemas.events import GroupClosed
from headrace.schemas.recipe.secret_references import Options
from headrace.schemas.recipe.tables import Positive, Settings
from headrace.services.tasks.curation.curator import Share
from headrace.services.tasks.task_maker import Item

ReadItems = Callable[[str, Mapping[str, Any]], Iterator[Item]]
"""Reads the items of a data set by its name and its options."""


class StageProgress(NamedTuple):
    """How well the items of a stage are solved."""

    groups: int = 0
    """Number of its groups."""
    seen: int = 0
    """Number of its groups and of its items that were skipped."""
    recent: float = 0.0
    """The recent pass rate of these."""

    def after(self, rate: float, window: int, groups: int = 0) -> StageProgress:
        """Adds a pass rate, of a group or of an item that was skipped."""
        seen = self.seen + 1
        recent = self.recent + (rate - self.recent) / min(seen, window)
        return StageProgress(self.groups + groups, seen, recent)


class DataSetPart(Settings):
    """A data set within another one."""

    name: str = Field(pattern="^[A-Za-z0-9_.-]+$")
    """Prefix of the ids of its items, as in `NAME/ITEM`. It is unique."""
    use: str
    """The data set: a built-in, or an import path."""
    options: Options = Field(default_factory=dict)
    """Options of the data set."""

    def items(self, read: ReadItems) -> Iterator[Item]:
        """Yields the items of the data set, with the prefix."""
        for item in read(self.use, self.options):
            yield replace(item, item_id=f"{self.name}/{item.item_id}")


class MixedPart(DataSetPart):
    """A part of a mixture."""

    weight: float = Field(gt=0)
    """Its share of the items, relative to the weights of the other parts."""


class Stage(DataSetPart):
    """A stage of a curriculum."""

    pass_rate: Share | None = None
    """The stage ends once the recent pass rate of its items is at least this. An item that the
    curators skip counts as it was solved last. Otherwise the rate would be that of the items that
    they choose."""
    groups: Positive = 64
    """Number of groups of the stage before `pass_rate` may end it. The newest group, or skipped
    item, has a weight of one over this number in the recent pass rate."""
    passes: Positive | None = None
    """The stage ends after so many passes over its data set. Absent: no limit."""


class Mixture(Settings):
    """Items of several data sets, drawn with weights.

    Only parts behind their share can be drawn. The chance of each is proportional to what it lacks.
    So no part is ever more than one item ahead of its share, and none is further behind than there
    are other parts. A part whose items are used up begins again. The id of an item is `PART/ITEM`.
    The order is the same in every epoch.
    """

    parts: tuple[MixedPart, ...] = Field(min_length=1)
    """The data sets: tables with `name`, `use`, `weight` and, as they need them, `options`."""
    seed: int = 0
    """The seed of the order."""
    count: Positive | None = None
    """Number of items of an epoch. Absent: an epoch ends as soon as each part has been used up. All
    epochs have the same items, so with fewer than that, some items of the parts never come."""

    @model_validator(mode="after")
    def _names_differ(self) -> Mixture:
        _require_names(self.parts)
        return self

    @property
    def inner(self) -> Sequence[DataSetPart]:
        """The data sets within it."""
        return self.parts

    def items(self, read: ReadItems) -> Iterator[Item]:
        """Yields the items of an epoch."""
        random, total = Random(self.seed), sum(part.weight for part in self.parts)
        running = [part.items(read) for part in self.parts]
        missing = [0.0] * len(running)
        unused = set(range(len(self.parts)))
        number = 0
        while unused if self.count is None else number < self.count:
            for at, part in enumerate(self.parts):
                missing[at] += part.weight / total
            (at,) = random.choices(range(len(running)), [max(0.0, one) for one in missing])
            missing[at] -= 1.0
            item = next(running[at], None)
            if item is None:
                unused.discard(at)
                if self.count is None and not unused:
                    return
                running[at] = self.parts[at].items(read)
                item = next(running[at], None)
            if item is None:
                raise UsageError(f"mixture: the part {self.parts[at].name!r} has no items")
            number += 1
            yield item


class Curriculum(Settings):
    """Stages of data sets, one after another: a stage ends by its pass rate or after some passes.

    Gates look at the statistics of items, so a stage can only end early in training. Elsewhere, for
    example in an evaluation, the data set is all stages in their order. The id of an item is
    `STAGE/ITEM`. In training, a pass over a stage is an epoch.
    """

    stages: tuple[Stage, ...] = Field(min_length=1)
    """The stages in their order: tables with `name`, `use`, and, as they need them, `options`,
    `pass_rate`, `groups` and `passes`. The last stage needs no end."""

    _progress: dict[str, StageProgress] = PrivateAttr(default_factory=dict)
    """By the name of a stage."""

    @model_validator(mode="after")
    def _stages_end(self) -> Curriculum:
        _require_names(self.stages)
        for stage in self.stages[:-1]:
            if stage.pass_rate is None and stage.passes is None:
                raise ValueError(f"stage {stage.name!r} never ends: set pass_rate or passes")
        return self

    @property
    def inner(self) -> Sequence[DataSetPart]:
        """The data sets within it."""
        return self.stages

    def items(self, read: ReadItems) -> Iterator[Item]:
        """Yields the items of all stages."""
        for stage in self.stages:
            yield from stage.items(read)

    def open_gate(self, stage: int) -> bool:
        """Whether the recent pass rate of a stage is high enough to end it."""
        settings, progress = self.stages[stage], self.progress(stage)
        wanted = settings.pass_rate
        return (
            wanted is not None and progress.groups >= settings.groups and progress.recent >= wanted
        )

    def progress(self, stage: int) -> StageProgress:
        """Returns how well the items of a stage are solved."""
        return self._progress.get(self.stages[stage].name, StageProgress())

    def set_progress(self, stage: int, progress: StageProgress) -> None:
        """Notes how well the items of a stage are solved."""
        self._progress[self.stages[stage].name] = progress

    def on_group(self, group: GroupClosed) -> None:
        """Notes a group that counts: each task's first one, in the order of the log."""
        name = group.item_id.partition("/")[0]
        for number, stage in enumerate(self.stages):
            if stage.name == name:  # Others are of another source.
                rate = group.passed / group.rewarded
                after = self.progress(number).after(rate, stage.groups, groups=1)
                self.set_progress(number, after)

    def state(self) -> dict[str, Any]:
        """Returns what `on_group` has changed, as JSON values."""
        return {name: list(progress) for name, progress in self._progress.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues with what `state` returned."""
        self._progress = {name: StageProgress(*progress) for name, progress in state.items()}


def _require_names(parts: Sequence[DataSetPart]) -> None:
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise ValueError(f"the names {names} must differ, because they are prefixes of item ids")
