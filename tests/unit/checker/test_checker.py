"""The log checker finds what it is there to find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.schemas.events import (
    ActionRequested,
    BatchAssembled,
    Dropped,
    EnvironmentUse,
    EpisodeEnded,
    EpisodeStarted,
    Exclusion,
    Failure,
    GenerationCompleted,
    GenerationRequested,
    GroupClosed,
    LoadReported,
    ObservationRecorded,
    PolicyPublished,
    Run,
    TaskEnded,
    TaskSubmitted,
    TrajectoryRecorded,
)
from headrace.schemas.packed import pack_f32, pack_i32
from headrace.services.operate.verify.log_report import LogReport, examine
from tests.unit.checker.logs import RECIPE, Log, whole_log, write_task

FAILURE = Failure(origin="infrastructure", code="lost")
DUPLICATE = Failure(origin="operator", code="duplicate")


def judge(log: Log) -> LogReport:
    return examine(RECIPE, log.deliveries, settled=True, one_clock=True)


def complaints(log: Log) -> list[str]:
    return judge(log).violations


def test_a_whole_log_has_no_violations_with_duplicates_neither() -> None:
    log = whole_log()
    for kind in (TaskEnded, EpisodeEnded, TrajectoryRecorded, GenerationCompleted, GroupClosed):
        log.again(kind)
    report = judge(log)
    assert report.violations == []
    assert (report.tasks, report.tasks_ended, report.trained) == (2, 2, 2)
    assert report.versions == {"default": 1}
    assert report.duplicates["TaskEnded"] == 1


def start_changed(log: Log, **changes: object) -> None:
    """Changes what the last start says of its task."""
    submitted = log.last(EpisodeStarted).submitted
    log.change(EpisodeStarted, submitted=submitted.model_copy(update=changes))


def turn_changed(log: Log, **changes: object) -> None:
    """Changes the last turn of the last trajectory."""
    *turns, last = log.last(TrajectoryRecorded).turns
    log.change(TrajectoryRecorded, turns=(*turns, last.model_copy(update=changes)))


def sample_changed(log: Log, **changes: object) -> None:
    """Changes the last sample of the batch."""
    *samples, last = log.last(BatchAssembled).samples
    log.change(BatchAssembled, samples=(*samples, last.model_copy(update=changes)))


def group_changed(log: Log, **changes: object) -> None:
    """Changes the group that is scored: the first."""
    log.change_first(GroupClosed, **changes)


def group_sample_changed(log: Log, **changes: object) -> None:
    """Changes the first sample of the group that is scored."""
    group = next(one.event for one in log.deliveries if isinstance(one.event, GroupClosed))
    first, *others = group.samples
    group_changed(log, samples=(first.model_copy(update=changes), *others))


def use_changed(log: Log, **changes: object) -> None:
    """Changes what the last outcome says of its policy."""
    (use,) = log.last(EpisodeEnded).policies
    log.change(EpisodeEnded, policies=(use.model_copy(update=changes),))


Case = tuple[Callable[[Log], object], str]
TASKS: list[Case] = [
    (lambda log: log.without(TaskEnded), "task 0 was submitted and has no TaskEnded"),
    (lambda log: log.without(EpisodeEnded), "0/0 was started and has no EpisodeEnded"),
    (lambda log: log.without(TaskSubmitted), "which nobody submitted"),
    (lambda log: log.without(EpisodeStarted), "which was never started"),
    (lambda log: log.without_last(EpisodeStarted), "has 2 samples, started [0]"),
    (lambda log: log.again(TaskEnded, closed_by="cancelled"), "two TaskEnded that differ"),
    (lambda log: log.change(TaskEnded, outcomes=()), "started samples [0, 1], ended []"),
    (lambda log: log.change(TaskEnded, epoch=7), "was submitted as"),
    (lambda log: log.change(TaskEnded, closed_by="refused"), "is closed by refused"),
    (lambda log: log.again(EpisodeStarted), "fencing failed"),
    (lambda log: start_changed(log, seed=9), "was started as another task"),
    (lambda log: log.change_all(TaskSubmitted, task_id="0"), "task 1 runs, and was submitted"),
    (lambda log: log.change_all(EpisodeStarted, verdict=FAILURE), "was started lost, and was run"),
    (lambda log: log.change_first(EpisodeStarted, verdict=DUPLICATE), "is the first of its id"),
    (lambda log: log.change(EpisodeEnded, attempts=2), "ended attempt 0 and counts 2"),
    (lambda log: log.change(EpisodeEnded, attempt=8, attempts=9), "made 9 attempts of 3"),
    (lambda log: log.change(EpisodeEnded, epoch=3), "was started as"),
    (lambda log: log.change(EpisodeEnded, trajectory=None), "without a trajectory"),
    (lambda log: log.without(LoadReported), "before a worker of default had reported"),
    (
        lambda log: start_changed(log, environment=EnvironmentUse(use="default")),
        "before a worker of environments.default had reported",
    ),
]


TURNS: list[Case] = [
    (lambda log: log.without(TrajectoryRecorded), "reference does not resolve"),
    (lambda log: log.without(GenerationCompleted), "was never generated"),
    (lambda log: log.without(GenerationRequested), "answers what was never asked"),
    (lambda log: log.change(GenerationCompleted, tokens=b""), "is not the answer that counts"),
    (lambda log: log.change(GenerationCompleted, digest=b"x" * 16), "to another meaning"),
    (lambda log: log.change(ObservationRecorded, digest=b"x" * 16), "to another meaning"),
    (lambda log: log.change(GenerationRequested, tokens=b""), "in another context"),
    (lambda log: log.change(ActionRequested, index=7), "its actions are [0, 1, 7]"),
    (lambda log: log.change(TrajectoryRecorded, turns=()), "is in no turn"),
    (lambda log: turn_changed(log, parent=5), "turn 1 follows turn 5"),
    (lambda log: turn_changed(log, call="2"), "a turn is doubled"),
    (lambda log: log.change(EpisodeEnded, reward=0.5), "its trajectory as"),
    (lambda log: start_changed(log, max_turns=1), "has 2 turns, 2 tokens, of 1 turns"),
    (lambda log: use_changed(log, tokens=9), "its turns say"),
    (lambda log: use_changed(log, oldest_version=9), "its turns say"),
    (lambda log: use_changed(log, turn_rewards=pack_f32([0.0, 1.0])), "its outcome says"),
    (lambda log: use_changed(log, turns=pack_i32([1])), "gives the role policy the turns [1]"),
    (lambda log: log.without(PolicyPublished, version=0), "which was never published"),
]


REWARDS: list[Case] = [
    (lambda log: log.change(EpisodeEnded, ending="failed"), "ended failed with reward 1.0"),
    (lambda log: log.change(EpisodeEnded, failure=FAILURE), "after infrastructure failed"),
    (lambda log: log.change(EpisodeEnded, masked=True), "is masked, and its agent masks none"),
    (lambda log: log.change(EpisodeEnded, ending="deadline"), "ended deadline with failure None"),
    (lambda log: log.change(EpisodeEnded, ending="step_timeout"), "ended step_timeout with"),
    (lambda log: log.change(ObservationRecorded, failure=FAILURE), "has a reward, and lost"),
    (lambda log: turn_changed(log, reward=0.25), "earned 0.25, its environment gave 1.0"),
    (lambda log: group_sample_changed(log, reward=0.5), "sample 0 is not its outcome"),
    (lambda log: group_sample_changed(log, oldest_version=1), "they are (2, 4, 0)"),
    (lambda log: group_sample_changed(log, advantages=pack_f32([9.0])), "other advantages"),
    (lambda log: group_changed(log, estimator="rloo"), "the recipe says grpo"),
    (lambda log: group_changed(log, mean=0.1), "states the mean 0.1"),
    (lambda log: group_changed(log, excluded=(Exclusion(sample=1, reason="lost"),)), "it counts"),
    (lambda log: group_changed(log, policy="other"), "does not train"),
    (lambda log: group_changed(log, verdict="dropped"), "is dropped for reason ''"),
    (lambda log: log.change_first(TaskEnded, purpose="evaluate"), "that is evaluate, all"),
    (lambda log: log.change_first(TaskEnded, closed_by="refused"), "that is train, refused"),
    (lambda log: log.change_first(TaskEnded, minimum=3), "fewer than 3"),
    (lambda log: log.without(GroupClosed), "has no group of default"),
]


STALE = Dropped(task=0, reason="stale")
BATCHES: list[Case] = [
    (lambda log: log.again(BatchAssembled), "fencing failed"),
    (lambda log: log.again(BatchAssembled, version=2), "decides [0, 1], which an earlier"),
    (lambda log: log.again(BatchAssembled, version=3), "is number 2 in the log"),
    (lambda log: log.change(BatchAssembled, low_mark=3), "is said to leave"),
    (lambda log: log.change(BatchAssembled, samples=(), low_mark=2), "is said to leave"),
    (lambda log: log.change(BatchAssembled, recipe=bytes(32)), "is of another recipe"),
    (lambda log: log.change(BatchAssembled, groups_read=0), "all to 1 are decided"),
    (lambda log: log.change(BatchAssembled, sampled_tokens=1), "counts 1 tokens"),
    (lambda log: log.change(BatchAssembled, reward_mean=1.0), "that of its tasks is 0.75"),
    (lambda log: log.change(BatchAssembled, dropped=(Dropped(task=1, reason="odd"),)), "as odd"),
    (lambda log: log.change(BatchAssembled, dropped=(Dropped(task=1, reason=""),)), "a reason"),
    (lambda log: log.change(BatchAssembled, samples=(), dropped=(STALE,)), "0 versions behind"),
    (lambda log: sample_changed(log, sample=5), "task 0 has samples [0, 1], it holds [0, 5]"),
    (lambda log: sample_changed(log, tokens=7), "differs from its group's"),
    (lambda log: sample_changed(log, use=1), "the recipe has no replay"),
    (lambda log: log.without(BatchAssembled), "no batch of default decides it"),
]


VERSIONS: list[Case] = [
    (lambda log: log.again(PolicyPublished), "is published twice"),
    (lambda log: log.again(PolicyPublished, version=3), "is published after version 1"),
    (lambda log: log.again(PolicyPublished, version=0), "is published after version 1"),
    (lambda log: log.again(PolicyPublished, status="resumed"), "with the weights that it had"),
    (lambda log: log.change(PolicyPublished, status="resumed"), "is resumed after version 0"),
    (lambda log: log.change(PolicyPublished, status="skipped"), "its weights changed"),
    (lambda log: log.change(PolicyPublished, status="initial"), "is published as initial"),
    (lambda log: log.change(PolicyPublished, batch=None), "does not name the batch"),
    (lambda log: log.change(PolicyPublished, updates=0), "and no update was made"),
    (lambda log: log.change(PolicyPublished, full=None), "without its weights"),
    (lambda log: log.without_last(PolicyPublished), "batch default/1 is assembled, and version 0"),
]


def test_a_version_resumed_with_other_weights_is_none() -> None:
    log = whole_log()
    log.again(PolicyPublished, status="resumed", digest=b"x" * 32, batch=None)
    assert complaints(log) == []


@pytest.mark.parametrize(("spoil", "found"), TASKS + TURNS + REWARDS + BATCHES + VERSIONS)
def test_what_is_wrong_is_found(spoil: Callable[[Log], object], found: str) -> None:
    log = whole_log()
    spoil(log)
    violations = complaints(log)
    assert any(found in violation for violation in violations), violations
    assert all(violation[:2] in VIOLABLE and violation[2] == ":" for violation in violations)


VIOLABLE = {f"I{number}" for number in range(1, 9)}


def test_a_sample_too_stale_is_found_by_its_tokens_whatever_is_claimed() -> None:
    log = whole_log()
    batch = log.last(BatchAssembled)
    fresh = tuple(one.model_copy(update={"oldest_version": 2}) for one in batch.samples)
    for version in (1, 2, 3):
        log.change(BatchAssembled, samples=(), dropped=(), low_mark=0)
        log.again(BatchAssembled, version=version + 1)
    log.change(BatchAssembled, samples=fresh, dropped=batch.dropped, low_mark=2)
    assert any("is 3 versions behind" in one for one in complaints(log))


def test_a_gap_in_what_is_decided_must_be_recorded() -> None:
    log = whole_log()
    decided = {"low_mark": 0, "decided": (Run(first=1, last=1),), "groups_read": 0}
    nothing = {"samples": (), "sampled_tokens": 0, "reward_mean": 1.0}
    log.change(BatchAssembled, **decided, **nothing)
    assert not [one for one in complaints(log) if "batch default/1" in one]
    log.change(BatchAssembled, groups_read=2)
    assert any("groups are read from 2, not 0" in one for one in complaints(log))
    log.change(BatchAssembled, low_mark=2, decided=())
    assert any("is said to leave" in one for one in complaints(log))


def test_tasks_out_of_order_are_found() -> None:
    log = whole_log()
    write_task(log, 2, (0.0, 0.0))
    starts = [one for one in log.deliveries if isinstance(one.event, EpisodeStarted)]
    for one in starts[:2]:
        log.deliveries.remove(one)
        log.write(one.event)
    assert any("task 0 was started after task 2" in one for one in complaints(log))


def test_a_turn_of_falling_versions_is_found() -> None:
    log = whole_log()
    spans = {"tokens": pack_i32([7, 7]), "versions": pack_i32([0, 1, 1, 0])}
    turn_changed(log, **spans)
    assert any("was drawn by versions [1, 0]" in one for one in complaints(log))


def test_a_start_before_the_first_version_is_found() -> None:
    log = whole_log()
    log.date(EpisodeStarted, -1.0)
    assert any("was started before default had a version" in one for one in complaints(log))


def test_more_live_episodes_than_the_limit_are_found() -> None:
    log = whole_log()
    log.without(EpisodeEnded)
    assert any("was started as live episode 3 of 2" in one for one in complaints(log))


def test_a_start_without_room_is_found() -> None:
    log = whole_log()
    log.without(PolicyPublished, version=1)
    write_task(log, 2, (1.0, 0.0))
    assert not any("without room" in one for one in complaints(log))
    write_task(log, 3, (1.0, 0.0))
    assert any("task 3 was started without room for default: 0" in one for one in complaints(log))


def test_a_batch_too_far_ahead_is_found() -> None:
    log = whole_log()
    nothing = {"samples": (), "dropped": (), "sampled_tokens": 0, "reward_mean": None}
    log.without(PolicyPublished, version=1)
    log.again(BatchAssembled, version=2, **nothing)
    assert not any("was assembled when" in one for one in complaints(log))
    log.again(BatchAssembled, version=3, **nothing)
    assert any("3 was assembled when version 0 was the newest" in one for one in complaints(log))


@pytest.mark.parametrize("expected", ["which evaluates", "is of a task to evaluate, and is scored"])
def test_what_evaluates_is_never_trained_on(expected: str) -> None:
    log = whole_log()
    log.change_first(TaskSubmitted, purpose="evaluate")
    assert any(expected in line for line in complaints(log)), complaints(log)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (7, "evaluates version 7, and was drawn by [0]"),
        (None, "evaluates no version: its role policy is not pinned"),
    ],
)
def test_what_evaluates_is_pinned_to_one_version(version: int | None, expected: str) -> None:
    log = whole_log()
    log.change(TaskSubmitted, purpose="evaluate")
    use = log.last(TaskSubmitted).roles["policy"].model_copy(update={"version": version})
    start_changed(log, purpose="evaluate", roles={"policy": use})
    assert any(expected in line for line in complaints(log)), complaints(log)
