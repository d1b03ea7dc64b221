"""References in the options of environments: the recipe's are resolved, and a task's never."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.schemas.events import ActionRequested, EnvironmentUse, Event
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.base.redactor import REDACTOR
from headrace.services.base.shown import shown
from headrace.services.base.types import Observation
from headrace.services.env.answers import answer_to
from headrace.services.env.environment import Claim
from headrace.services.env.instances import Instances
from headrace.services.env.libraries.libraries_setup import LibrarySetup
from headrace.services.env.sandbox.pool import DockerSetup
from headrace.services.env.service import load_environments
from headrace.services.env.setup import Setup

CANARY = "env-canary-1234"
REFERENCE = {"env": "ENV_SECRET"}


class Keeping:
    """An environment that keeps its options."""

    replayable = True

    def __init__(self, **options: Any) -> None:
        self.options = options


def loaded(use: str, options: Mapping[str, Any]) -> Setup:
    recipe: Recipe = parse_recipe(
        {
            "name": "demo",
            "environments": {"default": {"use": use, "options": options}},
            "policies": {"default": {"model": "tiny-llama"}},
        },
        "demo",
    )
    assert CANARY not in recipe.canonical()

    async def send(event: Event) -> None:
        raise AssertionError(event)

    return load_environments(recipe, "demo", Instances(send, "worker"))["default"]


def test_a_tasks_reference_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    # Any team may write a task, and could otherwise read the worker's environment.
    monkeypatch.setenv("ENV_SECRET", CANARY)
    setup = loaded(f"{__name__}:Keeping", {"own": REFERENCE})
    use = EnvironmentUse(use="default", options='{"theirs": {"env": "ENV_SECRET"}}')
    claim = Claim(task=0, sample=0, attempt=0, partition=0, offset=0, expires_at=0.0)
    made = asyncio.run(setup.take(use, claim))
    assert isinstance(made, Keeping)
    assert made.options == {"own": CANARY, "theirs": REFERENCE}


def test_options_of_tools_and_libraries_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENV_SECRET", CANARY)
    setup = loaded("docker", {"image": "x", "tool": "shell", "tool_options": {"prompt": REFERENCE}})
    assert isinstance(setup, DockerSetup)
    assert setup.settings.tool_options == {"prompt": CANARY}
    setup = loaded("reasoning_gym", {"suffix": REFERENCE})
    assert isinstance(setup, LibrarySetup)
    assert setup.options == {"suffix": CANARY}


def test_a_missing_secret_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENV_SECRET", raising=False)
    match = r"environments\.default\.options\.a\.b: the environment variable ENV_SECRET is not set"
    with pytest.raises(UsageError, match=match):
        loaded(f"{__name__}:Keeping", {"a": {"b": REFERENCE}})


def test_an_answer_equals_the_recorded_one_after_a_replay() -> None:
    REDACTOR.add("ENV_SECRET", CANARY)
    action = ActionRequested(
        task=0, sample=0, call="1", index=0, kind="reset", digest=bytes(16), expires_at=0,
        environment=EnvironmentUse(use="default"), payload="{}", seed=0,
    )  # fmt: skip
    observation = Observation(text=CANARY, data={"key": CANARY}, rewards={CANARY: 1.0})
    answer = answer_to(action, observation, "i")
    assert CANARY not in repr(answer)
    # The log redacts what it writes: the worker compares its answer with the recorded one.
    assert shown(answer) == shown(REDACTOR.model(answer))
