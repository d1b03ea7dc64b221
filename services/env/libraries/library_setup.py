"""Environments of a library: each an episode in the library's child process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.errors import EnvironmentFailed, InfrastructureError, UsageError
from headrace.schemas.events import EnvironmentUse
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.environment import Claim, Environment
from headrace.services.env.libraries.library_process import LibraryProcess


class Bounds(BaseModel):
    """Options that every library takes; the others are its own. They come from the recipe alone."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    call_s: float = Field(default=10.0, gt=0)
    """Seconds that a reset or a step has."""
    memory_mb: int = Field(default=4096, gt=0)
    """Address space of the child process, in MiB, where the system can limit it."""
    answer_kb: int = Field(default=1024, gt=0)
    """Most of one answer, in KiB."""


class LibrarySetup:
    """An environment of the recipe that is a library's. Owns the child process."""

    def __init__(self, use: str, options: Mapping[str, Any], slots: asyncio.Semaphore) -> None:
        """UsageError where a bound is none."""
        self.slots = slots
        self.options = options
        try:
            bounds = Bounds.model_validate(options)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            place = ".".join(map(str, problem["loc"]))
            raise UsageError(f"options of {use!r}: {place}: {problem['msg']}") from error
        own = bounds.model_extra or {}
        most = bounds.answer_kb * 1024
        self.process = LibraryProcess(use, own, bounds.call_s, bounds.memory_mb, most)
        self._names = itertools.count()

    async def open(self) -> None:
        """Has the library imported. UsageError where it isn't installed, or an option is wrong."""
        await self.process.ask("close", None, name="")

    async def take(self, use: EnvironmentUse, claim: Claim) -> Environment:
        """An episode, not yet begun."""
        if use.options != "{}":
            raise UsageError("a task can't set options of a library: the recipe alone can")
        return LibraryEnvironment(self.process, str(next(self._names)))

    async def give_back(self, use: EnvironmentUse, environment: Environment, fit: bool) -> None:
        """Has the library forget it."""
        await environment.aclose()

    async def close_pool(self) -> None:
        """Ends the child process."""
        await self.process.kill()


class LibraryEnvironment:
    """One episode in the child process."""

    replayable = True

    def __init__(self, process: LibraryProcess, name: str) -> None:
        self._process = process
        self._name = name
        self._born: int | None = None

    async def reset(self, task: TaskView) -> Observation:
        """Begins."""
        told = {"seed": task.seed, "payload": dict(task.payload)}
        answer = await self._process.ask("reset", None, name=self._name, task=told)
        self._born = self._process.born
        return Observation(**answer)

    async def step(self, action: str) -> Observation:
        """Acts."""
        return Observation(
            **await self._process.ask("step", self._born or 0, name=self._name, action=action)
        )

    async def aclose(self) -> None:
        """Has the library forget it; with its process it has."""
        if self._born is not None:
            try:
                await self._process.ask("close", self._born, name=self._name)
            except (EnvironmentFailed, InfrastructureError):
                return
