"""An MCP tool server as an environment: tool calls are steps, and any other text is the answer.

The session runs in an asyncio task of its own. The library's contexts must be left in the task that
entered them, but different tasks may reset and close an environment.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, TypeVar

import httpx2
from mcp import Client, MCPError
from mcp.types import (
    CONNECTION_CLOSED,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    REQUEST_TIMEOUT,
    CallToolResult,
    TextContent,
    Tool,
)

from headrace.errors import EnvironmentFailed, InfrastructureError, UsageError
from headrace.services.base.redactor import REDACTOR
from headrace.services.base.tool_calls import BadCall, read_calls
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.environment import AskingAgain
from headrace.services.env.http_environment import Busy, Room, answering_within, authorization
from headrace.services.env.mcp.mcp_transports import Refusals, by_command, by_url
from headrace.services.processes.allowed_environment import allowed_environment

T = TypeVar("T")

PAGES = 64
"""Most pages of a server's list of tools that are read."""


class McpEnvironment(AskingAgain):
    """One episode's session with a server of the Model Context Protocol."""

    recipe_only = frozenset(
        {
            *("command", "url", "environment", "inherit", "tools", "reset_tool", "score_tool"),
            *("timeout_s", "answer_kb", "token", "replayable"),
        }
    )

    def __init__(
        self,
        command: Sequence[str] | None = None,
        url: str | None = None,
        environment: Mapping[str, str] | None = None,
        tools: Sequence[str] | None = None,
        reset_tool: str | None = None,
        score_tool: str | None = None,
        timeout_s: float = 30.0,
        answer_kb: int = 1024,
        token: str | None = None,
        replayable: bool = False,
        inherit: Sequence[str] = (),
    ) -> None:
        """Raises UsageError if an option is wrong.

        Options:
            command: The program, with its arguments, that is started as a server for each episode.
                Either `command` or `url` is required.
            url: The address of a running server.
            environment: Environment variables for the command.
            tools: The tools that the policy may call. Absent: all except `reset_tool` and
                `score_tool`.
            reset_tool: The tool that is called first, with `seed` and `payload`. It returns the
                first observation. Absent: that is the payload's `prompt`.
            score_tool: The tool that is called at the end, with `answer`, `seed` and `payload`. It
                returns the reward. Absent: the reward is 1 if the answer equals the payload's
                `answer`, and 0 otherwise.
            timeout_s: Seconds that a call may take.
            answer_kb: Maximum size of a message.
            token: As for `http`.
            replayable: Whether the same calls always give the same answers.
            inherit: Variables of the worker's environment that the command gets besides the usual
                ones.
        """
        self.replayable = replayable
        self._tools = tools
        self._hidden = [tool for tool in (reset_tool, score_tool) if tool is not None]
        self._reset_tool = reset_tool
        self._score_tool = score_tool
        self._timeout_s = timeout_s
        self._room = Room(timeout_s)
        self._refusals = Refusals()
        self._connect: Callable[[], AbstractAsyncContextManager[Any]]
        most = answer_kb * 1024
        if command is not None and url is None:
            if not command or shutil.which(command[0]) is None:
                raise UsageError(f"command {list(command)}: no such program on this machine")
            variables = {**allowed_environment(inherit), **(environment or {})}
            self._connect = partial(by_command, command, variables, most, self._refusals)
        elif url is not None and command is None:
            if not url.startswith(("http://", "https://")):
                example = "http://127.0.0.1:8000/mcp"
                raise UsageError(f"url {url!r}: give the server's address, as {example}")
            self._connect = partial(by_url, url, authorization(token), most, self._refusals)
        else:
            raise UsageError("an MCP environment needs either a `command` or a `url`")
        self._session: _Session | None = None
        self._names: list[str] = []
        self._task: TaskView | None = None

    async def reset(self, task: TaskView) -> Observation:
        """Open a session. The observation's `data` has its tools, as chat templates take them.

        A server that is full or not there is asked for a session for another `timeout_s` seconds.
        """
        self._task = task
        tools = self._for_policy(await self._room.until_free(self._open))
        self._names = [tool.name for tool in tools]
        data = {"tools": [_described(tool) for tool in tools]}
        text = str(task.payload.get("prompt", ""))
        if self._reset_tool is not None:
            text = await self._hidden_call(self._reset_tool)
        return Observation(text=text, data=data)

    @property
    def busy(self) -> InfrastructureError | None:
        """Why there was no session, if the server was asked again."""
        return self._room.busy

    async def step(self, action: str) -> Observation:
        """Call tools and return their results, or score the answer."""
        if self._session is None:
            raise InfrastructureError("sandbox_lost", "a step came before the reset")
        try:
            calls = read_calls(action, self._names)
        except BadCall as error:
            return Observation(text=f"error: {error}")
        if not calls:
            return await self._finish(action)
        try:
            texts = [_text(await self._session.call(each.name, each.arguments)) for each in calls]
        except _Refused as error:
            return Observation(text=f"error: {error}")
        return Observation(text="\n".join(texts))

    async def aclose(self) -> None:
        """End the session, and the server that was started for it."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _open(self) -> list[Tool]:
        """Open a session, and return all tools of the server."""
        await self.aclose()
        self._session = _Session(self._connect(), self._refusals, self._timeout_s)
        await self._session.open()
        return await self._session.tools()

    async def _finish(self, answer: str) -> Observation:
        """Score the answer. The observation has no reward if nothing says how to score."""
        assert self._task is not None
        reward: float | None = None
        if self._score_tool is not None:
            scored = await self._hidden_call(self._score_tool, answer=answer)
            try:
                reward = float(scored)
            except ValueError as error:
                shown = REDACTOR.text(scored, 200)
                message = f"{self._score_tool} must return a number, not {shown!r}"
                raise EnvironmentFailed("bad_answer", message) from error
        elif "answer" in self._task.payload:
            reward = float(answer.strip() == str(self._task.payload["answer"]).strip())
        return Observation(reward=reward, terminated=True)

    async def _hidden_call(self, tool: str, **more: Any) -> str:
        """Call a tool that the policy can't see. The policy is not to blame if it fails."""
        assert self._session is not None
        assert self._task is not None
        about = {"seed": self._task.seed, "payload": dict(self._task.payload), **more}
        try:
            result = await self._session.call(tool, about)
        except _Refused as error:
            raise UsageError(f"the server refused a call of its tool {tool!r}: {error}") from error
        text = _text(result)
        if result.is_error:
            raise EnvironmentFailed("tool_failed", f"{tool}: {text}")
        return text

    def _for_policy(self, tools: Sequence[Tool]) -> list[Tool]:
        """Return the policy's tools. Raises UsageError if the recipe names an unknown one."""
        known = {tool.name: tool for tool in tools}
        wanted = self._tools
        if wanted is None:
            wanted = [name for name in known if name not in self._hidden]
        if missing := {*wanted, *self._hidden} - set(known):
            raise UsageError(f"the server has no tools {sorted(missing)}; it has {sorted(known)}")
        return [known[name] for name in wanted]


class _Refused(Exception):
    """The server refused a call: it has no such tool, or the arguments are wrong."""


class _Session:
    """A client in an asyncio task of its own, and the calls that wait for it."""

    def __init__(
        self,
        connection: AbstractAsyncContextManager[Any],
        refusals: Refusals,
        timeout_s: float,
    ) -> None:
        self._connection = connection
        self._refusals = refusals
        self._timeout_s = timeout_s
        self._calls: asyncio.Queue[tuple[Callable[[Client], Awaitable[Any]], Any]] = asyncio.Queue()
        self._client: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect. Raises Busy if the server is full or not there.

        Raises InfrastructureError if it does not answer in time, or UsageError if it refuses.
        """
        self._client = asyncio.create_task(self._live(), name="MCP session")
        await self._ask(lambda client: asyncio.sleep(0))  # it runs once the session is open

    async def tools(self) -> list[Tool]:
        """Return all tools of the server."""

        async def list_all(client: Client) -> list[Tool]:
            found: list[Tool] = []
            cursor: str | None = None
            for _ in range(PAGES):
                page = await client.list_tools(cursor=cursor)
                found += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    return found
            raise EnvironmentFailed("server_error", f"its tools fill more than {PAGES} pages")

        return await self._ask(list_all)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """Call a tool and return its result. Raises _Refused if the server refuses the call."""
        return await self._ask(lambda client: client.call_tool(name, dict(arguments)))

    async def close(self) -> None:
        """End the session. It takes bounded time."""
        if self._client is not None:
            self._client.cancel()
            await asyncio.wait([self._client])

    async def _ask(self, call: Callable[[Client], Awaitable[T]]) -> T:
        assert self._client is not None
        self._refusals.last = None
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put_nowait((call, answer))
        either: set[asyncio.Future[Any]] = {answer, self._client}
        async with answering_within(self._timeout_s, "the server"):
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            ended = None if self._client.cancelled() else self._client.exception()
            raise self._refusals.last or _gone(ended) from ended
        try:
            return answer.result()
        except MCPError as error:
            raise self._refusals.last or _typed(error) from error

    async def _live(self) -> None:
        async with Client(self._connection) as client:
            while True:
                call, answer = await self._calls.get()
                try:
                    answer.set_result(await call(client))
                except Exception as error:  # the caller handles it
                    answer.set_exception(error)


def _typed(error: MCPError) -> Exception:
    if error.code == CONNECTION_CLOSED:
        return InfrastructureError("server_gone", error.message)
    if error.code == REQUEST_TIMEOUT:
        return InfrastructureError("server_silent", error.message)
    if error.code in (INVALID_PARAMS, METHOD_NOT_FOUND):
        return _Refused(error.message)
    return EnvironmentFailed("server_error", f"{error.code}: {error.message}")


def _gone(error: BaseException | None) -> InfrastructureError:
    """Make the exception for a session that has ended; the library groups exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    reason = "the session ended" if error is None else f"{type(error).__name__}: {error}"
    if isinstance(error, httpx2.ConnectError):  # maybe it restarts
        return Busy(f"{error.request.url}: {reason}", code="server_unreachable")
    return InfrastructureError("server_gone", reason)


def _described(tool: Tool) -> Mapping[str, Any]:
    """Return a tool as the OpenAI API and chat templates describe it."""
    about = {"description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": {"name": tool.name, **about}}


def _text(result: CallToolResult) -> str:
    """Return the text of a tool's result; a part that is not text becomes its type."""
    parts = [
        block.text if isinstance(block, TextContent) else f"[{block.type}]"
        for block in result.content
    ]
    return "\n".join(parts)
