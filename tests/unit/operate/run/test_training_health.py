"""The figures of a policy's training, and what to do about a metric out of its range."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import PolicyPublished
from headrace.services.operate.run.training_health import FEWEST, KEPT, RANGES, TrainingHealth

SANE = {
    "loss": 0.1, "learning_rate": 1e-6,
    "entropy": 0.412, "clip_low_fraction": 0.012, "clip_high_fraction": 0.0,
    "clip_fraction": 0.012, "truncated": 0.03, "groups": 8.0, "groups_equal": 0.5,
    "groups_solved_by_all": 0.12, "groups_solved_by_none": 0.38, "length_better": 1212.4,
    "length_worse": 340.0, "engine_gap_p99": 0.093, "engine_kl": 0.001,
    "effective_sample_size": 0.97, "staleness_mean": 1.21, "staleness_oldest": 2.4,
    "dropped_samples": 0.0, "masked_updates": 0.0,
    "memory_retries": 0.0, "dropped_groups_stale": 1.0,
}  # fmt: skip
"""What a version of a run that learns well records."""


def published(version: int, metrics: dict[str, float], status: str = "trained") -> PolicyPublished:
    return PolicyPublished.model_validate(
        {
            "policy": "default", "version": version, "status": status, "digest": bytes(32),
            "full_version": 0, "metrics": metrics,
        }
    )  # fmt: skip


def health(*versions: dict[str, float], aim: float | None = None) -> TrainingHealth:
    folded = TrainingHealth(aim)
    for number, changes in enumerate(versions, 1):
        folded.on_published(published(number, SANE | changes))
    return folded


def test_three_short_rows_show_the_newest_version() -> None:
    rows = {row.label: str(row) for row in health({"entropy": 9.0}, {}).rows()}
    assert rows == {
        "learning": "entropy 0.412   clipped 1.2% low, 0% high   cut off 3.0%",
        "groups": "solved by all 12%, by none 38%   tokens if better 1,212, worse 340",
        "off-policy": "engine gap 0.093   effective sample 97%   stale 1.2, oldest 2.4",
    }
    assert all(len(row) <= 80 - 14 for row in rows.values()), "it fits a terminal of 80 columns"


def test_what_a_version_did_not_measure_is_not_shown() -> None:
    assert TrainingHealth().rows() == []
    shown = TrainingHealth()
    shown.on_published(published(0, {"publish_wait_s": 0.0}, "initial"))
    assert shown.newest == {}
    shown.on_published(published(1, {"loss": 1.0, "cross_entropy": 2.0, "entropy": 0.5}))
    shown.on_published(published(1, {}, "resumed"))
    assert [str(row) for row in shown.rows()] == ["entropy 0.5"]


@pytest.mark.parametrize(
    ("metric", "value", "says"),
    [
        ("engine_gap_p99", 0.8, "engine and trainer disagree about fresh tokens by 0.8 nats"),
        ("engine_kl", 0.05, "KL divergence 0.05 nats"),
        ("effective_sample_size", 0.2, "effective sample size 20%"),
        ("clip_fraction", 0.7, "clips or masks 70%"),
        ("entropy", 0.001, "set training.entropy_bonus"),
        ("truncated", 0.4, "cuts 40% of the episodes: raise sampling.max_tokens"),
        ("groups_equal", 0.9, "rewards of 90% of the groups are equal"),
        ("dropped_groups_stale", 8.0, "50% of the groups get too stale"),
        ("dropped_samples", 2.0, "leaves out 2 samples"),
        ("masked_updates", 1.0, "masks every token of an update"),
        ("learning_rate", 0.0, "the learning rate is 0"),
        ("memory_retries", 1.0, "lower training.max_tokens"),
    ],
)
def test_a_metric_out_of_its_range_comes_with_advice(metric: str, value: float, says: str) -> None:
    assert health({}, {}, {}).advice() == {}
    (advice,) = health({metric: value}, {metric: value}, {metric: value}).advice().values()
    assert says in advice
    assert ": " in advice, "what is wrong, then what to do"
    assert not health({metric: value}, {metric: value}).advice(), "too few versions to judge"
    assert not health({}, {}, {}, {metric: value}, {metric: value}).advice(), "a rare outlier"


def test_a_warned_figure_is_marked() -> None:
    bad = {"clip_fraction": 0.9, "engine_kl": 1.0, "engine_gap_p99": 2.0}
    rows = health(bad, bad, bad).rows()
    marked = [one.text.split()[0] for row in rows for one in row.figures if one.warned]
    assert marked == ["clipped", "engine"]
    assert len(health(bad, bad, bad).advice()) == 2, "the gap is said once"


def test_one_matter_is_said_once() -> None:
    masked = {"clip_fraction": 1.0, "masked_updates": 1.0}
    assert health(masked, masked, masked).advice().keys() == {"masked_updates"}


def test_a_policy_that_has_learned_its_tasks_gets_no_advice() -> None:
    done = {"entropy": 0.001, "groups_equal": 1.0, "groups_solved_by_all": 1.0, "reward_mean": 1.0}
    assert health(done, done, done, aim=0.9).advice() == {}
    assert len(health(done, done, done).advice()) == 2
    stuck = done | {"reward_mean": 0.0, "groups_solved_by_all": 0.0}
    assert len(health(stuck, stuck, stuck, aim=0.9).advice()) == 2


@pytest.mark.parametrize("metric", ["value_loss", "teacher_kl"])
def test_a_critic_or_a_teacher_teaches_something_about_groups_of_equal_rewards(metric: str) -> None:
    equal = {"groups_equal": 1.0}
    assert health(equal, equal, equal).advice().keys() == {"groups_equal"}
    more = equal | {metric: 0.1}
    assert health(more, more, more).advice() == {}


def test_a_limit_is_not_named_twice() -> None:
    cut = health(*[{"truncated": 0.9}] * FEWEST)
    assert cut.advice()
    assert not cut.advice(limits_known=True)


@given(st.lists(st.dictionaries(st.sampled_from([*SANE, "mine"]), st.floats(-1e9, 1e9))))
def test_any_metrics_can_be_shown_and_memory_is_bounded(versions: list[dict[str, float]]) -> None:
    folded = health(*versions, *versions * (KEPT if len(versions) == 1 else 1))
    assert all(len(folded.curve(name)) <= KEPT for name in SANE)
    assert folded.advice().keys() <= {one.metric for one in RANGES}
    assert len(folded.rows()) <= 3
