"""Plays episodes without Kafka and without a model. Start it in this folder: `pytest`."""

from __future__ import annotations

import pytest

from headrace import play_episode


def largest_coin(amount: str) -> str:
    """A player that always pays with the largest coin that is not too much."""
    return str(max(coin for coin in (1, 2, 5) if coin <= int(amount)))


@pytest.mark.parametrize("item", range(9))
def test_the_largest_coins_pay_every_amount(item: int) -> None:
    outcome = play_episode("recipe.toml", largest_coin, item=item)
    assert outcome.ending == "finished"
    assert outcome.reward == 1


@pytest.mark.parametrize("coin", ["1", "5"])
def test_one_kind_of_coin_does_not_pay_9(coin: str) -> None:
    assert play_episode("recipe.toml", lambda amount: coin, item=8).reward == 0
