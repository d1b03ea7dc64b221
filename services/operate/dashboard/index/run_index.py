"""The dashboard's index of a run: a fold over the log. Pure.

It keeps numbers, short names and the positions of records. Texts, tokens and everything else that
is long stay in the log, and a page reads them by position when somebody opens it. The partitions of
a topic, and the topics, may be read in any order. If two records have the same id, the first one of
their partition counts.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from headrace.schemas import packed
from headrace.schemas.events import (
    ActionRequested,
    BatchAssembled,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    GroupClosed,
    InstanceStateEntered,
    LoadReported,
    ObservationRecorded,
    PolicyPublished,
    TaskEnded,
    TaskSubmitted,
    TrajectoryRecorded,
)
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.kafka.broker import Partition
from headrace.services.operate.dashboard.index.discarded import Discarded
from headrace.services.operate.dashboard.index.ended_by_time import EndedByTime
from headrace.services.operate.dashboard.index.index_rows import (
    ANY_SAMPLE,
    AttemptRow,
    EpisodeRow,
    GroupRow,
    PackedPositions,
    Seen,
    StepRow,
    TaskRow,
    ToolRow,
    short,
)
from headrace.services.operate.dashboard.index.seen_workers import SeenWorkers
from headrace.services.operate.dashboard.index.tool_calls_read import (
    calls_in,
    has_failed,
    tools_of,
)
from headrace.services.operate.dashboard.index.version_series import VersionSeries
from headrace.services.operate.dead_letters.dead_letter_count import DeadLetterCount
from headrace.services.operate.run.progress import Progress

MOST_TASKS = 250_000
MOST_EPISODES = 500_000
MOST_POSITIONS = 8_000_000
"""What is kept. Beyond that, the oldest tasks are forgotten. All is counted nevertheless, but a
record of a forgotten task that was written twice counts twice."""
FORGOTTEN_AT_ONCE = 0.02
"""The share of the tasks that is forgotten then."""
MOST_TOOLS = 5_000
MOST_FAILURES = 500
OTHERS = "others"
"""Tools and failures beyond these bounds count under this name."""
step_row = lru_cache(4_096)(StepRow)
"""Makes rows of steps, of which few differ."""


class RunIndex:
    """Folds events with their positions."""

    def __init__(
        self, recipe: Recipe, most_tasks: int = MOST_TASKS, most_positions: int = MOST_POSITIONS
    ) -> None:
        self.recipe = recipe
        self.progress = Progress(recipe)
        self.tasks: dict[int, TaskRow] = {}
        self.series = {name: VersionSeries(name) for name in recipe.policies}
        self.discarded = Discarded()
        self.tools: dict[str, ToolRow] = {}
        self.failures: dict[tuple[str, str], tuple[int, str, int, int]] = {}
        """By origin and code: the count, and message, task and sample of one of them."""
        self.endings: Counter[str] = Counter()
        self.started = 0
        """Episodes that were started, refused ones included."""
        self.ended = 0
        self.evaluated = 0
        """Ended episodes of evaluation tasks."""
        self.tokens = 0
        """Sampled and demonstrated tokens of all trajectories."""
        self.by_time = EndedByTime()
        self.first_at = 0.0
        """When the first event was recorded."""
        self.last_end_at = 0.0
        """When the newest result of a task was recorded."""
        self.workers = SeenWorkers()
        self.dead_letters = DeadLetterCount()
        self.positions = PackedPositions()
        self.forgotten = 0
        """Tasks that were forgotten."""
        self._below = 0
        """All tasks with a lower number were forgotten."""
        self._most_tasks, self._most_positions = most_tasks, most_positions
        self._episodes = 0
        self._positions = 0

    def on_place(self, seen: Seen, key: bytes | None, event_id: str) -> None:
        """Adds a prompt or a generation, of which only the position is kept.

        `key` is the record's key, the number of its task. `event_id` is TASK/SAMPLE/ATTEMPT/CALL.
        """
        if key is None or not key.isdigit() or len(key) > 18:
            return
        parts = event_id.split("/")
        known = len(parts) >= 2 and parts[1].isdigit() and len(parts[1]) < 10
        self._note(int(key), int(parts[1]) if known else ANY_SAMPLE, seen)

    def on_event(self, event: Event, seen: Seen) -> None:
        """Adds an event."""
        if not self.first_at or seen.at < self.first_at:
            self.first_at = seen.at
        if isinstance(event, ActionRequested | ObservationRecorded):
            self._on_step(event, seen)
        elif isinstance(event, TrajectoryRecorded):
            self._on_trajectory(event, seen)
        elif isinstance(event, InstanceStateEntered):
            self.workers.on_instance(event, seen.at)
        elif isinstance(event, LoadReported):
            self.workers.on_load(event, seen.at)
        else:
            self._on_flow(event, seen)

    def _on_flow(self, event: Event, seen: Seen) -> None:
        """Adds an event of the flow whose time counts."""
        match event:
            case TaskSubmitted():
                self._on_submitted(event, seen)
            case EpisodeStarted():
                self._on_started(event, seen)
            case EpisodeEnded():
                self._on_outcome(event, seen)
            case TaskEnded():
                self._on_result(event, seen)
            case GroupClosed():
                self._on_group(event, seen)
            case BatchAssembled():
                self._on_batch(event, seen)
            case PolicyPublished() if event.policy in self.series:
                self.progress.on_event(event, seen.at, seen.offset)
                packed = self.positions.pack(seen.partition, seen.offset)
                self.series[event.policy].on_published(event, packed, seen.at)

    def _on_submitted(self, event: TaskSubmitted, seen: Seen) -> None:
        self.progress.on_event(event, seen.at, seen.offset)
        row = self._note(seen.offset, ANY_SAMPLE, seen)
        if row is not None:
            row.item, row.purpose, row.submitted_at = short(event.item_id), event.purpose, seen.at

    def _on_started(self, event: EpisodeStarted, seen: Seen) -> None:
        row = self._note(event.task, event.sample, seen)
        if row is None:
            self.started += 1
            return
        row.item, row.purpose = short(event.submitted.item_id), event.submitted.purpose
        episode = self._episode(row, event.sample)
        if not episode.started_at:
            episode.started_at = seen.at
            self.started += 1

    def _on_step(self, event: ActionRequested | ObservationRecorded, seen: Seen) -> None:
        row = self._note(event.task, event.sample, seen)
        if row is None:
            return
        key = (event.sample, event.attempt, event.call)
        known = row.calls.get(key)
        if isinstance(known, StepRow):
            return
        if isinstance(event, ActionRequested):
            if event.kind != "step":
                row.calls[key] = step_row()
            elif known is None:
                row.calls[key] = tools_of(event)
            elif isinstance(known[0], bool):
                row.calls[key] = self._count_tools(row, event.sample, tools_of(event), *known)
            return
        failed, seconds = has_failed(event), event.run_ms / 1000
        if known is None:
            row.calls[key] = (failed, seconds)
        elif not isinstance(known[0], bool):
            row.calls[key] = self._count_tools(row, event.sample, known, failed, seconds)

    def _count_tools(
        self, row: TaskRow, sample: int, tools: tuple[str, ...], failed: bool, seconds: float
    ) -> StepRow:
        names = []
        for name in tools:
            if name not in self.tools and len(self.tools) >= MOST_TOOLS:
                name = OTHERS
            names.append(name)
            tool = self.tools.setdefault(name, ToolRow())
            tool.calls += 1
            tool.failed += failed
            tool.seconds += seconds
            if failed and tool.example is None:
                tool.example = row.task, sample
        if failed:
            self._episode(row, sample).tool_failures += 1
        return step_row(tuple(names), failed)

    def _on_trajectory(self, event: TrajectoryRecorded, seen: Seen) -> None:
        row = self._note(event.task, event.sample, seen)
        episode = None if row is None else self._episode(row, event.sample)
        if episode is not None and event.attempt in episode.by_attempt:
            return
        tokens = sum(len(turn.tokens) // 4 for turn in event.turns)
        self.tokens += tokens
        if episode is None:
            self.by_time.add_tokens(seen.at, tokens)
            return
        newest = -1
        tools: dict[str, None] = {}
        for turn in event.turns:
            newest = max(newest, *_versions(turn.versions), -1)
            tools.update((short(call.name), None) for call in calls_in(turn.text))
        packed = self.positions.pack(seen.partition, seen.offset)
        episode.by_attempt[event.attempt] = AttemptRow(
            packed, len(event.turns), tokens, newest, tuple(tools)
        )
        if packed == episode.trajectory:
            self.by_time.add_tokens(episode.ended_at, tokens)

    def _on_outcome(self, event: EpisodeEnded, seen: Seen) -> None:
        row = self._note(event.task, event.sample, seen)
        if row is not None:
            episode, ref = self._episode(row, event.sample), event.trajectory
            if episode.ended_at:
                return
            row.item, row.purpose = short(event.item_id), event.purpose
            packed = -1
            if ref is not None:
                packed = self.positions.pack(Partition(ref.topic, ref.partition), ref.offset)
            episode.on_ended(event, seen.at, packed)
            if packed >= 0 and (attempt := episode.attempt) is not None:
                self.by_time.add_tokens(seen.at, attempt.tokens)
        self._count_end(event, seen.at)

    def _count_end(self, event: EpisodeEnded, at: float) -> None:
        self.ended += 1
        self.evaluated += event.purpose == "evaluate"
        self.endings[event.ending] += 1
        failure = event.failure
        self.by_time.add(at, event.reward, "" if failure is None else short(failure.origin))
        if failure is not None:
            key = (short(failure.origin), short(failure.code))
            if key not in self.failures and len(self.failures) >= MOST_FAILURES:
                key = (key[0], OTHERS)
            count, message, task, sample = self.failures.get(
                key, (0, failure.message[:300], event.task, event.sample)
            )
            self.failures[key] = (count + 1, message, task, sample)

    def _on_result(self, event: TaskEnded, seen: Seen) -> None:
        self.progress.on_event(event, seen.at, seen.offset)
        row = self._note(event.task, ANY_SAMPLE, seen)
        if row is not None:
            row.ended_at = row.ended_at or seen.at
        self.last_end_at = max(self.last_end_at, seen.at if row is None else row.ended_at)

    def _on_group(self, event: GroupClosed, seen: Seen) -> None:
        row = self._note(event.task, ANY_SAMPLE, seen)
        if row is not None:
            if event.policy in row.groups:
                return
            dropped = event.verdict == "dropped"
            row.groups[short(event.policy)] = GroupRow(dropped, short(event.reason), seen.at)
        self.discarded.on_group(event, seen.at)

    def _on_batch(self, event: BatchAssembled, seen: Seen) -> None:
        self.progress.on_event(event, seen.at, seen.offset)
        series = self.series.get(event.policy)
        packed = self.positions.pack(seen.partition, seen.offset)
        if series is None or not series.on_batch(event, packed):
            return
        self.discarded.on_batch(event, seen.at)
        for one in event.samples:
            row = self._row(one.task)
            if row is not None:
                episode = self._episode(row, one.sample)
                episode.trained = episode.trained or {}
                episode.trained.setdefault(short(event.policy), event.version)

    def _note(self, task: int, sample: int, seen: Seen) -> TaskRow | None:
        """Notes where a record of a task is. Returns the task's row; None if it was forgotten."""
        row = self._row(task)
        if row is not None:
            row.note(self.positions.pack(seen.partition, seen.offset), sample, seen.size)
            self._positions += 1
        return row

    def _row(self, task: int) -> TaskRow | None:
        """Returns the row of a task, a new one if it is not known; None if it was forgotten.

        All tasks may have been submitted at the beginning, so a record of a known task may be the
        one that is too many.
        """
        is_new = task >= self._below and task not in self.tasks
        while self.tasks and (
            len(self.tasks) + is_new > self._most_tasks
            or self._episodes > MOST_EPISODES
            or self._positions >= self._most_positions
        ):
            self._forget()
        if task < self._below:
            return None
        row = self.tasks.get(task)
        if row is None:
            row = self.tasks[task] = TaskRow(task)
        return row

    def _episode(self, row: TaskRow, sample: int) -> EpisodeRow:
        if sample not in row.samples:
            self._episodes += 1
        return row.episode(sample)

    def _forget(self) -> None:
        """Forgets the oldest tasks."""
        for task in sorted(self.tasks)[: max(1, int(len(self.tasks) * FORGOTTEN_AT_ONCE))]:
            row = self.tasks.pop(task)
            self._below = max(self._below, task + 1)
            self._episodes -= len(row.samples)
            self._positions -= len(row.positions) // TaskRow.WIDTH
            self.forgotten += 1


def _versions(spans: bytes) -> list[int]:
    return packed.unpack_i32(spans)[1::2] if len(spans) % 8 == 0 else []
