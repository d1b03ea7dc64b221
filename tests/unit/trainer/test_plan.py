"""The plan: every sample once, bounded micro-batches, the same for every rank."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import BatchAssembled, BatchSample, Ref
from headrace.trainer.plan import pack, plan

REF = Ref(topic="t", partition=0, offset=0, digest=bytes(16))


def batch_of(shapes: list[tuple[int, int]]) -> BatchAssembled:
    """A batch whose samples have these (trained tokens, longest sequence)."""
    samples = tuple(
        BatchSample(
            task=index,
            sample=0,
            trajectory=REF,
            advantages=b"",
            tokens=tokens,
            longest=longest,
            oldest_version=0,
        )
        for index, (tokens, longest) in enumerate(shapes)
    )
    return BatchAssembled(
        policy="p",
        version=1,
        recipe=bytes(32),
        seed=0,
        samples=samples,
        sampled_tokens=sum(tokens for tokens, _ in shapes),
        low_mark=0,
        groups_read=0,
    )


shapes = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 200)), max_size=40)


@given(shapes, st.integers(1, 8), st.integers(1, 6))
def test_every_sample_is_trained_once_and_counted_once(
    shapes: list[tuple[int, int]], ranks: int, updates: int
) -> None:
    batch = batch_of(shapes)

    planned = plan(batch, ranks, updates)

    shares = [index for update in planned for share in update.ranks for index in share]
    assert sorted(shares) == list(range(len(shapes)))
    assert sum(update.tokens for update in planned) == batch.sampled_tokens
    for update in planned:
        assert len(update.ranks) == ranks
        assert update.tokens == sum(shapes[i][0] for share in update.ranks for i in share)


@given(shapes, st.integers(1, 8), st.integers(1, 6))
def test_ranks_are_balanced_to_within_one_sample(
    shapes: list[tuple[int, int]], ranks: int, updates: int
) -> None:
    for update in plan(batch_of(shapes), ranks, updates):
        loads = [sum(shapes[index][1] for index in share) for share in update.ranks]
        longest = max(shapes[index][1] for share in update.ranks for index in share)
        assert max(loads) - min(loads) <= longest


def test_the_ranks_change_nothing_but_who_computes() -> None:
    batch = batch_of([(5, 9), (3, 4), (8, 20), (1, 2), (2, 2), (7, 11)])
    one, two = plan(batch, 1, 2), plan(batch, 2, 2)
    assert [update.tokens for update in one] == [update.tokens for update in two]
    for single, shared in zip(one, two, strict=True):
        assert sorted(single.ranks[0]) == sorted(shared.ranks[0] + shared.ranks[1])


def test_a_groups_samples_are_spread_over_the_updates() -> None:
    planned = plan(batch_of([(1, 1)] * 8), 1, 2)
    assert [update.ranks for update in planned] == [((0, 2, 4, 6),), ((1, 3, 5, 7),)]


def test_an_update_without_tokens_is_left_out() -> None:
    assert plan(batch_of([]), 2, 3) == ()
    assert len(plan(batch_of([(0, 3), (1, 3)]), 1, 2)) == 1


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 1000))
def test_micro_batches_hold_every_sequence_once_within_the_bound(
    lengths: list[int], max_tokens: int
) -> None:
    packed = pack(lengths, max_tokens)

    assert sorted(index for chosen in packed for index in chosen) == list(range(len(lengths)))
    for chosen in packed:
        padded = len(chosen) * max(lengths[index] for index in chosen)
        assert padded <= max_tokens or len(chosen) == 1
    assert packed == pack(lengths, max_tokens)
