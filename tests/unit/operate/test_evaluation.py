"""avg@k and pass@k: without bias, with intervals, of what says something of the policy."""

from __future__ import annotations

from itertools import combinations
from random import Random
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import EpisodeEnded, Failure, PolicyUse, TaskEnded
from headrace.services.operate.evaluation import (
    EvaluationResult,
    Evaluations,
    clustered,
    pass_at_k,
    student_t,
    wilson,
)

LOST = Failure(origin="infrastructure", code="lost")


def ended(*rewards: float | None, version: int = 3, **changes: Any) -> TaskEnded:
    """A task to evaluate; a reward of None is a sample that the infrastructure failed."""
    use = PolicyUse(policy="default", role="policy", tokens=2, longest=2, oldest_version=version)
    outcomes = tuple(
        EpisodeEnded(
            task=0,
            sample=number,
            item_id="i",
            ending="failed" if reward is None else "finished",
            failure=LOST if reward is None else None,
            reward=reward,
            policies=() if reward is None else (use,),
        )
        for number, reward in enumerate(rewards)
    )
    fields = {"task": 0, "source": "s", "task_id": "t", "item_id": "i", "purpose": "evaluate"}
    return TaskEnded(**{**fields, "closed_by": "all", "outcomes": outcomes, **changes})


def test_items_count_if_all_their_episodes_overflow_or_meet_their_deadline() -> None:
    def without_turns(task_id: str, ending: str, failure: Failure | None) -> TaskEnded:
        task = ended(1.0, 1.0, 1.0, 1.0, task_id=task_id, versions={"default": 3})
        changes = {"ending": ending, "failure": failure, "reward": None, "policies": ()}
        outcomes = tuple(one.model_copy(update=changes) for one in task.outcomes)
        return task.model_copy(update={"outcomes": outcomes})

    late = Failure(origin="infrastructure", code="deadline")
    evaluations = Evaluations()
    evaluations.on_task_ended(ended(1.0, 1.0, 1.0, 1.0, versions={"default": 3}))
    evaluations.on_task_ended(without_turns("long", "overflow", None))
    evaluations.on_task_ended(without_turns("slow", "deadline", late))
    (result,) = evaluations.of("default").values()
    assert result.average is not None
    assert result.average.value == pytest.approx(1 / 3)
    assert (len(result.rewards), result.failed) == (3, 0)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_one_that_passed(
    passed: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(passed)))
    choices = [any(choice) for choice in combinations(passed, k)]
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(fmean(choices))


def test_pass_at_k_of_fewer_samples_is_not_defined() -> None:
    with pytest.raises(ValueError, match="pass@5 of 1 passed among 4 samples"):
        pass_at_k(4, 1, 5)


def test_intervals_hold_what_they_should_19_times_of_20() -> None:
    chance, rounds, items = Random(7), 400, 40
    held = {"clustered": 0, "wilson": 0}
    for _ in range(rounds):
        shares = [chance.random() for _ in range(items)]
        drawn = [fmean(chance.random() < share for _ in range(4)) for share in shares]
        for name, one in (("clustered", clustered(drawn)), ("wilson", wilson(fmean(drawn), items))):
            held[name] += one.low <= 0.5 <= one.high
    assert held["clustered"] >= 0.91 * rounds
    assert held["wilson"] >= 0.95 * rounds  # of what varies less than a coin: never too narrow


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (7, 2.3646), (63, 1.9983)]
)
def test_the_quantile_of_student_is_that_of_tables(freedom: int, quantile: float) -> None:
    assert student_t(freedom) == pytest.approx(quantile, rel=0.0013)


def test_the_interval_of_few_items_holds_what_it_should_19_times_of_20() -> None:
    """With the quantile of a normal distribution, 4 items hold the mean 86 times of 100."""
    chance, rounds = Random(7), 4_000
    held = 0
    for _ in range(rounds):
        one = clustered([chance.gauss(0.5, 0.1) for _ in range(4)])
        held += one.low <= 0.5 <= one.high
    assert 0.94 * rounds <= held <= 0.96 * rounds


@given(
    st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4).map(tuple), min_size=1, max_size=9)
)
def test_the_interval_of_rewards_between_0_and_1_stays_there(
    items: list[tuple[float, ...]],
) -> None:
    evaluation = EvaluationResult(rewards={("s", str(n)): item for n, item in enumerate(items)})
    one = evaluation.average
    assert one is not None
    assert 0 <= one.low <= one.value + 1e-9
    assert one.value - 1e-9 <= one.high <= 1
    assert one.low < one.high


def test_rewards_beyond_1_have_an_interval_without_bounds() -> None:
    evaluation = EvaluationResult(rewards={("s", "a"): (2.0,), ("s", "b"): (0.0,)})
    one = evaluation.average
    assert one is not None
    assert (one.low, one.high) == pytest.approx((-11.706, 13.706), 1e-3)


@pytest.mark.parametrize("items", [1, 2, 8])
def test_equal_rewards_beyond_0_and_1_say_nothing_of_other_items(items: int) -> None:
    lost = EvaluationResult(rewards={("s", str(n)): (-1.0, -1.0) for n in range(items)})
    assert lost.average is not None
    assert str(lost.average) == "-1.000 [-inf, inf]"
    assert lost.average.to_tree() == {"value": -1.0, "low": None, "high": None}
    assert str(lost.minus(lost)) == "0.000 [-inf, inf]"


def test_differences_that_rounding_alone_makes_unequal_are_no_certainty() -> None:
    """0.3 - 0.2 is 0.09999999999999998 and 0.1 - 0 is 0.1."""
    ours = EvaluationResult(rewards={("s", "a"): (0.3,), ("s", "b"): (0.1,)})
    theirs = EvaluationResult(rewards={("s", "a"): (0.2,), ("s", "b"): (0.0,)})
    difference = ours.minus(theirs)
    assert difference is not None
    assert difference.low < 0 < 0.5 < difference.high


def test_a_reward_passes_0_although_its_parts_were_rounded() -> None:
    passed = EvaluationResult(0.0, rewards={("s", "a"): (1.0 - 0.9 - 0.1,)}).passes(1)
    assert passed is not None
    assert passed.value == 1.0


def test_the_interval_of_rare_wins_among_losses_is_never_too_narrow() -> None:
    """One win in 20 for 1, else -1: of 16 items, none is won in nearly half of the rounds."""
    chance, rounds = Random(7), 500
    held = 0
    for _ in range(rounds):
        drawn = [1.0 if chance.random() < 0.05 else -1.0 for _ in range(16)]
        one = EvaluationResult(rewards={("s", str(n)): (r,) for n, r in enumerate(drawn)}).average
        assert one is not None
        held += one.low <= -0.9 <= one.high
    assert held >= 0.95 * rounds


def test_a_difference_of_shares_lies_between_minus_1_and_1() -> None:
    ours = EvaluationResult(rewards={("s", "a"): (1.0,), ("s", "b"): (0.0,)})
    theirs = EvaluationResult(rewards={("s", "a"): (0.0,), ("s", "b"): (0.0,)})
    difference = ours.minus(theirs)
    assert difference is not None
    assert (difference.value, difference.low, difference.high) == (0.5, -1.0, 1.0)


def test_equal_differences_of_few_items_are_no_certainty() -> None:
    """8 of 10 items are alike in both runs, and we win the others: 10 tries often show none."""
    chance, rounds, items = Random(7), 2_000, 10
    held = 0
    for _ in range(rounds):
        won = [float(chance.random() < 0.2) for _ in range(items)]
        ours, theirs = (
            EvaluationResult(rewards={("s", str(n)): (one * run,) for n, one in enumerate(won)})
            for run in (1, 0)
        )
        difference = ours.minus(theirs)
        assert difference is not None
        assert difference.low < difference.high
        held += difference.low <= 0.2 <= difference.high
    assert held >= 0.93 * rounds
    same = EvaluationResult(rewards={("s", str(n)): (0.5,) for n in range(10)})
    assert str(same.minus(same)) == "0.000 [-0.278, 0.278]"


def test_a_reward_passes_although_its_parts_were_rounded() -> None:
    """Python's `sum` of these floats is below 1 before version 3.12."""
    reward = 0.0
    for _ in range(10):
        reward += 0.1
    assert reward < 1.0
    passed = EvaluationResult(rewards={("s", "a"): (reward,)}).passes(1)
    assert passed is not None
    assert passed.value == 1.0


def test_a_policy_of_one_version_is_measured_even_if_no_sample_counts() -> None:
    evaluations = Evaluations(fixed=["default"])
    evaluations.on_task_ended(ended(None, None))
    assert evaluations.of("default")[0].to_tree()["failed"] == 2
    assert Evaluations(fixed=["default"]).of("default")[0].to_tree()["items"] == 0
    assert evaluations.of("judge") == {}


def test_a_policy_is_not_measured_by_episodes_in_which_only_others_play() -> None:
    evaluations = Evaluations()
    versions = {"default": 3, "proposer": 3}
    evaluations.on_task_ended(ended(1.0, 0.0, versions=versions))
    assert evaluations.of("proposer") == {}
    assert list(evaluations.to_tree()) == ["default"]
    evaluations.on_task_ended(ended(None, None, versions={"default": 4, "proposer": 4}))
    assert evaluations.of("proposer")[4].failed == 2, "nobody had a turn"


def test_an_evaluation_counts_what_says_something_of_the_policy() -> None:
    evaluation = EvaluationResult(passing=0.5)
    evaluation.add(ended(1.0, 0.0, 0.6, 0.0, task_id="a"))
    evaluation.add(ended(0.0, 0.0, None, 0.0, task_id="b"))
    evaluation.add(ended(None, None, task_id="c"))
    cut = ended(0.0, 0.0, task_id="d")
    limit = cut.outcomes[0].model_copy(update={"ending": "turn_limit", "reward": None})
    mute = cut.outcomes[1].model_copy(update={"reward": None})
    evaluation.add(cut.model_copy(update={"outcomes": (limit, mute)}))

    assert (len(evaluation.rewards), evaluation.asked, evaluation.failed) == (3, 4, 4)
    assert evaluation.average is not None
    assert evaluation.average.value == pytest.approx((0.4 + 0.0 + 0.0) / 3)
    by_k = {k: one.value for k in evaluation.powers() if (one := evaluation.passes(k))}
    assert by_k == pytest.approx({1: 0.5 / 3, 2: (1 - 1 / 6) / 2, 4: 1.0})


def test_a_difference_pairs_the_same_tasks_and_so_has_a_narrower_interval() -> None:
    ours, theirs = EvaluationResult(), EvaluationResult()
    for number in range(8):
        hard = number % 2
        theirs.add(ended(0.5 * hard, 0.5 * hard, task_id=str(number)))
        ours.add(ended(0.5 * hard + 0.1, 0.5 * hard + 0.1 * (number < 7), task_id=str(number)))
    ours.add(ended(9.0, task_id="only ours"))
    theirs.add(ended(9.0, task_id="0", source="another"))

    difference = ours.minus(theirs)
    assert difference is not None
    assert difference.value == pytest.approx((7 * 0.1 + 0.05) / 8)
    assert 0 < difference.low < difference.high < 0.2, "hard and easy tasks cancel out"
    reverse = theirs.minus(ours)
    assert reverse is not None
    assert reverse.value == pytest.approx(-difference.value)
    assert EvaluationResult().minus(theirs) is None


def test_nothing_measured_has_no_figures() -> None:
    evaluation = EvaluationResult()
    evaluation.add(ended(None))
    assert (evaluation.average, evaluation.passes(1)) == (None, None)
    assert str(evaluation) == "0 items   failed 1"
    assert evaluation.to_tree()["avg"] is None


def test_each_version_is_measured_apart_and_training_and_cancelled_tasks_are_not() -> None:
    evaluations = Evaluations()
    evaluations.on_task_ended(ended(1.0, 1.0, version=20))
    evaluations.on_task_ended(ended(0.0, 1.0, version=10))
    evaluations.on_task_ended(ended(0.0, purpose="train"))
    evaluations.on_task_ended(ended(0.0, closed_by="cancelled"))
    measured = evaluations.of("default")
    assert list(measured) == [10, 20]
    passes = [one.passes(1) for one in measured.values()]
    assert [one and one.value for one in passes] == [0.5, 1.0]
    assert evaluations.of("other") == {}
