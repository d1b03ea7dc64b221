"""Parts of recipes as users write them: a good one of each kind, and each usual mistake."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from headrace.errors import DependencyError, InfrastructureError
from headrace.services.agent.episode import Episode
from headrace.services.base.types import Observation, TaskView
from headrace.services.tasks.task_maker import Item
from headrace.stream_jobs.advantages import TurnAdvantage


class World:
    replayable = True

    def __init__(self, highest: int = 3) -> None:
        if highest < 1:
            raise ValueError("highest must be positive")

    async def reset(self, task: TaskView) -> Any:
        return Observation("begin")

    async def step(self, action: str) -> Any:
        return Observation("end", reward=1.0, terminated=True)

    async def aclose(self) -> None: ...


class Unrewarded(World):
    async def step(self, action: str) -> Any:
        return Observation("go on")


class RewardedEachStep(World):
    async def step(self, action: str) -> Any:
        return Observation("go on", reward=0.0)


class NoReplayable:
    reset, step, aclose = World.reset, World.step, World.aclose


class NoStep:
    replayable = True
    reset, aclose = World.reset, World.aclose


class NoClose:
    replayable = True
    reset, step = World.reset, World.step


class UnreachableWorld(World):
    def __init__(self) -> None:
        raise InfrastructureError("unreachable", "its server does not answer")


class UnreachableAgent:
    def __init__(self) -> None:
        raise DependencyError("the Hub does not answer")

    async def __call__(self, episode: Episode) -> None: ...


class NotAsync(World):
    def step(self, action: str) -> Any:
        return Observation("end")


class RaisesInReset(World):
    async def reset(self, task: TaskView) -> Any:
        return task.payload["absent"]


class RaisesInStep(World):
    async def step(self, action: str) -> Any:
        return Observation(str(int("x" + action)))


class NoneFromStep(World):
    async def step(self, action: str) -> Any:
        return None


class BlocksInStep(World):
    async def step(self, action: str) -> Any:
        time.sleep(1.0)
        return Observation("end")


class TextFromReset(World):
    async def reset(self, task: TaskView) -> Any:
        return "begin"


class NumberAsText(World):
    async def step(self, action: str) -> Any:
        return Observation(5)  # type: ignore[arg-type]


class RewardOfText(World):
    async def step(self, action: str) -> Any:
        return Observation("end", reward="1")  # type: ignore[arg-type]


class RewardNotFinite(World):
    async def step(self, action: str) -> Any:
        return Observation("end", reward=float("nan"))


class DataNotJson(World):
    async def step(self, action: str) -> Any:
        return Observation("end", data={"a": object()})


class NotThereYet(World):
    async def reset(self, task: TaskView) -> Any:
        raise InfrastructureError("unreachable", "the server does not answer")


class Hangs(World):
    async def reset(self, task: TaskView) -> Any:
        await asyncio.Event().wait()


class Blocks(World):
    async def reset(self, task: TaskView) -> Any:
        child = subprocess.Popen(["sleep", "60"], start_new_session=True)
        print(f"child {child.pid}", flush=True)
        child.wait()


class Crashes(World):
    async def reset(self, task: TaskView) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class Exits(World):
    async def reset(self, task: TaskView) -> Any:
        raise SystemExit(3)


async def agent(episode: Episode) -> None: ...


def not_async_agent(episode: Episode) -> None: ...


class OwnAgent:
    replayable = True

    def __init__(self, name: str) -> None: ...

    async def __call__(self, episode: Episode) -> None: ...


def items(count: int = 2) -> Iterator[Item]:
    for number in range(count):
        yield Item(str(number))


def dictionaries() -> Iterator[Any]:
    yield {"prompt": "hello"}


def raises() -> Iterator[Item]:
    yield Item(str(1 // 0))


def not_json() -> Iterator[Item]:
    yield Item("0", {"when": object()})


def few(rewards: Any) -> list[float]:
    return [0.0]


def infinite(rewards: Any) -> list[float]:
    return [float("inf") for _ in rewards]


def advantage_raises(rewards: Any) -> list[float]:
    return [rewards.mean()]


def filter_raises(group: Any) -> str | None:
    return str(group.reward)


def filter_of_bool(group: Any) -> Any:
    return True


def detached(batch: Any, logprobs: Tensor) -> Any:
    return logprobs.detach()


def of_each(batch: Any, logprobs: Tensor) -> Any:
    return logprobs * batch.advantages


def of_all(batch: Any, logprobs: Tensor) -> Any:
    return logprobs.sum()


class OneTurn(TurnAdvantage):
    """Three values, whatever the turns are."""

    def __call__(
        self, rewards: Sequence[float], turn_rewards: Sequence[Sequence[float]]
    ) -> Sequence[Sequence[float]]:
        return [[0.0] * 3 for _ in rewards]


def number(batch: Any, logprobs: Tensor) -> Any:
    return 0.0


def nan(batch: Any, logprobs: Tensor) -> Any:
    return logprobs * float("nan")


def loss_raises(batch: Any, logprobs: Tensor) -> Any:
    return batch.old_logprobs
