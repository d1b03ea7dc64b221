"""Checks that an environment keeps the contract of `services/env/environment.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from secrets import token_hex
from typing import Any

from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.services.env.instances import Instances
from headrace.services.env.service import load_environments
from headrace.services.operate.conformance.conformance_report import (
    ConformanceReport,
    check_rules,
    chosen,
    rules_of,
)
from headrace.services.operate.conformance.environment.environment_trial import (
    KEY,
    EnvironmentTrial,
)
from headrace.services.operate.conformance.environment.life_rules import LifeRules
from headrace.services.operate.conformance.environment.observation_rules import ObservationRules

ACTIONS = ("0", "1", "a")
"""What the agent does, if nothing else is given."""
SLOTS = 8


def check_environment(
    use: str,
    options: Mapping[str, Any],
    *,
    payload: Mapping[str, Any] | None = None,
    actions: Sequence[str] = ACTIONS,
    steps: int = 20,
    call_s: float = 10.0,
    blocked_s: float = 0.5,
    persistent: bool = False,
    score: Mapping[str, Any] | None = None,
    rules: Collection[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> ConformanceReport:
    """Tries an environment as a recipe names it. Blocks, for seconds or minutes.

    The parameters are those of `EnvironmentTrial`. `rules` names the rules that are tried; empty
    means all. Raises UsageError if there is no such class or rule.
    """
    recipe = parse_recipe(
        {
            "name": "conformance",
            "policies": {"default": {"model": "tiny-llama"}},
            "environments": {KEY: {"use": use, "options": dict(options), "slots": SLOTS}},
            "tasks": {"environment": KEY},
        },
        "the recipe of the trial",
    )
    namespace = f"conformance-{token_hex(4)}"  # What another run has left is not found.
    [setup] = load_environments(recipe, namespace, Instances(_drop, "conformance")).values()
    trial = EnvironmentTrial(
        *(setup, payload or {}, actions, steps, call_s, blocked_s, persistent, score), namespace
    )
    wanted = chosen([*rules_of(ObservationRules(trial)), *rules_of(LifeRules(trial))], rules)
    return check_rules("environment", use, wanted, setup.close_pool, say=say)


async def _drop(event: object) -> None:
    """Drops an event about an instance."""
