"""What the index says equals what a simple pass over the events says, in any order of reading."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas.events import (
    ActionRequested,
    BatchAssembled,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    GenerationCompleted,
    GenerationRequested,
    GroupClosed,
    ObservationRecorded,
    PolicyPublished,
    Ref,
    TaskEnded,
    TaskSubmitted,
    TrajectoryRecorded,
)
from headrace.schemas.packed import unpack_i32
from headrace.services.kafka.broker import Partition, Position
from headrace.services.namespace.cluster_config import read_recipe
from headrace.services.operate.dashboard.index.index_rows import ANY_SAMPLE, Seen
from headrace.services.operate.dashboard.index.run_index import RunIndex
from headrace.services.operate.dashboard.views.episode_list import find_episodes
from tests.written_run import RunWriter, Size

RECIPE = read_recipe("quickstart")
Records = list[tuple[Event, Seen]]


def recorded(size: Size, seed: int, duplicates: float) -> Records:
    """The records of a run. Some are written twice, as a service does after a restart."""
    records: Records = []
    source = random.Random(seed)
    ends: dict[Partition, count[int]] = {}
    clock = count(1_000)

    async def send(event: Event) -> Ref:
        task = getattr(event, "task", 0)
        single = isinstance(event, TaskSubmitted | GroupClosed | BatchAssembled | PolicyPublished)
        at = Partition(type(event).__name__, 0 if single else task % 3)
        offsets = ends.setdefault(at, count())
        offset = next(offsets)
        records.append((event, Seen(at, offset, float(next(clock)), 100)))
        if not isinstance(event, TaskSubmitted) and source.random() < duplicates:
            records.append((event, Seen(at, next(offsets), float(next(clock)), 100)))
        return Ref(topic=at.topic, partition=at.number, offset=offset, digest=bytes(16))

    asyncio.run(RunWriter(send, size, seed).write())
    return records


def shuffled(records: Records, seed: int) -> Records:
    """The records with their partitions merged at random. In each, the order stays."""
    source = random.Random(seed)
    queues: dict[Partition, Records] = {}
    for record in records:
        queues.setdefault(record[1].partition, []).append(record)
    order = [at for at, queue in queues.items() for _ in queue]
    source.shuffle(order)
    heads = {at: iter(queue) for at, queue in queues.items()}
    return [next(heads[at]) for at in order]


def indexed(records: Records) -> RunIndex:
    index = RunIndex(RECIPE)
    for event, seen in records:
        if isinstance(event, GenerationRequested | GenerationCompleted):
            index.on_place(seen, event.key, event.event_id)
        else:
            index.on_event(event, seen)
    return index


def first_of_each(records: Records) -> list[tuple[Event, Seen]]:
    known: dict[tuple[type[Event], str], tuple[Event, Seen]] = {}
    for event, seen in records:
        known.setdefault((type(event), event.event_id), (event, seen))
    return list(known.values())


SIZES = st.builds(
    Size,
    tasks=st.integers(1, 5),
    samples=st.integers(1, 4),
    turns=st.integers(1, 3),
    tokens=st.integers(1, 5),
    groups=st.integers(1, 3),
)


@settings(max_examples=60)
@given(SIZES, st.integers(0, 2**20), st.sampled_from([0.0, 0.3]))
def test_the_index_says_what_a_simple_pass_says(size: Size, seed: int, duplicates: float) -> None:
    records = recorded(size, seed, duplicates)
    index = indexed(shuffled(records, seed))
    events = [event for event, _ in first_of_each(records)]
    outcomes = [event for event in events if isinstance(event, EpisodeEnded)]
    assert index.ended == len(outcomes) == size.tasks * size.samples
    assert index.started == sum(isinstance(event, EpisodeStarted) for event in events)
    assert index.endings == Counter(event.ending for event in outcomes)
    assert {key: count for key, (count, *_) in index.failures.items()} == Counter(
        (event.failure.origin, event.failure.code) for event in outcomes if event.failure
    )
    assert index.tokens == sum(
        len(unpack_i32(turn.tokens))
        for event in events
        if isinstance(event, TrajectoryRecorded)
        for turn in event.turns
    )
    for event in outcomes:
        row = index.tasks[event.task].samples[event.sample]
        assert (row.reward, row.ending, row.state) == (event.reward, event.ending, "ended")
        assert row.attempt is not None
        assert event.trajectory is not None
        assert index.positions.unpack(row.attempt.position) == Position(
            Partition(event.trajectory.topic, event.trajectory.partition), event.trajectory.offset
        )
    curves = index.by_time.curves(1_000.0, 1e6, 1)
    assert (curves["episodes"], curves["tokens"]) == ([len(outcomes)], [index.tokens])
    assert index.progress.tasks_ended == sum(isinstance(event, TaskEnded) for event in events)
    check_tools(index, events)
    check_versions(index, events)
    check_places(index, records)


def check_tools(index: RunIndex, events: list[Event]) -> None:
    actions = {event.event_id: event for event in events if isinstance(event, ActionRequested)}
    calls: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for event in events:
        if isinstance(event, ObservationRecorded):
            payload = actions[event.event_id].payload
            name = "search" if "search" in payload else "read"
            calls[name] += 1
            failed[name] += event.text.startswith("Error")
    assert {name: row.calls for name, row in index.tools.items()} == calls
    assert {name: row.failed for name, row in index.tools.items() if row.failed} == +failed


def check_versions(index: RunIndex, events: list[Event]) -> None:
    series = index.series["default"]
    published = [event for event in events if isinstance(event, PolicyPublished)]
    assert sorted(series.rows) == sorted(event.version for event in published)
    for one_version in published:
        loss = one_version.metrics["loss"]
        assert series.value(one_version.version, "loss") == loss
    for event in events:
        if isinstance(event, BatchAssembled):
            assert series.value(event.version, "reward") == event.reward_mean
            assert series.value(event.version, "samples") == len(event.samples)
            for one in event.samples:
                trained = index.tasks[one.task].samples[one.sample].trained
                assert trained == {"default": event.version}
    dropped = [one for one in events if isinstance(one, GroupClosed) and one.verdict == "dropped"]
    rows = list(index.discarded.rows(None, None))
    assert sorted(row.task for row in rows) == sorted(one.task for one in dropped)
    assert sum(row["count"] for row in index.discarded.reasons()) == len(dropped)


def check_places(index: RunIndex, records: Records) -> None:
    """Every record of a task is found by its task, and by its sample."""
    expected: dict[int, set[tuple[Partition, int, int]]] = {}
    for event, seen in records:
        task = seen.offset if isinstance(event, TaskSubmitted) else getattr(event, "task", None)
        if task is not None:
            sample = getattr(event, "sample", ANY_SAMPLE)
            expected.setdefault(task, set()).add((seen.partition, seen.offset, sample))
    for task, places in expected.items():
        row = index.tasks[task]
        found = {
            index.positions.unpack(packed) for packed, size in row.positions_of(None) if size == 100
        }
        assert found == {Position(at, offset) for at, offset, _ in places}
        own = {index.positions.unpack(packed) for packed, _ in row.positions_of(0)}
        assert own == {
            Position(at, offset) for at, offset, sample in places if sample in (0, ANY_SAMPLE)
        }


def test_the_oldest_tasks_are_forgotten_beyond_the_bound() -> None:
    index = RunIndex(RECIPE, most_tasks=10)
    for event, seen in recorded(Size(tasks=40, samples=1, turns=1), 1, 0.0):
        if not isinstance(event, GenerationRequested | GenerationCompleted):
            index.on_event(event, seen)
    assert len(index.tasks) <= 10
    assert max(index.tasks) == 39
    assert index.forgotten == 40 - len(index.tasks)
    assert index.ended == 40


def test_the_positions_are_bounded_although_all_tasks_were_submitted_before() -> None:
    records = recorded(Size(tasks=40, samples=2, turns=2), 1, 0.0)
    tasks = [record for record in records if isinstance(record[0], TaskSubmitted)]
    index = RunIndex(RECIPE, most_positions=200)
    for event, seen in [*tasks, *(one for one in records if one not in tasks)]:
        if isinstance(event, GenerationRequested | GenerationCompleted):
            index.on_place(seen, event.key, event.event_id)
        else:
            index.on_event(event, seen)
        kept = sum(len(list(row.positions_of(None))) for row in index.tasks.values())
        assert kept <= 200
    assert max(index.tasks) == 39


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(1, 8))
def test_what_was_forgotten_is_counted_in_any_order_of_reading(seed: int, most: int) -> None:
    records = recorded(Size(tasks=8, samples=2, turns=2), seed, 0.0)
    whole, small = indexed(records), RunIndex(RECIPE, most_tasks=most)
    for event, seen in shuffled(records, seed):
        if not isinstance(event, GenerationRequested | GenerationCompleted):
            small.on_event(event, seen)
    assert len(small.tasks) <= most
    for name in ("started", "ended", "evaluated", "tokens", "endings", "last_end_at"):
        assert getattr(small, name) == getattr(whole, name), name
    counts = [{key: one[0] for key, one in index.failures.items()} for index in (small, whole)]
    assert counts[0] == counts[1]
    found, right = (index.by_time.curves(1_000.0, 1e6, 1) for index in (small, whole))
    assert (found["episodes"], found["failures"]) == (right["episodes"], right["failures"])
    assert sum(one["count"] for one in small.discarded.reasons()) == sum(
        one["count"] for one in whole.discarded.reasons()
    )


@settings(max_examples=30)
@given(st.integers(0, 1000), st.floats(0, 1), st.sampled_from(["search", "read"]))
def test_filters_keep_what_they_say(seed: int, least: float, tool: str) -> None:
    index = indexed(recorded(Size(), seed, 0.0))
    everything = find_episodes(index, {})
    assert len(everything) == index.ended
    found = find_episodes(index, {"reward_min": str(least), "tool": tool, "order": "task"})
    assert [(one.task.task, one.sample) for one in found] == sorted(
        (one.task.task, one.sample)
        for one in everything
        if one.episode.reward is not None and one.episode.reward >= least and tool in one.tools
    )


def test_a_key_that_is_no_number_is_left_out() -> None:
    index = RunIndex(RECIPE)
    index.on_place(Seen(Partition("p", 0), 0, 1.0), b"\xff", "1/0/0/1")
    index.on_place(Seen(Partition("p", 0), 1, 1.0), b"7", "what/ever")
    assert list(index.tasks) == [7]
    assert [size for _, size in index.tasks[7].positions_of(3)] == [0]
