"""The chaos recipes' environment and engine, which fail by chance, as often as a file says, and the
agent and the filter of the recipe with two policies.

The file holds a JSON object of rates, `{"env": 0.06, "engine": 0.2}`; it may change at any time.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path
from time import monotonic

from headrace import Episode
from headrace.errors import InfrastructureError
from headrace.services.base.types import Observation, TaskView
from headrace.services.inference.engine import (
    Capacity,
    EngineOutput,
    EnginePrompt,
    EngineSetup,
    Weights,
)
from headrace.services.inference.engines.scripted import ScriptedEngine
from headrace.stream_jobs.filters import Group

REREAD_S = 0.2
TOKENS = 8
"""The engine draws among the first ids of the vocabulary."""


class Rates:
    """A file of failure rates, read again a few times a second. No file means no failures."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._read_at = 0.0
        self._rates: dict[str, float] = {}

    def strike(self, part: str) -> None:
        """Raises InfrastructureError as often as the part's rate says."""
        if monotonic() - self._read_at > REREAD_S:
            self._read_at = monotonic()
            self._rates = json.loads(self._path.read_text()) if self._path.exists() else {}
        if random.random() < self._rates.get(part, 0.0):
            raise InfrastructureError("chaos", f"the {part} was to fail")


class FlakyEnvironment:
    """Ends after `turns` steps. Its reward is 0 or 1, by the task, the sample and the actions."""

    replayable = True

    def __init__(self, rates: str, turns: int = 3) -> None:
        self._rates = Rates(rates)
        self._turns = turns
        self._said: list[str] = []

    async def reset(self, task: TaskView) -> Observation:
        """Begins anew."""
        self._rates.strike("env")
        self._said = [f"{task.seed}/{task.sample}"]
        return Observation(text="0")

    async def step(self, action: str) -> Observation:
        """Takes note of the action."""
        self._rates.strike("env")
        self._said.append(action)
        done = len(self._said) > self._turns
        reward = hashlib.sha256("/".join(self._said).encode()).digest()[0] % 2 if done else 0
        return Observation(text=str(len(self._said) - 1), reward=float(reward), terminated=done)

    async def aclose(self) -> None:
        """Nothing to give back."""


class FlakyEngine:
    """The scripted engine, failing by chance. Options: `rates`, and the scripted engine's own.

    What it says is chance, too: two workers that answer one prompt differ.
    """

    def __init__(self, setup: EngineSetup) -> None:
        options = dict(setup.options)
        self._rates = Rates(options.pop("rates"))
        self._engine = ScriptedEngine(replace(setup, options=options))

    def capacity(self) -> Capacity:
        """See Engine."""
        return self._engine.capacity()

    async def generate(self, prompt: EnginePrompt) -> EngineOutput:
        """See Engine."""
        self._rates.strike("engine")
        generation = await self._engine.generate(prompt)
        return replace(generation, tokens=[random.randrange(TOKENS) for _ in generation.tokens])

    async def load(self, weights: Weights) -> None:
        """See Engine."""
        await self._engine.load(weights)

    async def close(self, drain_s: float) -> None:
        """See Engine."""
        await self._engine.close(drain_s)


async def by_turns(episode: Episode) -> None:
    """The roles answer by turns. The rival has a reward of its own, 0 or 1 by what it said."""
    observation = await episode.reset()
    said = []
    while not observation.done:
        role = episode.roles[observation.text == "1"]
        answer = await episode.generate(observation.text, role=role)
        if role == "rival":
            said.append(answer.text)
        observation = await episode.step(answer.text)
    episode.rewards["rival"] = float(hashlib.sha256("/".join(said).encode()).digest()[0] % 2)


def drop_half(group: Group) -> str | None:
    """A filter that keeps every other group."""
    return "unwanted" if group.task % 2 else None
