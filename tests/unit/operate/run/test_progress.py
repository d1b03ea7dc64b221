from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import (
    BatchAssembled,
    BatchSample,
    EpisodeEnded,
    Event,
    PolicyPublished,
    Ref,
    Run,
    TaskEnded,
    TaskSubmitted,
)
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.operate.run.live_view import Status
from headrace.services.operate.run.progress import Check, Progress, violations
from headrace.services.operate.run.report import Summary

REF = Ref(topic="t", partition=0, offset=0, digest=b"0" * 16)


def recipe(**stop: float) -> Recipe:
    tree = {"name": "r", "stop": stop, "policies": {"default": {"model": "tiny-llama"}}}
    return parse_recipe(tree, "test")


def submitted() -> TaskSubmitted:
    return TaskSubmitted(
        source="s", task_id="t", item_id="i", agent="a", roles={}, max_turns=1, max_tokens=1,
        deadline_s=1,
    )  # fmt: skip


def ended(task: int, endings: Sequence[str] = ("finished",)) -> TaskEnded:
    outcomes = tuple(
        EpisodeEnded.model_validate({"task": task, "sample": n, "item_id": "i", "ending": ending})
        for n, ending in enumerate(endings)
    )
    return TaskEnded(
        task=task, source="s", task_id="t", item_id="i", closed_by="all", outcomes=outcomes
    )


def batch(
    version: int, reward: float | None = None, low_mark: int = 0, policy: str = "default"
) -> BatchAssembled:
    sample = BatchSample(
        task=0, sample=0, trajectory=REF, advantages=b"", tokens=1, longest=1,
        oldest_version=max(0, version - 3),
    )  # fmt: skip
    return BatchAssembled(
        policy=policy, version=version, recipe=b"0" * 32, seed=0, samples=(sample,),
        sampled_tokens=1, reward_mean=reward, low_mark=low_mark, groups_read=0,
    )  # fmt: skip


def published(version: int, status: str = "trained", policy: str = "default") -> PolicyPublished:
    return PolicyPublished.model_validate(
        {
            "policy": policy, "version": version, "status": status,
            "digest": bytes([version]) * 32, "full_version": version,
        }
    )  # fmt: skip


def fold(progress: Progress, *events: Event) -> Progress:
    for number, event in enumerate(events):
        progress.on_event(event, at=100.0 + number, offset=number)
    return progress


def reason(progress: Progress, *, seconds: float = 0, exhausted: bool = False) -> str | None:
    return progress.stop_reason(seconds=seconds, exhausted=exhausted)


def test_reward_counts_only_published_versions() -> None:
    progress = Progress(recipe(reward=0.9, reward_versions=2))
    fold(progress, published(0, "initial"), batch(1, 0.8), batch(2, 1.0), published(1))

    assert progress.reward() is None
    fold(progress, published(2))

    assert progress.reward() == pytest.approx(0.9)
    assert reason(progress) == "reward 0.900 over 2 versions"
    assert progress.learned_at() == 100.0
    assert progress.first_step_at() == 103.0


def ended_by_reward() -> Progress:
    """Version 2 meets the stop rule's reward; version 3, published later, would not."""
    progress = Progress(recipe(reward=0.95, reward_versions=2))
    return fold(
        progress, published(0, "initial"), batch(1, 0.9), published(1), batch(2, 1.0),
        published(2), batch(3, 0.8), published(3),
    )  # fmt: skip


def test_a_version_published_later_does_not_change_what_ended_the_run() -> None:
    progress = ended_by_reward()

    assert progress.reward() == pytest.approx(0.9)
    assert reason(progress) == "reward 0.950 over 2 versions"
    assert progress.learned_at() == 104.0


def test_summary_and_checks_are_of_the_version_that_ended_the_run() -> None:
    progress = ended_by_reward()
    summary = Summary.of(Status("r"), "r", "reward 0.950 over 2 versions", progress)

    checks = [Check.parse("reward>=0.95"), Check.parse("versions==2")]
    assert violations(checks, summary.measures(progress)) == []
    assert (summary.versions, summary.published) == ({"default": 2}, {"default": 3})
    assert summary.rewards == {"default": pytest.approx(0.95)}
    assert "version 3 was published later" in "\n".join(summary.lines())


def test_the_summary_says_that_no_task_was_submitted() -> None:
    progress = Progress(ended_by_reward().recipe)
    for why, told in (("all tasks ended", True), (None, False)):
        lines = "\n".join(Summary.of(Status("r"), "r", why, progress).lines())
        assert ("no task was submitted" in lines) == told


def test_summary_of_a_run_that_no_version_ended_is_of_the_newest() -> None:
    progress = ended_by_reward()
    summary = Summary.of(Status("r"), "r", "60 seconds", progress)

    assert summary.versions == summary.published == {"default": 3}
    assert summary.measures(progress)["reward"] == pytest.approx(0.9)
    assert "later" not in "\n".join(summary.lines())


def test_summary_of_a_run_that_its_versions_ended_is_of_that_version() -> None:
    progress = fold(Progress(recipe(versions=2, reward=0.95)), batch(1, 0.5), published(1))
    fold(progress, batch(2, 0.5), published(2), batch(3, 0.5), published(3))
    summary = Summary.of(Status("r"), "r", "version 2 published", progress)

    assert reason(progress) == "version 2 published"
    assert summary.measures(progress)["versions"] == 2
    assert summary.measures(progress)["reward"] is None  # as it was then: three are needed
    assert progress.learned_at() is None


REWARDS = st.lists(st.sampled_from([None, 0.0, 0.5, 1.0]), max_size=5)


@given(st.data(), st.fixed_dictionaries({"default": REWARDS, "other": REWARDS}))
def test_the_order_of_reading_does_not_change_what_ends_a_run(
    data: st.DataObject, rewards: dict[str, list[float | None]]
) -> None:
    """Partitions are read side by side: a version may come before its batch, or long after it."""
    policies = {name: {"model": "tiny-llama"} for name in rewards}
    stop = {"reward": 0.75, "reward_versions": 2}
    two = parse_recipe({"name": "r", "stop": stop, "policies": policies}, "test")
    turns = data.draw(st.permutations([name for name in rewards for _ in rewards[name]]))
    newest = dict.fromkeys(rewards, 0)
    publications: list[Event] = []
    expected: dict[str, int] | None = None
    for name in turns:
        newest[name] += 1
        publications.append(published(newest[name], policy=name))
        seen = [
            [one for one in rewards[each][: newest[each]] if one is not None] for each in newest
        ]
        if expected is None and all(len(one) > 1 and sum(one[-2:]) >= 1.5 for one in seen):
            expected = dict(newest)
    streams = {"published": publications}
    for name in rewards:
        streams[name] = [batch(n, one, policy=name) for n, one in enumerate(rewards[name], 1)]
    order = data.draw(st.permutations([name for name in streams for _ in streams[name]]))
    places = {name: iter(stream) for name, stream in streams.items()}
    progress = fold(Progress(two), *(next(places[name]) for name in order))

    ended_by = reason(progress)
    assert (ended_by is None) == (expected is None)
    if ended_by is not None:
        decision = progress.decision(ended_by)
        assert decision is not None
        assert (decision.versions, decision.reason) == (expected, ended_by)


def test_a_batch_without_reward_is_passed_over() -> None:
    progress = Progress(recipe(reward=0.5, reward_versions=2))
    fold(progress, batch(1, 0.4), batch(2, None), batch(3, 0.8), published(3))

    assert progress.reward() == pytest.approx(0.6)


def test_stops_by_versions_and_by_seconds() -> None:
    progress = fold(Progress(recipe(versions=2, seconds=10)), published(1))

    assert reason(progress, seconds=9) is None
    assert reason(progress, seconds=10) == "10 seconds"
    assert reason(fold(progress, published(2))) == "version 2 published"


def test_a_learning_rate_of_0_ends_the_run_once_it_holds_for_every_policy() -> None:
    """Otherwise a run would play episodes and publish equal versions until its tasks end."""
    policies = {name: {"model": "tiny-llama"} for name in ("a", "b")}
    roles = {"roles": {"policy": "a"}}
    progress = Progress(parse_recipe({"name": "r", "tasks": roles, "policies": policies}, "test"))

    def version(number: int, policy: str, rate: float) -> PolicyPublished:
        metrics = {"loss": 1.0, "learning_rate": rate}
        return published(number, policy=policy).model_copy(update={"metrics": metrics})

    fold(progress, version(1, "a", 1e-3), version(1, "b", 0.0), version(2, "a", 1e-6))
    assert reason(progress) is None
    fold(progress, version(3, "a", 0.0))
    assert reason(progress) == "learning rate 0 at version 1"
    fold(progress, version(4, "a", 0.0), version(2, "b", 0.0))
    decision = progress.decision("learning rate 0 at version 1")
    assert decision is not None
    assert decision.versions == {"a": 3, "b": 1}


def test_exhausted_is_not_the_end_before_all_is_published() -> None:
    progress = fold(Progress(recipe()), submitted(), submitted(), ended(1))
    assert not progress.drained
    fold(progress, ended(0))

    assert progress.drained
    assert reason(progress, exhausted=True) is None  # no batch has decided them
    fold(progress, batch(1, low_mark=2))
    assert reason(progress, exhausted=True) is None  # its version isn't published
    fold(progress, published(1))

    assert reason(progress, exhausted=True) == "all tasks published"
    assert reason(progress, exhausted=False) is None


def test_a_record_that_is_no_task_does_not_keep_a_run_from_its_end() -> None:
    progress = Progress(recipe())
    for offset in (0, 2):  # at 1 lies garbage, which is never decided
        progress.on_event(submitted(), at=100.0, offset=offset)
    decided = batch(1, low_mark=1).model_copy(update={"decided": (Run(first=2, last=2),)})
    fold(progress, ended(0), ended(2), decided, published(1))

    assert reason(progress, exhausted=True) == "all tasks published"


def test_a_policy_that_does_not_train_needs_no_batch() -> None:
    tree = {"name": "r", "policies": {"default": {"model": "tiny-llama", "training": False}}}
    progress = fold(Progress(parse_recipe(tree, "test")), submitted(), ended(0))

    assert reason(progress, exhausted=True) == "all tasks published"
    assert progress.reward() is None


def test_counts_each_task_once() -> None:
    progress = fold(Progress(recipe()), ended(3, ("finished", "failed")), ended(3), ended(4))

    assert (progress.tasks_ended, progress.episodes, progress.failures) == (2, 3, 1)
    assert progress.episodes_per_s(now=102) == pytest.approx(0.3)
    assert progress.episodes_per_s(now=200) == 0


def test_staleness_is_that_of_the_newest_batch() -> None:
    progress = fold(Progress(recipe()), batch(5), batch(4))

    assert progress.policies["default"].staleness == 2


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [
        ("reward>=0.95", 0.95, True),
        ("reward>0.95", 0.95, False),
        ("failures == 0", 0, True),
        ("seconds<=90", 91.0, False),
        ("versions<3", 2, True),
        ("reward>=0", None, False),
    ],
)
def test_check(text: str, value: float | None, holds: bool) -> None:
    assert Check.parse(text).holds(value) is holds


@pytest.mark.parametrize("text", ["reward", "reward=>1", "speed>1", "reward>=high"])
def test_a_wrong_check_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"check is one of|not a number"):
        Check.parse(text)


def test_violations_say_what_was_measured() -> None:
    checks = [Check.parse("reward>=0.95"), Check.parse("episodes>1")]

    assert violations(checks, {"reward": None, "episodes": 2}) == [
        "reward>=0.95 does not hold: reward is absent"
    ]


def test_a_run_ends_though_no_batch_decides_what_evaluated() -> None:
    progress = Progress(recipe())
    evaluating = submitted().model_copy(update={"purpose": "evaluate"})
    fold(progress, submitted(), evaluating, ended(0), batch(1, 0.5, low_mark=1), published(1))
    assert progress.stop_reason(seconds=1, exhausted=True) is None
    fold(progress, ended(1).model_copy(update={"purpose": "evaluate"}))
    assert progress.stop_reason(seconds=1, exhausted=True) == "all tasks published"


def test_whole_windows_in_which_nothing_was_recorded_are_idle() -> None:
    folded = Progress(recipe())
    for number, at in enumerate((10.0, 1_190.0, 7_300.0)):
        folded.on_event(ended(number), at, number)

    assert folded.idle_s(5.0, 1_200.0) == 0
    assert folded.idle_s(5.0, 1_799.0) == 0, "the command came before the window was over"
    assert folded.idle_s(5.0, 7_400.0) == 10 * 600.0
    assert folded.idle_s(5.0, 8_500.0) == 11 * 600.0
