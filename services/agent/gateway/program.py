"""The agent `command`: a program of any kind that speaks OpenAI's API, one an attempt.

What it does can't be done again against recorded answers: whoever takes its episode over begins a
new attempt. `docs/gateway.md` says what the program is given, and what it may say.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from headrace.errors import UsageError
from headrace.services.agent.episode import Episode
from headrace.services.agent.gateway.chat_session import (
    ChatSession,
    Report,
    describe,
    make_dialect,
    read_report,
)
from headrace.services.agent.gateway.container import (
    BASE_URL,
    contained,
    read_container,
    socket_folder,
)
from headrace.services.agent.gateway.program_process import Ended, running
from headrace.services.agent.gateway.server import GatewayServer
from headrace.services.base.tool_calls import Format

HOST = "127.0.0.1"
LAST_WORDS = 600
"""Most characters of its stderr that a failure cites."""


class CommandFailed(Exception):
    """The program broke: the attempt is lost, and is no policy's doing."""


class Command:
    """An agent that is a program."""

    replayable = False

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
        timeout_s: float | None = None,
        tool_calls: Format = "hermes",
        models: Mapping[str, str] | None = None,
        judge: str | None = None,
        container: Mapping[str, Any] | None = None,
    ) -> None:
        """`command` is a program and its arguments; `environment` are more variables.

        It starts in `folder`, and has `timeout_s`, but never longer than the episode's deadline.
        With `container` it runs in one, by the options of `ContainerSettings`.
        `tool_calls` says how the model spells calls, `models` gives its roles more names. `judge`
        is an environment that scores what it wrote. UsageError where one of them can't be.
        """
        if isinstance(command, str) or not command or not all(isinstance(a, str) for a in command):
            raise UsageError("command: a list of a program and its arguments is needed")
        self._command = tuple(command)
        self._environment = dict(environment or {})
        self._folder = folder
        self._timeout_s = timeout_s
        self._dialect = make_dialect(tool_calls, models)
        self._judge = judge
        self._container = None if container is None else read_container(container)

    async def __call__(self, episode: Episode) -> None:
        """Runs the program to its end, and takes its report."""
        session = ChatSession(episode, self._dialect)
        server = GatewayServer()
        given = json.dumps(describe(episode), ensure_ascii=False).encode() + b"\n"
        try:
            with server.admitting(session) as token:
                about = {"OPENAI_API_KEY": token, "OPENAI_MODEL": episode.roles[0]}
                async with self._started(server, episode, about, given) as program:
                    ended = await self._end_of(program, session)
                await session.drain()
                session.raise_failure()
        finally:
            session.close()
            await server.aclose()
        self._judge_end(ended)
        if (report := last_report(ended.output)) is not None:
            session.report(report)
        if self._judge is not None:
            payload = {"task": dict(episode.task.payload), "output": ended.output}
            episode.reward = await episode.score(self._judge, payload)

    @asynccontextmanager
    async def _started(
        self, server: GatewayServer, episode: Episode, about: Mapping[str, str], given: bytes
    ) -> AsyncIterator[asyncio.Task[Ended]]:
        """The program's end to come, in a container or as a process of this host."""
        if self._container is not None:
            environment = {**self._environment, "OPENAI_BASE_URL": BASE_URL, **about}
            async with socket_folder(given) as folder:
                await server.start_at(folder.gateway)
                async with contained(
                    self._container,
                    self._command,
                    environment,
                    self._folder,
                    folder,
                    episode.seconds_left,
                ) as program:
                    yield program
            return
        base_url = await server.start(HOST, 0)
        direct = ",".join(filter(None, (os.environ.get("NO_PROXY"), HOST)))
        proxies = {"NO_PROXY": direct, "no_proxy": direct}
        environment = {**proxies, **self._environment, "OPENAI_BASE_URL": base_url, **about}
        try:
            async with running(self._command, environment, self._folder, given) as program:
                yield program
        except OSError as error:
            raise CommandFailed(f"can't run {self._command[0]}: {error.strerror}") from error

    async def _end_of(self, program: asyncio.Task[Ended], session: ChatSession) -> Ended:
        """The program's end. Raises what ended the attempt where that came first."""
        first: set[asyncio.Future[Any]] = {program, session.failed}
        await asyncio.wait(first, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        session.raise_failure()
        if not program.done():
            raise CommandFailed(f"no end within {self._timeout_s} s")
        return program.result()

    def _judge_end(self, ended: Ended) -> None:
        if ended.code:
            words = ended.errors.strip()[-LAST_WORDS:]
            raise CommandFailed(f"{self._command[0]} exited with {ended.code}: {words}")


def last_report(output: str) -> Report | None:
    """The report in the last line that was written, where it is one."""
    lines = output.strip().splitlines()
    try:
        tree = json.loads(lines[-1])
    except (IndexError, ValueError, RecursionError):
        return None
    if not isinstance(tree, dict) or "reward" not in tree:
        return None
    try:
        return read_report(tree)
    except ValueError as error:
        raise CommandFailed(f"its report can't be read: {error}") from error
