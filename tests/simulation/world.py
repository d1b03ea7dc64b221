"""A world of chance: an engine, environments, agents and a learner, each of which may misbehave.

What is drawn twice differs. What an environment shows follows from all that was done in it, so the
story that a trajectory tells can be checked (`story.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.errors import DependencyError, InfrastructureError
from headrace.schemas.events import Blob
from headrace.services.agent.agents import multi_turn
from headrace.services.agent.episode import Episode
from headrace.services.base.types import Observation, TaskView
from headrace.services.inference.engine import EngineOutput, EnginePrompt, EngineSetup, ScorePrompt
from headrace.services.inference.engines.scripted import ScriptedEngine
from headrace.stream_jobs.filters import Group
from tests.simulation.calls import calling
from tests.simulation.virtual_time import OWNER, Owner, loop

LETTERS = "abcdefgh"
PLACE = "out/place"
"""The file that a Labyrinth gives out."""
TURNS = 3
"""Steps of an episode."""


class Dice(ScriptedEngine):
    """Draws tokens by the loop's chance, after a moment: no two generations are alike.

    Options, beside those of ScriptedEngine: `fails`, `breaks` and `slow`, shares of prompts that
    fail, that end the process, and that take seconds; `full` is the share that fills the context.
    """

    def __init__(self, setup: EngineSetup) -> None:
        options = dict(setup.options)
        self._fails: float = options.pop("fails", 0.0)
        self._breaks: float = options.pop("breaks", 0.0)
        self._slow: float = options.pop("slow", 0.0)
        self._full: float = options.pop("full", 0.0)
        changed = {"options": options}
        super().__init__(EngineSetup(**{**_fields(setup), **changed}))
        self._random = loop().random

    async def generate(self, prompt: EnginePrompt) -> EngineOutput:
        with calling(prompt.policy):
            return await super().generate(prompt)

    async def score(self, prompt: ScorePrompt) -> EngineOutput:
        with calling(prompt.policy):
            return await super().score(prompt)

    async def _continue(self, prompt: EnginePrompt) -> EngineOutput:
        await self._trouble()
        generation = await super()._continue(prompt)
        generation.tokens[:] = self._random.choices(prompt.allowed, k=len(generation.tokens))
        if self._full and self._random.random() < self._full:
            drawn = self._random.choice([0, 1])
            tokens, logprobs = generation.tokens[:drawn], generation.logprobs[:drawn]
            return EngineOutput(tokens, logprobs, generation.versions[:drawn], "overflow")
        return generation

    async def _score(self, prompt: ScorePrompt) -> EngineOutput:
        await self._trouble()
        scored = await super()._score(prompt)
        # Multiples of 1/8 survive float32.
        scored.logprobs[:] = [-self._random.randint(1, 80) / 8 for _ in scored.logprobs]
        return scored

    async def _trouble(self) -> None:
        """Takes a moment, and fails or breaks by chance."""
        await asyncio.sleep(self._random.uniform(0.005, 0.2))
        if self._slow and self._random.random() < self._slow:
            await asyncio.sleep(self._random.uniform(0.2, 5.0))
        if self._random.random() < self._fails:
            raise InfrastructureError("engine_failed", "by chance")
        if self._random.random() < self._breaks:
            raise DependencyError("the engine broke, by chance: this process must end")


def _fields(setup: EngineSetup) -> dict[str, Any]:
    return {name: getattr(setup, name) for name in EngineSetup.__slots__}


class Labyrinth:
    """What it shows follows from the task and all actions so far. Ends after TURNS steps.

    With `sandbox` it begins at a place of chance and can't be rebuilt; one that `lies` says that
    it can. `fails` and `hangs` are shares of its answers, and `raises` is one of
    its steps.
    """

    def __init__(
        self,
        sandbox: bool = False,
        lies: bool = False,
        fails: float = 0.0,
        hangs: float = 0.0,
        raises: float = 0.0,
    ) -> None:
        self.replayable = not sandbox or lies
        self._sandbox = sandbox
        self._fails = fails
        self._hangs = hangs
        self._raises = raises
        self._random = loop().random
        self._owner = OWNER.get()
        open_environments()[self] = self._owner

    takes_files = True

    async def reset(self, task: TaskView) -> Observation:
        """Begins: the first letters shown name the place, where that is one of chance."""
        begin = "".join(self._random.choices(LETTERS, k=3)) if self._sandbox else ""
        for file in task.artifacts.values():
            assert await file.read()
        self._path = f"{task.number}/{task.sample}/{begin}"
        self._left = TURNS
        first = await self._look(begin)
        # The name says which attempt it is of: another one begins elsewhere.
        return (
            replace(first, artifacts={f"log/{begin}": b""}) if begin and task.artifacts else first
        )

    async def step(self, action: str) -> Observation:
        """Goes on."""
        if self._raises and self._random.random() < self._raises:
            raise ValueError("not an action, by chance")
        self._path += f"/{action}"
        self._left -= 1
        return await self._look("")

    async def collect(self, patterns: Sequence[str]) -> Observation:
        """Gives out the path that was gone."""
        observation = await self._look("")
        assert observation.text
        return Observation(artifacts={PLACE: self._path.encode()})

    async def aclose(self) -> None:
        """Gives itself back."""
        open_environments().pop(self, None)

    async def _look(self, begin: str) -> Observation:
        await asyncio.sleep(self._random.uniform(0.001, 0.1))
        if self._random.random() < self._hangs:
            await asyncio.sleep(100_000)
        if self._random.random() < self._fails:
            raise InfrastructureError("environment_failed", "by chance")
        return Observation(
            text=begin + where(self._path),
            reward=reward(self._path) if self._left < TURNS else None,
            terminated=self._left == 0,
        )


def open_environments() -> dict[Labyrinth, Owner | None]:
    """The environments that are open on this loop, each with its process."""
    found: dict[Labyrinth, Owner | None] = loop().__dict__.setdefault("open_environments", {})
    return found


class Jury:
    """A judge, whose score follows from what it is shown."""

    replayable = True

    async def reset(self, task: TaskView) -> Observation:
        """Has nothing to show."""
        return Observation()

    async def step(self, action: str) -> Observation:
        """Can't be acted in."""
        raise InfrastructureError("no_steps", "a jury only scores", retryable=False)

    async def score(self, payload: Mapping[str, Any]) -> Observation:
        """The score."""
        await asyncio.sleep(loop().random.uniform(0.001, 0.1))
        return Observation(reward=verdict(payload))

    async def aclose(self) -> None:
        """Nothing to give back."""


def place_of(path: str) -> Blob:
    """What a Labyrinth gives out after a path."""
    data = path.encode()
    return Blob(sha256=hashlib.sha256(data).digest(), size=len(data), name=PLACE)


def where(path: str) -> str:
    """What is seen after a path."""
    return "".join(LETTERS[byte % len(LETTERS)] for byte in _digest(path)[:3])


def reward(path: str) -> float:
    """What the last step of a path earns."""
    return _digest(path)[3] / 255


def verdict(payload: Mapping[str, Any]) -> float:
    """What a jury says of it."""
    return _digest(json.dumps(payload, sort_keys=True))[0] / 255


def _digest(path: str) -> bytes:
    return hashlib.sha256(path.encode()).digest()


async def wanderer(episode: Episode) -> None:
    """Observation and answer in turn. `moody`: the share of episodes that don't replay;
    `demonstrated`: the share of turns in which it says itself what the policy should say."""
    options = episode.task.options
    if loop().random.random() < options.get("moody", 0.0):
        await _moody(episode)
    elif share := options.get("demonstrated", 0.0):
        await _demonstrating(episode, share)
    elif len(episode.roles) > 1:
        await _demonstrating(episode, 0.0)
    else:
        await multi_turn(episode)


async def _demonstrating(episode: Episode, share: float) -> None:
    observation = await episode.reset()
    roles = _by_turns(episode)
    told: dict[str, list[str]] = {}
    while not observation.done:
        said, role = None, next(roles)
        if share and episode.random.random() < share:
            said = "".join(episode.random.choices(LETTERS, k=episode.sampling(role).max_tokens))
        generation = await episode.generate(observation.text, role=role, demonstration=said)
        told.setdefault(role, []).append(generation.text)
        observation = await episode.step(generation.text)
    _reward_roles(episode, told)


def _by_turns(episode: Episode) -> Iterator[str]:
    """The roles of the task, by turns."""
    return itertools.cycle(sorted(episode.roles))


def _reward_roles(episode: Episode, said: Mapping[str, Sequence[str]]) -> None:
    """Gives some roles a reward of their own, which follows from what they said."""
    for role in episode.task.options.get("rewarded", ()):
        episode.rewards[role] = own_reward(role, said.get(role, ()))


def own_reward(role: str, said: Sequence[str]) -> float:
    """What a role learns from, if it has a reward of its own."""
    return verdict({"role": role, "said": list(said)})


ACTED = "acted"
"""The metric by which a moody agent says what it did."""


def memory_of(actions: Sequence[str]) -> float:
    """A number that tells actions apart."""
    return float(zlib.crc32("/".join(actions).encode()))


async def _moody(episode: Episode) -> None:
    """Acts by the loop's chance, or fails, where it ought to be deterministic."""
    observation = await episode.reset()
    roles = _by_turns(episode)
    told: dict[str, list[str]] = {}
    acted = []
    while not observation.done:
        role = next(roles)
        generation = await episode.generate(observation.text, role=role)
        told.setdefault(role, []).append(generation.text)
        if loop().random.random() < 0.1:
            raise RuntimeError("an agent's own bug")
        acted.append(generation.text + loop().random.choice(LETTERS))
        observation = await episode.step(acted[-1])
    episode.metrics[ACTED] = memory_of(acted)
    _reward_roles(episode, told)


async def debater(episode: Episode) -> None:
    """Asks twice at the same time, takes one of the answers, and has the whole judged."""
    observation = await episode.reset()
    roles = sorted(episode.roles)
    said = []
    while not observation.done:
        text = observation.text
        one, other = (episode.new_conversation(role) for role in (roles[0], roles[-1]))
        answers = await episode.gather(lambda: one.generate(text), lambda: other.generate(text))  # noqa: B023
        said.append(episode.random.choice(answers).text)
        observation = await episode.step(said[-1])
    episode.reward = await episode.score("jury", {"said": said})
    _reward_roles(episode, dict.fromkeys(roles, said))


def drop_all(group: Group) -> str | None:
    """A filter that keeps nothing."""
    return "unwanted"


def drop_many(group: Group) -> str | None:
    """A filter that keeps every fourth."""
    return "unwanted" if group.task % 4 else None
