"""Environments on OpenEnv's own server. Run by a Python that has openenv; prints its port."""

from __future__ import annotations

import os
import random
import socket
import time
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int
    game: str = "guess"


class Hint(Observation):
    text: str = ""
    tries: int = 0


class GuessEnvironment(Environment):
    """A number is drawn from the seed; some numbers break the environment."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._secret, self._tries, self._name = 0, 0, ""

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, highest: int = 10
    ) -> Hint:
        self._secret, self._tries = random.Random(seed).randint(1, highest), 0
        self._name = episode_id or ""
        return Hint(text=f"1 to {highest}?", metadata={"episode": self._name})

    def step(self, action: Guess) -> Hint:
        self._tries += 1
        if action.number == -1:
            raise ZeroDivisionError("by zero")
        if action.number == -2:
            os._exit(3)
        if action.number == -3:
            time.sleep(600)
        if action.number == -4:
            return Hint(text="x" * (1 << 20))
        right = action.number == self._secret
        return Hint(text="yes" if right else "no", tries=self._tries, done=right, reward=right)

    @property
    def state(self) -> State:
        return State(episode_id=self._name, step_count=self._tries)


class AddEnvironment(MCPEnvironment):
    """Tools, one of which takes the answer, as OpenEnv's environments of tools do it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("add")

        @server.tool
        def add(a: int, b: int) -> int:
            """The sum."""
            return a + b

        @server.tool
        def submit(answer: int) -> str:
            """Takes the answer, and ends the episode."""
            return "taken"

        super().__init__(server)
        self._sum, self._steps = 0, 0

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **more: Any
    ) -> Observation:
        self._sum, self._steps = 2 + more["plus"], 0
        return Observation(metadata={"question": f"2 plus {more['plus']}?"})

    async def step_async(self, action: Action, **more: Any) -> Observation:
        self._steps += 1
        observation = await super().step_async(action, **more)
        if isinstance(action, CallToolAction) and action.tool_name == "submit":
            assert isinstance(observation, CallToolObservation)
            observation.reward = float(action.arguments["answer"] == self._sum)
            observation.done = True
        observation.metadata = {"step": self._steps}
        return observation

    def _step_impl(self, action: Action, **more: Any) -> Observation:
        raise TypeError("tool calls are the only actions")

    @property
    def state(self) -> State:
        return State(step_count=self._steps)


def main() -> None:
    apps = {
        "/guess": create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=64),
        "/guess-alone": create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=1),
        "/tools": create_fastapi_app(AddEnvironment, Action, Observation, max_concurrent_envs=64),
    }
    app = FastAPI()
    for path, each in apps.items():
        app.mount(path, each)
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run([listening])


main()
