"""The learning rate of each update."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace.schemas.recipe.policy import Training
from headrace.trainer.learning_rate import learning_rate_at


def rates(updates: int, **settings: Any) -> list[float]:
    training = Training(learning_rate=1.0, **settings)
    return [learning_rate_at(training, update, 1.0) for update in range(1, updates + 1)]


def test_the_warmup_rises_to_a_constant_rate() -> None:
    assert rates(6, warmup_updates=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert rates(3) == [1, 1, 1]


def test_a_linear_schedule_falls_after_the_warmup_and_stays_at_its_end() -> None:
    found = rates(8, schedule="linear", warmup_updates=2, total_updates=6, final_learning_rate=0.2)
    assert found == pytest.approx([0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_a_cosine_schedule_is_half_a_cosine() -> None:
    found = rates(5, schedule="cosine", total_updates=4)
    assert found == pytest.approx([(1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 0, 0], abs=1e-12)


def test_a_rate_below_the_final_one_stays_as_it_is() -> None:
    training = Training(
        learning_rate=1.0, schedule="linear", total_updates=4, final_learning_rate=0.5
    )
    assert [learning_rate_at(training, update, 0.1) for update in (1, 4)] == [0.1, 0.1]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"schedule": "cosine"}, "needs `total_updates`"),
        ({"schedule": "linear", "total_updates": 5, "warmup_updates": 5}, "must be more than"),
        ({"total_updates": 5}, "have no effect"),
        ({"final_learning_rate": 0.1}, "have no effect"),
    ],
)
def test_a_schedule_without_an_end_and_an_end_without_a_schedule_are_refused(
    settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        Training(**settings)
