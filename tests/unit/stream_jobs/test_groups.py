"""Which samples count, and why the others don't."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

import pytest

from headrace.errors import HeadraceError, UsageError
from headrace.schemas.events import EpisodeEnded, Failure, GroupClosed, PolicyUse, Ref, TaskEnded
from headrace.schemas.packed import unpack_f32
from headrace.schemas.recipe.recipe import Recipe
from headrace.stream_jobs.filters import Group
from headrace.stream_jobs.groups import GroupAssembler

RECORDED_MS = 1_700_000_000_123
HERE = "tests.unit.stream_jobs.test_groups"
ZERO_ADVANTAGE = {"filters": ["zero_advantage"]}
INFRASTRUCTURE = Failure(origin="infrastructure", code="sandbox_lost", retryable=True)


def a_recipe(**groups: Any) -> Recipe:
    policy = {"model": "tiny", "groups": groups}
    return Recipe.model_validate({"name": "a-run", "policies": {"default": policy}})


def an_outcome(sample: int, reward: float | None = 1.0, **changes: Any) -> EpisodeEnded:
    fields: dict[str, Any] = {
        "task": 7,
        "sample": sample,
        "item_id": "item",
        "ending": "finished",
        "trajectory": Ref(topic="t.trajectories.v1", partition=1, offset=sample, digest=bytes(16)),
        "reward": reward,
        "policies": (PolicyUse(policy="default", tokens=5, longest=9, oldest_version=3),),
    }
    return EpisodeEnded(**{**fields, **changes})


def a_task(outcomes: Sequence[EpisodeEnded], **changes: Any) -> TaskEnded:
    fields: dict[str, Any] = {
        "task": 7,
        "source": "s",
        "task_id": "t",
        "item_id": "item",
        "epoch": 2,
        "closed_by": "all",
        "outcomes": tuple(outcomes),
    }
    return TaskEnded(**{**fields, **changes})


def close(task: TaskEnded, **groups: Any) -> GroupClosed:
    (closed,) = GroupAssembler(a_recipe(**groups)).on_task(task, RECORDED_MS)
    return closed


def reasons(closed: GroupClosed) -> dict[int, str]:
    return {exclusion.sample: exclusion.reason for exclusion in closed.excluded}


def test_a_group_is_scored_with_references_and_what_staleness_needs() -> None:
    closed = close(a_task([an_outcome(0, 1.0), an_outcome(1, 0.0)]), advantage="dr_grpo")

    assert (closed.task, closed.policy, closed.item_id, closed.epoch) == (7, "default", "item", 2)
    assert (closed.verdict, closed.reason, closed.estimator) == ("scored", "", "dr_grpo")
    assert (closed.mean, closed.deviation, closed.ended) == (0.5, 0.5, RECORDED_MS)
    assert [unpack_f32(sample.advantages) for sample in closed.samples] == [[0.5], [-0.5]]
    first = closed.samples[0]
    assert (first.sample, first.reward, first.trajectory.offset) == (0, 1.0, 0)
    assert (first.tokens, first.longest, first.oldest_version) == (5, 9, 3)


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (an_outcome(1, 0.0, failure=INFRASTRUCTURE), "sandbox_lost"),
        (an_outcome(1, None, ending="failed"), "failed"),
        (an_outcome(1, 0.5, ending="cancelled"), "cancelled"),
        (an_outcome(1, None), "no_reward"),
        (an_outcome(1, trajectory=None), "no_trajectory"),
        (an_outcome(1, math.nan), "reward_out_of_range"),
        (an_outcome(1, math.inf), "reward_out_of_range"),
        (an_outcome(1, -1e300), "reward_out_of_range"),
        (an_outcome(1, policies=()), "policy_absent"),
        (
            an_outcome(
                1, policies=(PolicyUse(policy="default", tokens=0, longest=4, oldest_version=0),)
            ),
            "no_tokens",
        ),
    ],
)
def test_a_sample_that_does_not_count_is_excluded_with_its_reason(
    outcome: EpisodeEnded, reason: str
) -> None:
    closed = close(a_task([an_outcome(0, 1.0), outcome, an_outcome(2, 0.5)]))

    assert reasons(closed) == {1: reason}
    assert [sample.sample for sample in closed.samples] == [0, 2]
    assert closed.mean == 0.75


def long_answers(
    *rewards: float, penalty: float, groups: Mapping[str, Any] = ZERO_ADVANTAGE, **recipe: Any
) -> GroupClosed:
    """Closes a group whose first answer is so long that it has a penalty."""
    keys = {"name": "r", "tasks": {"passing": 0.9}, "agents": {"default": {"overlong_buffer": 64}}}
    made = Recipe.model_validate(
        keys | {"policies": {"default": {"model": "tiny-llama", "groups": groups}}} | recipe
    )
    outcomes = [an_outcome(sample, reward) for sample, reward in enumerate(rewards)]
    outcomes[0] = an_outcome(0, rewards[0] - penalty, rewards={"overlong": -penalty})
    (closed,) = GroupAssembler(made).on_task(a_task(outcomes), RECORDED_MS)
    return closed


def test_a_penalty_for_length_does_not_make_equal_answers_differ() -> None:
    for reward, passed in ((1.0, 3), (0.3, 0)):
        closed = long_answers(reward, reward, reward, penalty=0.1)
        assert (closed.verdict, closed.reason) == ("dropped", "zero_advantage")
        assert (closed.passed, closed.deviation) == (passed, 0)
        assert closed.mean == pytest.approx(reward - 0.1 / 3), "what is learned from has it"
    closed = long_answers(1.0, 0.0, penalty=0.3)
    assert (closed.verdict, closed.passed, closed.deviation) == ("scored", 1, 0.5)
    first, second = (unpack_f32(one.advantages)[0] for one in closed.samples)
    assert first > 0 > second


@pytest.mark.parametrize(
    ("reward", "limits", "reason"),
    [
        (1.0, {"highest": 0.95}, "reward_too_high"),
        (0.05, {"lowest": 0.04}, ""),
        (0.3, {"lowest": 0.3, "highest": 0.3}, ""),
    ],
)
def test_a_penalty_for_length_does_not_change_what_mean_reward_drops(
    reward: float, limits: dict[str, float], reason: str
) -> None:
    rewards, filters = [reward] * 3, [{"use": "mean_reward", **limits}]
    closed = long_answers(*rewards, penalty=0.7, groups={"filters": filters})
    assert closed.reason == reason
    assert closed.mean == pytest.approx(reward - 0.7 / 3)


def test_a_filter_sees_rewards_of_which_the_mean_is_that_of_the_group() -> None:
    groups = {"filters": [f"{HERE}:rewards_disagree"], "advantage": "dr_grpo"}
    closed = long_answers(1.0, 0.0, penalty=0.3, groups=groups)
    assert closed.reason == ""
    rewards = [sample.reward for sample in closed.samples]
    assert rewards == pytest.approx([0.7, 0.0]), "what is learned from has the penalty"


def test_only_a_recipe_that_penalises_length_has_its_penalty() -> None:
    closed = long_answers(1.0, 1.0, penalty=0.3, agents={"default": {}})
    assert (closed.verdict, closed.passed) == ("scored", 1), "the environment has named it so"


def test_a_masked_sample_counts_in_its_group_and_is_not_learned() -> None:
    outcomes = [an_outcome(0, 1.0), an_outcome(1, 0.0, masked=True), an_outcome(2, 0.5)]
    closed = close(a_task(outcomes), advantage="dr_grpo")
    assert reasons(closed) == {1: "overlong"}
    assert closed.mean == 0.5
    advantages = {one.sample: unpack_f32(one.advantages) for one in closed.samples}
    assert advantages == {0: [0.5], 2: [0.0]}


def test_a_group_whose_samples_are_all_masked_is_dropped() -> None:
    closed = close(a_task([an_outcome(0, 1.0, masked=True), an_outcome(1, 0.0, masked=True)]))
    assert (closed.verdict, closed.reason, closed.mean) == ("dropped", "overlong", 0.5)
    assert reasons(closed) == {0: "overlong", 1: "overlong"}
    few = close(a_task([an_outcome(0, 1.0, masked=True), an_outcome(1, 0.0)], minimum=2))
    assert (few.verdict, few.reason) == ("dropped", "too_few_samples")


def test_a_masked_demonstration_is_learned() -> None:
    shown = PolicyUse(policy="default", tokens=5, longest=9, oldest_version=-1)
    closed = close(a_task([an_outcome(0, masked=True, policies=(shown,))]))
    assert [one.sample for one in closed.samples] == [0]


def test_a_group_says_how_long_its_longest_episode_took() -> None:
    refused = an_outcome(2, seconds=9.0, attempts=0)
    closed = close(a_task([an_outcome(0, seconds=4.0), an_outcome(1, seconds=6.0), refused]))
    assert closed.seconds == 6.0


def test_what_the_policy_caused_is_data() -> None:
    overflow = Failure(origin="policy", code="overflow")
    closed = close(a_task([an_outcome(0, -1.0, ending="overflow", failure=overflow)]))
    assert closed.verdict == "scored"


@pytest.mark.parametrize(
    ("task", "reason", "mean"),
    [
        (a_task([an_outcome(0)], purpose="evaluate"), "evaluate", None),
        (a_task([an_outcome(0)], closed_by="refused"), "refused", None),
        (a_task([an_outcome(0)], closed_by="cancelled"), "cancelled", None),
        (a_task([]), "all_failed", None),
        (a_task([an_outcome(0, failure=INFRASTRUCTURE)]), "all_failed", None),
        (a_task([an_outcome(0, policies=())]), "policy_absent", None),
        (a_task([an_outcome(0, 0.5), an_outcome(1, None)], minimum=2), "too_few_samples", 0.5),
    ],
)
def test_a_task_that_can_not_be_trained_on_is_dropped_with_its_reason(
    task: TaskEnded, reason: str, mean: float | None
) -> None:
    closed = close(task)
    assert (closed.verdict, closed.reason, closed.mean) == ("dropped", reason, mean)
    assert closed.samples == ()
    assert closed.ended == RECORDED_MS


def test_every_policy_that_trains_gets_its_group() -> None:
    recipe = Recipe.model_validate(
        {
            "name": "a-run",
            "policies": {
                "solver": {"model": "tiny"},
                "judge": {"model": "tiny"},
                "frozen": {"model": "tiny", "training": False},
            },
            "tasks": {"roles": {"policy": "solver"}},
        }
    )
    use = PolicyUse(policy="solver", tokens=5, longest=9, oldest_version=3)
    groups = GroupAssembler(recipe).on_task(a_task([an_outcome(0, policies=(use,))]), RECORDED_MS)
    assert [(group.policy, group.verdict, group.reason) for group in groups] == [
        ("solver", "scored", ""),
        ("judge", "dropped", "policy_absent"),
    ]


def test_a_policy_in_two_roles_counts_once_with_all_its_tokens() -> None:
    uses = (
        PolicyUse(policy="default", role="a", tokens=5, longest=9, oldest_version=3),
        PolicyUse(policy="default", role="b", tokens=7, longest=20, oldest_version=2),
        PolicyUse(policy="default", role="silent", tokens=0, longest=99, oldest_version=-1),
    )
    (sample,) = close(a_task([an_outcome(0, policies=uses)])).samples
    assert (sample.tokens, sample.longest, sample.oldest_version) == (12, 20, 2)


def test_of_two_outcomes_of_one_sample_the_first_counts() -> None:
    closed = close(a_task([an_outcome(1, 0.25), an_outcome(0, 0.0), an_outcome(1, 1.0)]))
    assert [(sample.sample, sample.reward) for sample in closed.samples] == [(0, 0.0), (1, 0.25)]


def test_the_first_filter_that_objects_gives_the_reason() -> None:
    task = a_task([an_outcome(0, 1.0), an_outcome(1, 1.0)])
    assert close(task).verdict == "scored"
    assert close(task, filters=["zero_advantage"]).reason == "zero_advantage"
    assert close(task, filters=[f"{HERE}:too_easy", "zero_advantage"]).reason == "too_easy"
    assert close(task, filters=["zero_advantage"]).mean == 1.0


def test_a_group_whose_only_advantage_is_masked_teaches_nothing() -> None:
    """The masked sample alone differs, and what is left has the mean of the rewards."""
    outcomes = [
        an_outcome(0, 0.5),
        an_outcome(1, 1.0, masked=True),
        an_outcome(2, 0.0, masked=True),
    ]
    task = a_task([*outcomes, an_outcome(3, 0.5)])
    assert len(close(task).samples) == 2
    closed = close(task, filters=["zero_advantage"])
    assert (closed.reason, closed.mean) == ("zero_advantage", 0.5)
    kept = a_task([*outcomes, an_outcome(3, 0.6)])
    assert close(kept, filters=["zero_advantage"]).verdict == "scored"


def test_an_estimator_that_breaks_its_contract_is_named() -> None:
    with pytest.raises(HeadraceError, match=r"gave 1 values for the 2 rewards of task 7"):
        close(a_task([an_outcome(0), an_outcome(1)]), advantage=f"{HERE}:one_value")
    with pytest.raises(HeadraceError, match="finite"):
        close(a_task([an_outcome(0)]), advantage=f"{HERE}:not_a_number")


def test_an_unknown_estimator_names_the_choices() -> None:
    with pytest.raises(UsageError, match="dr_grpo, grpo, rewards, rloo"):
        GroupAssembler(a_recipe(advantage="gpro"))


def too_easy(group: Group) -> str | None:
    return "too_easy" if group.mean >= 1.0 else None


def rewards_disagree(group: Group) -> str | None:
    means = group.mean == pytest.approx(fmean(group.rewards))
    deviates = group.deviation == pytest.approx(pstdev(group.rewards))
    return None if means and deviates else "rewards_disagree"


def one_value(rewards: Sequence[float]) -> list[float]:
    return [0.0]


def not_a_number(rewards: Sequence[float]) -> list[float]:
    return [math.nan] * len(rewards)


SAID = (PolicyUse(policy="default", tokens=5, longest=9, oldest_version=-1),)


def test_what_was_demonstrated_has_advantage_1_and_shapes_no_other() -> None:
    outcomes = [an_outcome(0, 0.0, policies=SAID), an_outcome(1, 1.0), an_outcome(2, 0.0)]
    closed = close(a_task(outcomes), advantage="dr_grpo")

    assert closed.verdict == "scored"
    assert [unpack_f32(sample.advantages) for sample in closed.samples] == [[1.0], [0.5], [-0.5]]
    assert (closed.mean, closed.samples[0].reward, closed.samples[0].oldest_version) == (0.5, 0, -1)


def test_a_group_that_was_demonstrated_whole_has_no_mean_and_passes_every_filter() -> None:
    outcomes = [an_outcome(sample, 1.0, policies=SAID) for sample in range(2)]
    closed = close(a_task(outcomes), filters=["zero_advantage", f"{HERE}:drop_all"])

    assert (closed.verdict, closed.mean, closed.deviation) == ("scored", None, None)
    assert [sample.sample for sample in closed.samples] == [0, 1]
    assert close(a_task(outcomes, minimum=3)).reason == "too_few_samples"


def test_a_filter_leaves_the_demonstrations_beside_what_it_drops() -> None:
    outcomes = [an_outcome(0, 0.0), an_outcome(1, 1.0, policies=SAID), an_outcome(2, 0.0)]
    closed = close(a_task(outcomes), filters=["zero_advantage"])

    assert (closed.verdict, closed.mean) == ("scored", 0.0)
    assert [sample.sample for sample in closed.samples] == [1]
    assert reasons(closed) == {0: "zero_advantage", 2: "zero_advantage"}


def test_who_sampled_in_one_role_was_not_demonstrated_throughout() -> None:
    uses = (SAID[0].model_copy(update={"role": "a"}), an_outcome(0).policies[0])
    (sample,) = close(a_task([an_outcome(0, policies=uses)])).samples
    assert (sample.tokens, sample.oldest_version) == (10, 3)


def drop_all(group: Group) -> str | None:
    return "unwanted"
