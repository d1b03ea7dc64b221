"""The agent `command`: a program of any kind that uses OpenAI's API. Each attempt starts it once.

A program can't be replayed with recorded answers. If its worker dies, the next owner of the
partition begins a new attempt. `docs/gateway.md` says what the program gets and what it may report.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import UsageError
from headrace.services.agent.episode import Episode
from headrace.services.agent.gateway.chat_session import (
    ChatSession,
    Dialect,
    check_payload_keys,
    describe,
    read_report,
)
from headrace.services.agent.gateway.container import (
    BASE_URL,
    KILLED,
    AgentContainers,
    contained,
    socket_folder,
)
from headrace.services.agent.gateway.program_process import Ended, running
from headrace.services.agent.gateway.server import GatewayServer
from headrace.services.agent.stops import AttemptFailed
from headrace.services.base.json_text import load_json
from headrace.services.base.redactor import REDACTOR
from headrace.services.base.tool_calls import Format
from headrace.services.processes.allowed_environment import (
    allowed_environment,
    check_names_of_variables,
)
from headrace.services.processes.program_starter import ProgramStarter

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
REPORT_KEY = "HEADRACE_REPORT_KEY"
"""The environment variable with the key for reports, for programs that run on the host."""
PROGRAM_CONNECTIONS = 256
"""Most connections of one program to its gateway."""
SHOWN = ("prompt",)
"""The keys of the payload that a program in a container gets, if the recipe names no others."""
LAST_WORDS = 600
"""Largest number of characters of its stderr in a failure."""


class CommandFailed(Exception):
    """The program failed. The attempt fails; the policy is not blamed."""


def may_be_the_policy_s(*, contained: bool, turns: int) -> bool:
    """Returns whether a failure of the program may be the doing of code that the policy wrote.

    Such code may run beside the program in its container, as the same user: it can kill it, or take
    its memory and files. A new attempt would be a second chance. A policy that said nothing yet did
    nothing.
    """
    return contained and turns > 0


@dataclass(eq=False)
class Command:
    """An agent that is a program. Raises UsageError if an option is wrong."""

    replayable = False

    command: Sequence[str]
    """The program and its arguments."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables."""
    inherit: Sequence[str] = ()
    """The worker's environment variables that the program gets besides the usual ones. They are
    listed in `allowed_environment.py`. A program in a container gets none of the worker's."""
    folder: str | None = None
    """The folder in which the program starts."""
    timeout_s: float | None = None
    """Seconds that the program has. It never has longer than until the episode's deadline."""
    tool_calls: Format = "hermes"
    """How the model spells tool calls: `hermes` as Hermes and Qwen do, `json` as Llama 3 does, or
    `none` if its answers contain no calls."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Maps further names of models to roles."""
    judge: str | None = None
    """An environment that scores the program's output. It gets the whole payload."""
    container: Mapping[str, Any] | None = None
    """The container in which the program runs, with options of its own, below. The program can't
    report rewards then, because code that the policy wrote may run beside it. Absent: the program
    runs as a process of the worker's user."""
    payload: Sequence[str] | None = None
    """The keys of the task's payload that the program gets. By default it gets all, and in a
    container `prompt` alone."""
    preload: bool = True
    """Whether the packages that a Python program imports at its top are imported once for all
    attempts, if that is safe. A program in a container is always started from the beginning."""

    def __post_init__(self) -> None:
        command = self.command
        if isinstance(command, str) or not command or not all(isinstance(a, str) for a in command):
            raise UsageError("command must be a list: a program and its arguments")
        if self.inherit and self.container is not None:
            raise UsageError(
                "inherit: a program in a container gets no variables of the worker. Give them in "
                "the option environment"
            )
        check_names_of_variables(self.inherit)
        self._dialect = Dialect(self.tool_calls, self.models)
        self._container = None if self.container is None else AgentContainers(self.container)
        if self.container is not None and self.judge is None:
            raise UsageError(
                "a program in a container can't report its reward, because the policy's code may "
                "run beside it: set the option judge to an environment that scores its output"
            )
        if self.payload is None and self.container is not None:
            self.payload = SHOWN
        check_payload_keys(self.payload)
        self._program = ProgramStarter(self.command, self.folder)

    async def open(self, deadline_s: int) -> None:
        """Gets ready before the first episode, as `AgentContainers.open` says."""
        if self._container is not None:
            await self._container.open(deadline_s)
        elif self.preload:
            self._program.open()

    async def aclose(self) -> None:
        """Ends what `open` and the episodes started."""
        await self._program.aclose()
        if self._container is not None:
            await self._container.aclose()

    async def __call__(self, episode: Episode) -> None:
        """Runs the program until it ends, and takes its report."""
        session = ChatSession(episode, self._dialect)
        server = GatewayServer(reports=self._container is None, connections=PROGRAM_CONNECTIONS)
        task = describe(episode, self.payload)
        given = json.dumps(task, ensure_ascii=False).encode() + b"\n"
        try:
            with server.admitting(session) as keys:
                about = {"OPENAI_API_KEY": keys.chat, "OPENAI_MODEL": episode.roles[0]}
                if self._container is None:
                    about[REPORT_KEY] = keys.report
                async with self._started(server, episode, about, given) as program:
                    ended = await self._end_of(program, session, episode)
                await session.drain()
                self._refused(session, episode)
        finally:
            session.close()
            await server.aclose()
        if ended.code:
            words = REDACTOR.text(ended.errors.strip())[-LAST_WORDS:]
            message = f"{self.command[0]} exited with {ended.code}: {words}"
            if not self._blames_policy(episode):
                raise CommandFailed(message)
            logger.warning("task %d is scored although %s", episode.task.number, message)
        if self._container is None:
            take_report(session, ended.output)
        else:
            episode.metrics["exit_code"] = float(ended.code)
        if self.judge is not None:
            output = {"output": ended.output, "exit_code": ended.code}
            payload = {"task": dict(episode.task.payload), **output}
            episode.reward = await episode.score(self.judge, payload)

    def _blames_policy(self, episode: Episode) -> bool:
        contained = self._container is not None
        return may_be_the_policy_s(contained=contained, turns=len(episode.turns))

    def _refused(self, session: ChatSession, episode: Episode) -> str:
        """Raises what ended the attempt, if anything did.

        If that is a request which can't be served, the policy's code may have made it. Then it
        returns the reason, and the program is scored.
        """
        try:
            session.raise_failure()
        except AttemptFailed as failed:
            if failed.failure.origin != "operator" or not self._blames_policy(episode):
                raise
            return failed.failure.message
        return ""

    @asynccontextmanager
    async def _started(
        self, server: GatewayServer, episode: Episode, about: Mapping[str, str], given: bytes
    ) -> AsyncIterator[asyncio.Task[Ended]]:
        """Starts the program, in a container or not. Yields a task that returns its end."""
        if self._container is not None:
            environment = {**self.environment, "OPENAI_BASE_URL": BASE_URL, **about}
            async with socket_folder(given) as folder:
                await server.start_at(folder.gateway)
                async with contained(
                    self._container,
                    self.command,
                    environment,
                    self.folder,
                    folder,
                    episode.seconds_left,
                ) as program:
                    yield program
            return
        base_url = await server.start(HOST, 0)
        direct = ",".join(filter(None, (os.environ.get("NO_PROXY"), HOST)))
        proxies = {"NO_PROXY": direct, "no_proxy": direct}
        environment = {
            **allowed_environment(self.inherit),
            **proxies,
            **self.environment,
            "OPENAI_BASE_URL": base_url,
            **about,
        }
        try:
            async with running(self._program, environment, given) as program:
                yield program
        except OSError as error:
            raise CommandFailed(f"can't run {self.command[0]}: {error.strerror}") from error

    async def _end_of(
        self, program: asyncio.Task[Ended], session: ChatSession, episode: Episode
    ) -> Ended:
        """Waits for the program's end. Raises what ended the attempt, if that comes first."""
        first: set[asyncio.Future[Any]] = {program, session.failed}
        await asyncio.wait(first, timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if refused := self._refused(session, episode):
            return Ended(KILLED, "", refused)
        if program.done():
            return program.result()
        late = f"it did not end within timeout_s = {self.timeout_s:g}"
        if not self._blames_policy(episode):
            raise CommandFailed(f"{self.command[0]}: {late}")
        return Ended(KILLED, "", late)


def take_report(session: ChatSession, output: str) -> None:
    """Takes the report in the last line of a program's output, if that is a report."""
    lines = output.strip().splitlines()
    try:
        tree = load_json(lines[-1])
    except (IndexError, ValueError):
        return
    if not isinstance(tree, dict) or "reward" not in tree:
        return
    try:
        session.report(read_report(tree))
    except ValueError as error:
        raise CommandFailed(f"the report of the program is wrong: {error}") from error
