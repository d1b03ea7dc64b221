"""Environments of a library: each is an episode in the library's child process.

The process is started when it is needed, gets one request at a time, and is killed if it hangs.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.errors import EnvironmentFailed, InfrastructureError, UsageError
from headrace.schemas.events import EnvironmentUse
from headrace.schemas.problems import problems_of
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.environment import Claim, Environment
from headrace.services.env.libraries import libraries_child as child
from headrace.services.env.slots import EnvironmentSlots
from headrace.services.processes.allowed_environment import allowed_environment
from headrace.services.processes.child_process import ChildProcess, LineTooLong
from headrace.services.tasks.artifact_store import ArtifactStore

MAKE_S = 120.0
"""Seconds that the import of a library may take."""
GRACE_S = 5.0
"""Seconds after the limit of a call, at the end of which the child is killed."""


class Bounds(BaseModel):
    """Options of both libraries, `reasoning_gym` and `textarena`. Only the recipe sets them."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    call_s: float = Field(default=10.0, gt=0)
    """Seconds that a reset or a step may take."""
    memory_mb: int = Field(default=4096, gt=0)
    """Address space of the child process, in MiB, if the system can limit it."""
    answer_kb: int = Field(default=1024, gt=0)
    """Largest answer, in KiB."""
    inherit: tuple[str, ...] = ()
    """Variables of the worker's environment that the child process gets besides the usual ones."""


class LibraryProcess:
    """At most one child process. After its death, the next call starts another."""

    def __init__(self, target: str, bounds: Bounds) -> None:
        """`target` names a Library for `plugins.load`."""
        self._target = target
        self._bounds = bounds
        self._process: ChildProcess | None = None
        self._turn = asyncio.Lock()
        self.born = 0
        """Children started so far. An episode lives in one of them."""

    async def ask(self, verb: str, born: int | None, **call: Any) -> Mapping[str, Any]:
        """Call the library and return its answer.

        `born` says which child has the episode; None takes any. Raises InfrastructureError
        `sandbox_lost` if that child is gone, EnvironmentFailed if the library fails or hangs, and
        UsageError if it can't be made.
        """
        async with self._turn:
            if born is not None and (self._process is None or born != self.born):
                raise InfrastructureError("sandbox_lost", "the library's process has ended")
            finished = False
            try:
                if self._process is None:
                    await self._start()
                answer = await self._exchange({"verb": verb, **call}, self._bounds.call_s)
                finished = True
            finally:
                # If this call was cancelled, the child would send its answer to the next call.
                if not finished:
                    await self.kill()
        return _checked(answer)

    async def kill(self) -> None:
        """End the child, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            await process.aclose()

    async def _start(self) -> None:
        self.born += 1
        self._process = await ChildProcess.start(
            (sys.executable, "-m", child.__name__),
            {
                **allowed_environment(self._bounds.inherit),
                "PYTHONHASHSEED": "0",
                "OMP_NUM_THREADS": "1",
            },
            limit=self._bounds.answer_kb * 1024,
        )
        setup = {
            "target": self._target,
            "options": self._bounds.model_extra,
            "make_s": MAKE_S,
            "call_s": self._bounds.call_s,
            "memory_mb": self._bounds.memory_mb,
        }
        _checked(await self._exchange(setup, MAKE_S))

    async def _exchange(self, request: Mapping[str, Any], limit_s: float) -> Mapping[str, Any]:
        assert self._process is not None
        try:
            async with asyncio.timeout(limit_s + GRACE_S):
                self._process.send(json.dumps(request).encode())
                line = await self._process.receive()
        except TimeoutError as error:
            message = f"the library did not answer within {limit_s + GRACE_S:g} s"
            raise EnvironmentFailed("too_slow", f"{message}; its process was killed") from error
        except LineTooLong as error:
            message = f"the library answered with more than {self._bounds.answer_kb} KiB"
            raise EnvironmentFailed("answer_too_large", f"{message}; raise answer_kb") from error
        if line is None:
            end = await self._process.describe_end()
            raise EnvironmentFailed("library_died", f"its process ended during this call: {end}")
        answer: Mapping[str, Any] = json.loads(line)
        return answer


class LibrarySetup:
    """The Setup of a library's environments. It owns the child process."""

    def __init__(
        self,
        use: str,
        options: Mapping[str, Any],
        slots: EnvironmentSlots,
        store: ArtifactStore | None = None,
    ) -> None:
        """Raises UsageError if the value of a limit is not valid."""
        self.slots = slots
        self.store = store
        self.options = options
        try:
            self.process = LibraryProcess(use, Bounds.model_validate(options))
        except ValidationError as error:
            raise UsageError(f"options of {use!r}: {'; '.join(problems_of(error))}") from error
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


def _checked(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the library returned, or raise the error that it raised."""
    if "error" not in answer:
        returned: Mapping[str, Any] = answer["answer"]
        return returned
    kind, message = answer["kind"], answer["error"]
    if kind == "usage":
        raise UsageError(message)
    code = "too_slow" if kind == "too_slow" else "library_failed"
    raise EnvironmentFailed(code, f"{kind}: {message}")
