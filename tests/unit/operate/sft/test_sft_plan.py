"""The order in which sequences are learned, and which are held out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.services.operate.sft.sft_plan import SftPlan, make_plan


def a_plan(lengths: list[int], groups: list[int], seed: int = 0, held_out: float = 0.2) -> SftPlan:
    return make_plan(lengths, groups, epochs=2, batch_tokens=100, held_out=held_out, seed=seed)


@given(
    st.lists(st.tuples(st.integers(1, 150), st.integers(0, 8)), min_size=1, max_size=40),
    st.integers(0, 5),
)
def test_each_epoch_learns_all_that_is_not_held_out_once(
    items: list[tuple[int, int]], seed: int
) -> None:
    lengths, groups = [one for one, _ in items], [group for _, group in items]
    plan = a_plan(lengths, groups, seed)
    assert plan == a_plan(lengths, groups, seed)
    assert {groups[i] for i in plan.held_out}.isdisjoint(
        groups[i] for update in plan.updates for i in update
    )
    for epoch in plan.epochs:
        learned = [index for update in epoch for index in update]
        assert learned
        assert sorted([*learned, *plan.held_out]) == list(range(len(items)))
    assert plan.epoch_ends[-1] == len(plan.updates)


@given(st.lists(st.integers(1, 150), min_size=1, max_size=40), st.integers(0, 5))
def test_an_update_has_at_most_so_many_tokens_or_one_sequence(
    lengths: list[int], seed: int
) -> None:
    plan = a_plan(lengths, list(range(len(lengths))), seed)
    for epoch in plan.epochs:
        sizes = [sum(lengths[index] for index in update) for update in epoch]
        assert all(
            size <= 100 or len(update) == 1 for size, update in zip(sizes, epoch, strict=True)
        )
        # The first sequence of the next update did not fit.
        assert all(sizes[n] + lengths[epoch[n + 1][0]] > 100 for n in range(len(epoch) - 1))
    for part in plan.measured:
        assert sum(lengths[index] for index in part) <= 100 or len(part) == 1


def test_another_seed_is_another_order_and_nothing_need_be_held_out() -> None:
    lengths, groups = [10] * 50, list(range(50))
    first, second = a_plan(lengths, groups, 0), a_plan(lengths, groups, 1)
    assert first.held_out != second.held_out
    assert first.epochs != second.epochs
    assert first.epochs[0] != first.epochs[1]
    assert len(first.held_out) == 10
    assert a_plan(lengths, groups, held_out=0).held_out == []
