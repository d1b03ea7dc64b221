"""Whatever a job had read when it assembled a batch, the batch can be made again from the log."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace.schemas.events import BatchAssembled, GroupClosed
from headrace.services.operate.replay.rebuilder import Rebuilder
from headrace.services.operate.replay.recording import change_recorded
from headrace.services.operate.replay.replay_episodes import CHANGEABLE as OF_EPISODES
from headrace.services.operate.replay.replay_trajectories import CHANGEABLE as OF_TRAJECTORIES
from headrace.stream_jobs import waiting_groups
from headrace.stream_jobs.batches import BatchAssembler
from tests.unit.stream_jobs.test_batches import a_dropped_group, a_group, a_publication, a_recipe


def record(
    groups: list[GroupClosed], steps: list[str], **recipe: Any
) -> tuple[list[tuple[int, GroupClosed]], list[BatchAssembled]]:
    """Lets a job work: `read` a group, `publish` the newest batch, let `time` pass, or `die`."""
    log = list(enumerate(groups))
    made: list[BatchAssembled] = []
    assembler, published, unread, now_s = BatchAssembler(a_recipe(**recipe), "default"), 0, 0, 0.0
    assembler.on_policy(a_publication(0))
    for step in steps:
        if step == "read" and unread < len(log):
            assembler.on_group(log[unread][1], log[unread][0])
            unread += 1
        elif step == "publish" and made:
            published = made[-1].version
            assembler.on_policy(a_publication(published))
        elif step == "time":
            now_s = float("inf")
        elif step == "die":
            assembler = BatchAssembler(a_recipe(**recipe), "default")
            if made:
                assembler.on_batch(made[-1])
            for offset, group in log[assembler.groups_read : unread]:
                assembler.on_group(group, offset)
            assembler.on_policy(a_publication(published))
        while (batch := assembler.next_batch(now_s)) is not None:
            made.append(batch)
            assembler.on_batch(batch)
        now_s = 0.0
    return log, made


def verdicts(
    log: list[tuple[int, GroupClosed]],
    made: list[BatchAssembled],
    lost: frozenset[int] = frozenset(),
    **recipe: Any,
) -> list[str]:
    """What a rebuilder says of each batch; `lost` are tasks without a result."""
    offsets: dict[int, int] = {}
    for offset, group in log:
        offsets.setdefault(group.task, offset)
    end = log[-1][0] + 1 if log else 0
    rebuilder = Rebuilder(a_recipe(**recipe), "default", offsets, end)
    rest = iter(log)
    found = []
    for batch in made:
        while rebuilder.wants(batch):
            offset, group = next(rest)
            rebuilder.on_group(group, offset, rebuilt=group.task not in lost)
        found.append(rebuilder.judge(batch))
    return found


@st.composite
def a_history(draw: st.DrawFn) -> tuple[list[GroupClosed], list[str]]:
    """Groups of mixed age, some dropped, some twice, and a job's steps."""
    groups: list[GroupClosed] = []
    for task in draw(st.permutations(range(draw(st.integers(1, 16))))):
        if draw(st.integers(0, 4)) == 0:
            groups.append(a_dropped_group(task))
        else:
            versions = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
            groups.append(a_group(task, *versions, ended_s=draw(st.integers(0, 5))))
        if draw(st.integers(0, 5)) == 0:
            groups.append(draw(st.sampled_from(groups)))
    step = st.sampled_from(["read", "read", "read", "publish", "time", "die"])
    return groups, draw(st.lists(step, max_size=60))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(history=a_history(), order=st.sampled_from(["edf", "fifo"]), prefetch=st.integers(0, 3))
def test_every_batch_is_made_again(
    history: tuple[list[GroupClosed], list[str]], order: str, prefetch: int
) -> None:
    recipe: dict[str, Any] = {"order": order, "prefetch": prefetch}
    log, made = record(*history, **recipe)
    assert verdicts(log, made, **recipe) == ["same"] * len(made)


@settings(max_examples=100, deadline=None)
@given(history=a_history())
def test_also_where_a_record_is_full(history: tuple[list[GroupClosed], list[str]]) -> None:
    whole, waiting_groups.BATCH_BYTES = waiting_groups.BATCH_BYTES, 700
    try:
        log, made = record(*history)
        assert verdicts(log, made) == ["same"] * len(made)
    finally:
        waiting_groups.BATCH_BYTES = whole


def test_a_batch_that_is_another_differs_and_the_next_is_judged_by_itself() -> None:
    log, made = record([a_group(task, 0) for task in range(8)], ["read"] * 8 + ["publish"] * 4)
    assert len(made) >= 2
    first = made[0].samples[0].model_copy(update={"advantages": bytes(4)})
    other = made[0].model_copy(update={"samples": (first, *made[0].samples[1:])})
    assert verdicts(log, [other, *made[1:]]) == ["differs"] + ["same"] * (len(made) - 1)


def test_a_batch_whose_results_or_groups_are_gone_is_not_judged() -> None:
    log, made = record([a_group(task, 0) for task in range(4)], ["read"] * 4)
    assert verdicts(log, made, lost=frozenset({1})) == ["unknown", "same"]
    assert verdicts(log[1:], made)[0] == "unknown"


def test_a_recording_is_changed_only_where_a_replay_does_it_anew() -> None:
    recorded = a_recipe()
    change = "policies.default.groups.advantage=rloo"
    changed = change_recorded(recorded, None, [change, "stop.versions=3"], OF_TRAJECTORIES)
    assert changed.policies["default"].groups.advantage == "rloo"
    assert change_recorded(recorded, None, ["agents.default.use=a:b"], OF_EPISODES) != recorded
    for settings_, changeable, key in (
        ([change], OF_EPISODES, "policies.default.groups.advantage: 'grpo' -> 'rloo'"),
        (["policies.default.engine.slots=3"], OF_TRAJECTORIES, "policies.default.engine.slots"),
        (["tasks.samples=3"], OF_TRAJECTORIES, "tasks.samples: 8 -> 3"),
        (["policies.new.model=tiny"], OF_TRAJECTORIES, "policies.new.engine"),
        (["no.such=1"], OF_TRAJECTORIES, "no such key"),
    ):
        with pytest.raises(UsageError, match=key.replace(".", r"\.")):
            change_recorded(recorded, None, settings_, changeable)
