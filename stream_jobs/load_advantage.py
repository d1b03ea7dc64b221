"""The built-in advantage estimators by name, and how a recipe's is loaded."""

from __future__ import annotations

from headrace.schemas.recipe.tables import Choice
from headrace.services.base.plugins import load_with_options
from headrace.stream_jobs.advantages import Advantage, TurnAdvantage

ADVANTAGES = {
    **{name: f"headrace.stream_jobs.advantages:{name}" for name in ("grpo", "dr_grpo", "rloo")},
    "turn_returns": "headrace.stream_jobs.turn_advantages.turn_returns:TurnReturns",
    "rewards": "headrace.stream_jobs.turn_advantages.turn_rewards:TurnRewards",
}
"""The built-in estimators by the recipe's name."""


def load_advantage(choice: Choice) -> Advantage | TurnAdvantage:
    """Returns the recipe's estimator with its options. Raises UsageError if it has no such one."""
    estimator: Advantage | TurnAdvantage = load_with_options("advantage", choice, ADVANTAGES)
    return estimator
