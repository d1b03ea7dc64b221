"""Plug-ins that do with their secrets what no plug-in should: print, log, raise and record them."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from headrace.errors import InfrastructureError, UsageError
from headrace.services.agent.episode import Episode
from headrace.services.base.types import Observation, TaskView
from headrace.services.inference.engine import EngineOutput, EnginePrompt, EngineSetup
from headrace.services.inference.engines.scripted import ScriptedEngine
from headrace.services.tasks.task_maker import Item

logger = logging.getLogger("package.of.the.user")


def items(token: str) -> Iterator[Item]:
    """A data set of one task, whose payload has the secret that reads the data set."""
    print("reading with", token)
    yield Item("0", {"how": "observe", "token": token, token: [token]})


async def tell(episode: Episode) -> None:
    """An agent that tells its secrets to everyone."""
    options, how = episode.task.options, episode.task.payload["how"]
    logger.error("the options are %s, the literal is %s", options, options["literal"])
    print(options["deep"][0]["list"][0], flush=True)
    await episode.reset()
    await episode.generate(f"my key is {options['key']}")
    observation = await episode.step(f"{how} {options['key']}")
    episode.metrics[options["file"]] = episode.rewards[options["file"]] = 1.0
    assert observation.text
    await episode.score("jury", {"key": options["key"]})
    if how == "agent":
        raise RuntimeError("x" * 970 + json.dumps(dict(options)))


class World:
    """An environment that fails in many ways, always with its secrets in the message."""

    replayable = False

    def __init__(self, key: str, url: str, pem: str) -> None:
        self.key, self.url, self.pem = key, url, pem

    async def reset(self, task: TaskView) -> Observation:
        password = unquote(str(urlsplit(self.url).password))
        about = {"password": password, "pem": self.pem.splitlines(), "options": dict(task.options)}
        return Observation(text=json.dumps(about), data=about)

    async def step(self, action: str) -> Observation:
        for line in self.pem.splitlines():
            logger.warning("a line: %s", line)
        how = action.partition(" ")[0]
        basic = base64.b64encode(f"user:{self.key}".encode()).decode()
        if how == "raise":
            raise ValueError(f"401: Authorization: Basic {basic}, {self.key}, {quote(self.key)}")
        if how == "infrastructure":
            raise InfrastructureError("host_gone", f"{self.url} with {self.pem}")
        if how == "usage":
            raise UsageError(json.dumps({"key": self.key}))
        return Observation(text=self.key, data={self.key: basic}, rewards={self.key: 1.0})

    async def score(self, payload: Mapping[str, Any]) -> Observation:
        raise NotImplementedError

    async def aclose(self) -> None:
        raise OSError(f"can't close {self.key}")


class Jury:
    """A judge whose answer has its secret."""

    replayable = True

    def __init__(self, key: str) -> None:
        self.key = key

    async def reset(self, task: TaskView) -> Observation:
        return Observation()

    async def step(self, action: str) -> Observation:
        return Observation()

    async def score(self, payload: Mapping[str, Any]) -> Observation:
        return Observation(text=self.key, reward=1.0, data={"asked": dict(payload)})

    async def aclose(self) -> None:
        pass


class Engine(ScriptedEngine):
    """An engine whose first answer is a failure with its secret."""

    def __init__(self, setup: EngineSetup) -> None:
        self._key = setup.options["key"]
        logger.warning("the engine's setup is %r", setup)
        self._failed = False
        super().__init__(replace(setup, options={"count": 1}))

    async def generate(self, prompt: EnginePrompt) -> EngineOutput:
        if not self._failed:
            self._failed = True
            raise InfrastructureError("refused", f"the licence {self._key} is not valid")
        return await super().generate(prompt)
