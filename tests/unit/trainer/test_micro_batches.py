"""Micro-batches: every sequence once, within the bound, and evenly divided among ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.trainer.packing.layout import packed
from headrace.trainer.packing.micro_batches import SEEN, Packer, cost
from headrace.trainer.packing.shared_prefixes import SHARED
from headrace.trainer.sequences import Ints

LENGTHS = [700, 30, 512, 90, 90, 2048, 1, 333, 4096, 64]
WIDTH = 1024


def apart(lengths: list[int]) -> list[Ints]:
    """Sequences of these lengths that share nothing."""
    return [100_000 * index + np.arange(length) for index, length in enumerate(lengths)]


def group(prompt: int, answers: list[int]) -> list[Ints]:
    """Answers to one prompt, with these lengths."""
    return [
        np.concatenate([np.arange(prompt), 100_000 * (index + 1) + np.arange(length)])
        for index, length in enumerate(answers)
    ]


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=60), max_size=30),
    st.integers(1, 5),
    st.integers(1, 200),
    st.booleans(),
)
def test_every_sequence_is_in_one_micro_batch_within_the_bound(
    lists: list[list[int]], ranks: int, max_tokens: int, packs: bool
) -> None:
    tokens = [np.array(one, dtype=np.int64) for one in lists]
    packer = Packer(ranks, WIDTH, packs)
    divided = packer.divide(tokens, max_tokens)

    assert len(divided) == ranks
    assert len({len(of_rank) for of_rank in divided}) == 1
    bins = [one for of_rank in divided for one in of_rank]
    assert sorted(index for one in bins for index in one) == [*range(len(tokens))]
    for one in bins:
        assert len(one) <= 1 or packer.size([tokens[index] for index in one]) <= max_tokens
    assert divided == packer.divide(tokens, max_tokens)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=70), min_size=1, max_size=20))
def test_each_token_has_its_place_once_for_all_that_share_it(lists: list[list[int]]) -> None:
    tokens = [np.array(one, dtype=np.int64) for one in lists]
    layout = packed(tokens)
    for one, places in zip(tokens, layout.places, strict=True):
        assert layout.ids[places].tolist() == one.tolist()
        assert layout.positions[places].tolist() == [*range(len(one))]
    assert len(layout.ids) == Packer(1, WIDTH, True).read(tokens) <= sum(map(len, tokens))
    assert {*np.concatenate(layout.places).tolist()} == {*range(len(layout.ids))}
    firsts = {tuple(one[:SHARED]) for one in lists if len(one) > SHARED}
    count = sum(len(one) > SHARED and tuple(one[:SHARED]) in firsts for one in lists)
    assert len(layout.ids) <= sum(map(len, tokens)) - SHARED * (count - len(firsts))


def test_eight_answers_to_one_prompt_read_it_once() -> None:
    packer = Packer(1, WIDTH, packed=True)
    tokens = group(8_000, [200] * 8)
    assert packer.read(tokens) == 8_000 + 8 * 200
    assert packer.divide(tokens, 16_384) == [[[*range(8)]]]


def test_real_tokens_count_and_not_padding() -> None:
    tokens = apart([4_000, *[10] * 50])
    [[one]] = Packer(1, WIDTH, packed=True).divide(tokens, 4_500)
    assert sorted(one) == [*range(51)]
    assert len(Packer(1, WIDTH, packed=False).divide(tokens, 4_500)[0]) == 2


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 20])
def test_the_load_of_ranks_is_even(ranks: int, packs: bool) -> None:
    tokens = apart(LENGTHS)
    shares = Packer(ranks, WIDTH, packs).divide(tokens, 4_096)
    costs = [cost(length, WIDTH) for length in LENGTHS]
    steps = zip(*shares, strict=True)
    time = sum(max(sum(costs[index] for index in one) for one in step) for step in steps)
    assert time <= sum(costs) / ranks + max(costs)


def test_a_long_sequence_counts_for_more_than_its_tokens() -> None:
    """By tokens alone the second rank would have as much as the first one."""
    packer = Packer(2, 64, packed=True)
    assert packer.divide(apart([4_000, *[500] * 8]), 4_096)[0] == [[0]]


def test_a_group_is_split_only_if_ranks_would_wait() -> None:
    """To read a short prompt twice costs less than half of the answers, a long one more."""
    packer = Packer(2, WIDTH, packed=True)
    first, second = packer.divide(group(32, [500] * 8), 16_384)
    assert len(first[0]) == len(second[0]) == 4
    together = packer.divide(group(4_096, [16] * 8), 16_384)
    assert sorted(map(len, together[0] + together[1])) == [0, 8]


@given(
    st.integers(200, 3_000), st.lists(st.integers(1, 40), min_size=1, max_size=60),
    st.integers(1, 4), st.integers(1, 3),
)  # fmt: skip
def test_the_lengths_of_a_micro_batch_are_bounded_though_a_beginning_is_read_once(
    prompt: int, answers: list[int], groups: int, ranks: int
) -> None:
    tokens = [
        np.array([group] * prompt + [group + 10] * answer)
        for group in range(groups)
        for answer in answers
    ]
    for share in Packer(ranks, WIDTH, packed=True).divide(tokens, 4_096):
        for chosen in share:
            assert sum(len(tokens[index]) for index in chosen) <= SEEN * 4_096
