"""Checks that an agent keeps the contract of `services/agent/episode.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.services.agent.agents import BUILTIN, load_agents
from headrace.services.agent.gateway.clients import ClientAgent
from headrace.services.agent.gateway.program import Command
from headrace.services.agent.records import AgentSetup
from headrace.services.base.plugins import load
from headrace.services.operate.conformance.agent.agent_rules import AgentRules
from headrace.services.operate.conformance.agent.agent_trial import SEED, AgentTrial
from headrace.services.operate.conformance.agent.scripted_episode import NAME, Script
from headrace.services.operate.conformance.conformance_report import (
    ConformanceReport,
    check_rules,
    chosen,
    rules_of,
)
from headrace.services.tasks.task_maker import Item, make_alone

OBSERVATIONS = ("What is next?", "And then?")
ANSWERS = ("a", "b", "c")
WORLD = "world"
TURNS = 100


def check_agent(
    use: str,
    options: Mapping[str, Any],
    *,
    payload: Mapping[str, Any] | None = None,
    observations: Sequence[str] = OBSERVATIONS,
    answers: Sequence[str] = ANSWERS,
    steps: int = 3,
    roles: Sequence[str] = ("policy",),
    judges: Sequence[str] = (),
    model: str = "tiny-chat",
    blocked_s: float = 0.5,
    connects: bool = False,
    rules: Collection[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> ConformanceReport:
    """Tries an agent as a recipe names it, with an environment and policies that follow a script.

    `observations`, `answers` and `steps` are the script. `roles` are the names under which the
    agent asks policies, and `judges` those of its judges. `model` gives the tokenizer. `rules`
    names the rules that are tried; empty means all. Blocks, for seconds. Raises UsageError if there
    is no such agent, model or rule, or if it is not an agent of Python code.
    """
    environments = {name: {"use": "external"} for name in (WORLD, *judges)}
    recipe = parse_recipe(
        {
            "name": NAME,
            "policies": {"default": {"model": model}},
            "agents": {"default": {"use": use, "options": dict(options)}},
            "environments": environments,
            "tasks": {
                "environment": WORLD, "roles": dict.fromkeys(roles, "default"),
                "max_turns": TURNS, "max_tokens": 100_000, "attempts": 2, "deadline_s": 600,
            },
        },
        "the recipe of the trial",
    )  # fmt: skip

    if load("agent", use, BUILTIN) in (ClientAgent, Command):
        raise UsageError(
            f"the agent {use!r} plays through the gateway, so it can't be tried here: "
            "`headrace try` plays an episode of a program"
        )

    def make() -> AgentSetup:
        return load_agents(recipe)["default"]

    item = Item(NAME, payload or {}, seed=SEED)
    trial = AgentTrial(
        recipe,
        make,
        make_alone(recipe, NAME, item),
        Script(tuple(observations), tuple(answers), steps),
        blocked_s,
        connects,
    )
    return check_rules("agent", use, chosen(rules_of(AgentRules(trial)), rules), say=say)
