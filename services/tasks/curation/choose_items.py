"""Chooses the next task by the statistics of the items. No I/O, no clock.

A search begins after the last task and goes on until an item is accepted, all with the statistics
at one offset of the topic `groups`. So which task comes next follows from the last task and that
offset alone, and the labels of the task, which have both, let anybody compute it again. They also
have all that a restarted source needs.

If a whole pass over the data set was skipped, the search ends. The next one begins at the same item
as this one, with newer statistics.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import astuple, dataclass, replace

from headrace.errors import HeadraceError, UsageError
from headrace.schemas.events import GroupClosed, TaskSubmitted
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.tables import use_and_options
from headrace.services.tasks.curation.composed_data_sets import Curriculum, StageProgress
from headrace.services.tasks.curation.curator import Curator
from headrace.services.tasks.curation.curators import load_curator
from headrace.services.tasks.curation.item_statistics import CountedTasks, ItemStatistics, counts
from headrace.services.tasks.data_sets import items_of, load_data_set
from headrace.services.tasks.task_maker import Item

LABEL = "curation."
"""All labels of the task source begin with it."""
STATE = f"{LABEL}state"
CHUNK = 256
"""Items between two steps of a search."""
MAX_PASSES = 100
MAX_SKIPPED = 10_000_000
"""A search ends after so many passes or items of which none was accepted by chance."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a search begins."""

    epoch: int = 0
    position: int = 0
    """Position of the next item in the epoch."""
    stage: int = 0
    """Stage of a curriculum. 0 for other data sets."""
    since: int = 0
    """First epoch of the stage."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """An item that becomes a task."""

    task_id: str
    epoch: int
    item: Item
    labels: dict[str, str]
    after: Cursor
    progress: StageProgress | None
    """Of the stage of a curriculum, after the items that the search skipped."""


@dataclass(frozen=True, slots=True)
class Unchosen:
    """Why a search found nothing."""

    exhausted: bool
    """Whether the data set has no more items. If not, none was accepted in a whole pass."""


class Curation:
    """Groups of a policy in; the next task out. `restore` continues after the newest task."""

    def __init__(
        self, recipe: Recipe, statistics: ItemStatistics, submitted: Container[str] = ()
    ) -> None:
        """`statistics` are those of the recipe's `curating_policy`. `submitted` has the ids of
        tasks that must not be submitted again.

        Raises UsageError if the data set or a curator can't be loaded.
        """
        tasks = recipe.tasks
        self._recipe = recipe
        self._statistics = statistics
        self._submitted = submitted
        uses = [use_and_options(choice)[0] for choice in tasks.curators]
        curators = [load_curator(choice) for choice in tasks.curators]
        indexed = [f"{index}:{use}" for index, use in enumerate(uses)]
        names = [
            one if uses.count(use) > 1 else use for use, one in zip(uses, indexed, strict=True)
        ]
        self._curators = list(zip(names, curators, strict=True))
        """By the name that labels have: with the index if two have the same one."""
        self._curriculum = _curriculum_of(recipe)
        self._folds: list[tuple[str, Curator | Curriculum]] = [*zip(indexed, curators, strict=True)]
        if self._curriculum is not None:
            self._folds.append(("curriculum", self._curriculum))
        self._tasks = CountedTasks()
        self._open: tuple[Cursor, Iterator[Item | None]] | None = None
        """The items from a cursor on."""
        self.cursor = Cursor()
        """Where the next search begins."""

    @property
    def groups_read(self) -> int:
        """Offset of the oldest group that must be added after a restart."""
        return min(self._tasks.groups_read, self._statistics.tasks.groups_read)

    @property
    def tasks(self) -> CountedTasks:
        """The tasks whose groups have been added."""
        return self._tasks

    def restore(self, newest: TaskSubmitted) -> None:
        """Continues after the newest task. Then the groups from `groups_read` on must be added.

        Raises UsageError if another program has submitted the task.
        """
        try:
            state = json.loads(newest.labels[STATE])
            self.cursor = Cursor(*state["cursor"])
            self._tasks = CountedTasks(*state["groups"])
            for name, fold in self._folds:
                fold.restore(state["folds"][name])
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"task {newest.event_id} lacks the labels of a curated task ({error!r}), so the "
                "source can't continue after it. Only Headrace's task source may submit tasks of "
                "this source. Start a new namespace"
            ) from error

    def on_group(self, group: GroupClosed, offset: int) -> None:
        """Adds the group at an offset, in the order of the offsets. Repeated ones are ignored."""
        self._statistics.on_group(group, offset)
        if self._tasks.add(group, offset) and counts(group):
            for _, fold in self._folds:
                fold.on_group(group)

    def accept(self, chosen: Chosen) -> None:
        """Notes that the task of a search is submitted: the next search begins after it."""
        self.cursor = chosen.after
        if self._curriculum is not None and chosen.progress is not None:
            self._curriculum.set_progress(chosen.after.stage, chosen.progress)

    def search(self) -> Iterator[Chosen | Unchosen | None]:
        """Yields what comes next as the last value, and before it None after every few items.

        No group may be added meanwhile.
        """
        at = self._through_gates(self.cursor)
        progress = self._progress(at)
        skipped: Counter[str] = Counter()
        seen = 0
        for _ in range(MAX_PASSES):
            if self._is_over(at):
                yield Unchosen(exhausted=True)
                return
            position = at.position
            whole, hopeless, begun = position == 0, True, seen
            for item in self._items(at):
                if item is None:
                    yield None
                    continue
                task_id = f"{at.epoch}-{position}"
                position += 1
                seen += 1
                if seen % CHUNK == 0:
                    yield None
                if task_id in self._submitted:
                    hopeless = False
                    continue
                reason, chances = self._judge(task_id, at.epoch, item)
                if reason is None:
                    at = replace(at, position=position)
                    self._open = self._open and (at, self._open[1])
                    labels = self._labels(at, chances, skipped, progress)
                    yield Chosen(task_id, at.epoch, item, labels, at, progress)
                    return
                skipped[reason] += 1
                progress = self._skipped(at, item, progress)
                hopeless = hopeless and chances[reason] == 0
                if seen >= MAX_SKIPPED:
                    break
            if whole and seen == begun:
                yield Unchosen(exhausted=True)  # Another pass over nothing is empty, too.
                return
            following = self._next_pass(at, hopeless=whole and hopeless)
            if following is None or seen >= MAX_SKIPPED:
                break
            if following.stage != at.stage:
                progress = self._progress(following)
            at = following
        self._open = None
        yield Unchosen(exhausted=False)

    def _judge(self, task_id: str, epoch: int, item: Item) -> tuple[str | None, dict[str, float]]:
        """Returns which curator skips an item, or None, and the chance that each one gave it."""
        record = self._statistics.get(item.item_id)
        chances: dict[str, float] = {}
        for index, (name, curator) in enumerate(self._curators):
            chance = curator.chance(record, epoch)
            if not 0 <= chance <= 1:  # This rejects NaN, too.
                raise HeadraceError(
                    f"curator {name!r} gave item {item.item_id!r} the chance {chance!r}. Make it "
                    "return a number from 0 to 1"
                )
            chances[name] = float(chance)
            if chance < 1 and draw(self._recipe.tasks.seed, task_id, index) >= chance:
                return name, chances
        return None, chances

    def _labels(
        self,
        after: Cursor,
        chances: Mapping[str, float],
        skipped: Mapping[str, int],
        progress: StageProgress | None,
    ) -> dict[str, str]:
        tasks = self._tasks
        folds = {name: fold.state() for name, fold in self._folds}
        if self._curriculum is not None:
            folds["curriculum"] |= {self._curriculum.stages[after.stage].name: progress}
        state = {
            "from": astuple(self.cursor),
            "cursor": astuple(after),
            "groups": [tasks.low_mark, tasks.groups_read, tasks.newest],
            "folds": folds,
        }
        labels = {
            "policy": str(self._recipe.curating_policy),
            "group": str(tasks.newest),
            "seed": str(self._recipe.tasks.seed),
            "chances": json.dumps(chances, sort_keys=True),
            "skipped": json.dumps(skipped, sort_keys=True),
        }
        if self._curriculum is not None:
            labels["stage"] = self._curriculum.stages[after.stage].name
        text = json.dumps(state, sort_keys=True, separators=(",", ":"))
        return {**{f"{LABEL}{name}": value for name, value in labels.items()}, STATE: text}

    def _progress(self, at: Cursor) -> StageProgress | None:
        """Returns the progress of a stage. None if the data set has no stages, or no such one."""
        curriculum = self._curriculum
        if curriculum is None or at.stage >= len(curriculum.stages):
            return None
        return curriculum.progress(at.stage)

    def _skipped(
        self, at: Cursor, item: Item, progress: StageProgress | None
    ) -> StageProgress | None:
        """Adds an item that is skipped."""
        record = self._statistics.get(item.item_id)
        if self._curriculum is None or progress is None or record is None:
            return progress
        # A streak says what the newest group was like: all of it passed, or none.
        rate = float(record.solved) if record.streak else record.recent
        return progress.after(rate, self._curriculum.stages[at.stage].groups)

    def _items(self, at: Cursor) -> Iterator[Item | None]:
        """Returns the items from a cursor on: those that the last search left, if it ended here.

        Yields None after every few items that it passes over on the way.
        """
        if self._open is None or self._open[0] != at:
            self._open = at, self._read(at)
        return self._open[1]

    def _read(self, at: Cursor) -> Iterator[Item | None]:
        tasks, curriculum = self._recipe.tasks, self._curriculum
        if curriculum is not None:
            items = curriculum.stages[at.stage].items(items_of)
        else:
            items = items_of(tasks.use, tasks.options)
        for position in range(at.position):
            if next(items, None) is None:
                return
            if position % CHUNK == CHUNK - 1:
                yield None
        yield from items

    def _is_over(self, at: Cursor) -> bool:
        epochs, curriculum = self._recipe.tasks.epochs, self._curriculum
        if epochs is not None and at.epoch >= epochs:
            return True
        return curriculum is not None and at.stage >= len(curriculum.stages)

    def _through_gates(self, at: Cursor) -> Cursor:
        """Returns the beginning of the next stage if the gate of this one is open."""
        curriculum = self._curriculum
        while (
            curriculum is not None
            and at.stage < len(curriculum.stages)
            and curriculum.open_gate(at.stage)
        ):
            epoch = at.epoch + (1 if at.position else 0)
            at = Cursor(epoch, 0, at.stage + 1, epoch)
        return at

    def _next_pass(self, at: Cursor, *, hopeless: bool) -> Cursor | None:
        """Returns the beginning of the next pass.

        `hopeless`: all items of a whole pass were skipped, whatever the random numbers. None if the
        next pass would be hopeless, too.
        """
        epoch = at.epoch + 1
        if self._curriculum is not None:
            stage = self._curriculum.stages[at.stage]
            used_up = stage.passes is not None and epoch - at.since >= stage.passes
            later = at.stage + 1 < len(self._curriculum.stages)
            if used_up or (hopeless and later):
                return Cursor(epoch, 0, at.stage + 1, epoch)
        return None if hopeless else replace(at, epoch=epoch, position=0)


def draw(seed: int, task_id: str, index: int) -> float:
    """Returns the random number of the curator at an index for a task, from 0 to below 1."""
    text = json.dumps([seed, task_id, index])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48


def _curriculum_of(recipe: Recipe) -> Curriculum | None:
    found = load_data_set(recipe.tasks.use, recipe.tasks.options)
    return found if isinstance(found, Curriculum) else None
