"""A policy and an environment of chance, so that an answer given twice differs."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from schemas.recipe import Recipe
from services.inference.engine import EngineSetup, Generation, Prompt
from services.inference.scripted import ScriptedEngine
from services.types import Observation, TaskView

LETTERS = "abcdefgh"
TURNS = 3


class Dice(ScriptedEngine):
    """Draws tokens by the loop's chance, after a moment: no two generations are alike."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self._random = asyncio.get_running_loop().random  # type: ignore[attr-defined]

    async def _continue(self, prompt: Prompt) -> Generation:
        await asyncio.sleep(self._random.uniform(0.005, 0.2))
        generation = await super()._continue(prompt)
        generation.tokens[:] = self._random.choices(prompt.allowed, k=len(generation.tokens))
        return generation


class Labyrinth:
    """What it shows follows from the task and all actions so far. Ends after TURNS steps."""

    replayable = True

    def __init__(self) -> None:
        self._random = asyncio.get_running_loop().random  # type: ignore[attr-defined]

    async def reset(self, task: TaskView) -> Observation:
        """Begins at a place of the task's own."""
        self._path = f"{task.number}/{task.sample}"
        self._left = TURNS
        return await self._look()

    async def step(self, action: str) -> Observation:
        """Goes on."""
        self._path += f"/{action}"
        self._left -= 1
        return await self._look()

    async def aclose(self) -> None:
        """Nothing to give back."""

    async def _look(self) -> Observation:
        await asyncio.sleep(self._random.uniform(0.001, 0.1))
        return Observation(
            text=where(self._path),
            reward=reward(self._path) if self._left < TURNS else None,
            terminated=self._left == 0,
        )


def where(path: str) -> str:
    """What is seen after a path."""
    return "".join(LETTERS[byte % len(LETTERS)] for byte in _digest(path)[:3])


def reward(path: str) -> float:
    """What the last step of a path earns."""
    return _digest(path)[3] / 255


def _digest(path: str) -> bytes:
    return hashlib.sha256(path.encode()).digest()


def recipe() -> Recipe:
    """A recipe of this world."""
    return Recipe.model_validate(_RECIPE)


_RECIPE: dict[str, Any] = {
    "name": "flow",
    "partitions": 3,
    "tasks": {
        "options": {"items": 16},
        "epochs": 1,
        "backlog": 6,
        "samples": 3,
        "max_turns": TURNS,
        "max_tokens": 2 * TURNS,
        "deadline_s": 180,
    },
    "environments": {"default": {"use": "tests.simulation.world:Labyrinth", "slots": 16}},
    "scheduler": {"live_episodes": 20},
    "policies": {
        "default": {
            "model": "tiny-llama",
            "engine": {"use": "tests.simulation.world:Dice", "slots": 8},
            "sampling": {"max_tokens": 2, "allowed": list(LETTERS)},
            "batches": {"groups": 3, "batch_wait_s": 5, "max_staleness": 1, "prefetch": 1},
        }
    },
}
