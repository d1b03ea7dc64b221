"""Environments of a library: each is an episode in the library's child process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from headrace.errors import EnvironmentFailed, InfrastructureError, UsageError
from headrace.schemas.events import EnvironmentUse
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.environment import Claim, Environment
from headrace.services.env.libraries.libraries_process import Bounds, LibraryProcess


class LibrarySetup:
    """The Setup of a library's environments. It owns the child process."""

    def __init__(self, use: str, options: Mapping[str, Any], slots: asyncio.Semaphore) -> None:
        """Raises UsageError if the value of a limit is not valid."""
        self.slots = slots
        self.options = options
        try:
            self.process = LibraryProcess(use, Bounds.model_validate(options))
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            option = ".".join(map(str, problem["loc"]))
            raise UsageError(f"options of {use!r}: {option}: {problem['msg']}") from error
        self._names = itertools.count()

    async def open(self) -> None:
        """Import the library. Raises UsageError if it isn't installed or an option is wrong."""
        await self.process.ask("close", None, name="")

    async def take(self, use: EnvironmentUse, claim: Claim) -> Environment:
        """Return an episode that has not begun."""
        if use.options != "{}":
            raise UsageError("a task can't set options of a library; set them in the recipe")
        return LibraryEnvironment(self.process, str(next(self._names)))

    async def give_back(self, use: EnvironmentUse, environment: Environment, fit: bool) -> None:
        """Let the library forget the episode."""
        await environment.aclose()

    async def close_pool(self) -> None:
        """End the child process."""
        await self.process.kill()


class LibraryEnvironment:
    """One episode in the child process."""

    replayable = True

    def __init__(self, process: LibraryProcess, name: str) -> None:
        self._process = process
        self._name = name
        self._born: int | None = None

    async def reset(self, task: TaskView) -> Observation:
        """Start the episode."""
        given = {"seed": task.seed, "payload": dict(task.payload)}
        answer = await self._process.ask("reset", None, name=self._name, task=given)
        self._born = self._process.born
        return Observation(**answer)

    async def step(self, action: str) -> Observation:
        """Pass the action to the library."""
        return Observation(
            **await self._process.ask("step", self._born or 0, name=self._name, action=action)
        )

    async def aclose(self) -> None:
        """Let the library forget the episode. If its process is gone, it has."""
        if self._born is not None:
            with suppress(EnvironmentFailed, InfrastructureError):
                await self._process.ask("close", self._born, name=self._name)
