"""An MCP tool server as an environment: tool calls are its steps, any other text is the answer.

The session lives in a task of its own: the library's contexts must be left by who entered them,
while an environment may be reset and closed by others.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

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
from headrace.services.base.tool_calls import BadCall, read_calls
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.mcp.mcp_transports import by_command, by_url

T = TypeVar("T")

PAGES = 64
"""Most pages of a server's list of tools."""


class McpEnvironment:
    """One episode's session with a server of the Model Context Protocol."""

    recipe_only = frozenset(
        {
            *("command", "url", "environment", "tools", "reset_tool", "score_tool"),
            *("timeout_s", "answer_kb", "token_variable", "replayable"),
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
        token_variable: str | None = None,
        replayable: bool = False,
    ) -> None:
        """A server is started by `command`, for each episode anew, or stands at `url`.

        `environment` are variables for the command. `tools` are those that the policy may call;
        absent: all but the two that follow. `reset_tool` is called first, with `seed` and
        `payload`, and says the first observation; absent: the payload's `prompt`. `score_tool` is
        called at the end with `answer`, `seed` and `payload`, and gives the reward; absent: whether
        the answer is the payload's `answer`. Each call has `timeout_s`, each message at most
        `answer_kb` KiB. `replayable` says that the same calls give the same answers.
        """
        self.replayable = replayable
        self._tools = tools
        self._hidden = [tool for tool in (reset_tool, score_tool) if tool is not None]
        self._reset_tool = reset_tool
        self._score_tool = score_tool
        self._timeout_s = timeout_s
        self._connect = _way(command, url, environment or {}, token_variable, answer_kb * 1024)
        self._session: _Session | None = None
        self._names: list[str] = []
        self._task: TaskView | None = None

    async def reset(self, task: TaskView) -> Observation:
        """Opens a session, and tells of its tools in `data`, as chat templates take them."""
        await self.aclose()
        self._task = task
        self._session = _Session(self._connect(), self._timeout_s)
        await self._session.open()
        tools = self._offered(await self._session.tools())
        self._names = [tool.name for tool in tools]
        data = {"tools": [_described(tool) for tool in tools]}
        text = str(task.payload.get("prompt", ""))
        if self._reset_tool is not None:
            text = _text(await self._hidden_call(self._reset_tool, {}))
        return Observation(text=text, data=data)

    async def step(self, action: str) -> Observation:
        """Calls tools, and tells what they say; or takes the answer."""
        if self._session is None:
            raise InfrastructureError("sandbox_lost", "it was never reset")
        try:
            calls = read_calls(action, self._names)
        except BadCall as error:
            return Observation(text=f"error: {error}")
        if not calls:
            return await self._finish(action)
        try:
            said = [_text(await self._session.call(each.name, each.arguments)) for each in calls]
        except _Refused as error:
            return Observation(text=f"error: {error}")
        return Observation(text="\n".join(said))

    async def aclose(self) -> None:
        """Ends the session, and the server that was started for it."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _finish(self, answer: str) -> Observation:
        assert self._task is not None
        if self._score_tool is not None:
            reward: float | None = _reward(
                await self._hidden_call(self._score_tool, {"answer": answer}), self._score_tool
            )
        elif "answer" in self._task.payload:
            reward = float(answer.strip() == str(self._task.payload["answer"]).strip())
        else:
            reward = None
        return Observation(reward=reward, terminated=True)

    async def _hidden_call(self, tool: str, more: Mapping[str, Any]) -> CallToolResult:
        """Calls a tool that the policy knows nothing of: its failure is not the policy's."""
        assert self._session is not None
        assert self._task is not None
        about = {"seed": self._task.seed, "payload": dict(self._task.payload), **more}
        try:
            result = await self._session.call(tool, about)
        except _Refused as error:
            raise UsageError(f"the server's tool {tool!r} can't be called: {error}") from error
        if result.is_error:
            raise EnvironmentFailed("tool_failed", f"{tool}: {_text(result)}")
        return result

    def _offered(self, tools: Sequence[Tool]) -> list[Tool]:
        """The policy's tools. UsageError where the recipe names one that there isn't."""
        there = {tool.name: tool for tool in tools}
        wanted = self._tools
        if wanted is None:
            wanted = [name for name in there if name not in self._hidden]
        if missing := {*wanted, *self._hidden} - set(there):
            raise UsageError(f"the server has no tools {sorted(missing)}; it has {sorted(there)}")
        return [there[name] for name in wanted]


class _Refused(Exception):
    """The server takes no such call: there is no such tool, or not with these arguments."""


class _Session:
    """A client in a task of its own, and the calls that wait for it."""

    def __init__(self, way: AbstractAsyncContextManager[Any], timeout_s: float) -> None:
        self._way = way
        self._timeout_s = timeout_s
        self._calls: asyncio.Queue[tuple[Callable[[Client], Awaitable[Any]], Any]] = asyncio.Queue()
        self._life: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connects. InfrastructureError where no server answers in time."""
        self._life = asyncio.create_task(self._live(), name="MCP session")
        await self._ask(_nothing)

    async def tools(self) -> list[Tool]:
        """All that the server offers."""

        async def list_all(client: Client) -> list[Tool]:
            found: list[Tool] = []
            cursor: str | None = None
            for _ in range(PAGES):
                page = await client.list_tools(cursor=cursor)
                found += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    return found
            raise EnvironmentFailed("server_error", f"its list of tools has over {PAGES} pages")

        return await self._ask(list_all)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """What a tool says. _Refused where the server refuses the call itself."""
        return await self._ask(lambda client: client.call_tool(name, dict(arguments)))

    async def close(self) -> None:
        """Ends it all; bounded."""
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait([self._life])

    async def _ask(self, call: Callable[[Client], Awaitable[T]]) -> T:
        assert self._life is not None
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put_nowait((call, answer))
        either: set[asyncio.Future[Any]] = {answer, self._life}
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            error = None if self._life.cancelled() else self._life.exception()
            raise InfrastructureError("server_gone", _reason(error)) from error
        except TimeoutError as error:
            said = f"the server did not answer in {self._timeout_s:g} s"
            raise InfrastructureError("server_silent", said) from error
        except MCPError as error:
            raise _typed(error) from error

    async def _live(self) -> None:
        async with Client(self._way) as client:
            while True:
                call, answer = await self._calls.get()
                try:
                    answer.set_result(await call(client))
                except Exception as error:  # typed by who asked
                    answer.set_exception(error)


async def _nothing(client: Client) -> None:
    """Asks for nothing: the session is open."""


def _typed(error: MCPError) -> Exception:
    if error.code == CONNECTION_CLOSED:
        return InfrastructureError("server_gone", error.message)
    if error.code == REQUEST_TIMEOUT:
        return InfrastructureError("server_silent", error.message)
    if error.code in (INVALID_PARAMS, METHOD_NOT_FOUND):
        return _Refused(error.message)
    return EnvironmentFailed("server_error", f"{error.code}: {error.message}")


def _reason(error: BaseException | None) -> str:
    """The innermost of what ended a session: the library groups it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return "the session ended" if error is None else f"{type(error).__name__}: {error}"


def _way(
    command: Sequence[str] | None,
    url: str | None,
    environment: Mapping[str, str],
    token_variable: str | None,
    most: int,
) -> Callable[[], AbstractAsyncContextManager[Any]]:
    """How to reach the server. UsageError where it can't be."""
    if (command is None) == (url is None):
        raise UsageError("an MCP server has either a `command` or a `url`")
    if command is not None:
        if not command or shutil.which(command[0]) is None:
            raise UsageError(f"command {list(command)}: no such program here")
        return lambda: by_command(command, environment, most)
    assert url is not None
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"url {url!r}: give the server's address, as http://127.0.0.1:8000/mcp")
    if token_variable is not None and token_variable not in os.environ:
        raise UsageError(f"token_variable: the variable {token_variable} is not set here")
    token = os.environ[token_variable] if token_variable is not None else None
    headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
    return lambda: by_url(url, headers, most)


def _described(tool: Tool) -> Mapping[str, Any]:
    """A tool as the OpenAI API and chat templates describe it."""
    about = {"description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": {"name": tool.name, **about}}


def _text(result: CallToolResult) -> str:
    """What a tool says, as text; what is none is named."""
    parts = [
        block.text if isinstance(block, TextContent) else f"[{block.type}]"
        for block in result.content
    ]
    return "\n".join(parts)


def _reward(result: CallToolResult, tool: str) -> float:
    try:
        return float(_text(result))
    except ValueError as error:
        said = f"{tool} gives no number: {_text(result)[:200]!r}"
        raise EnvironmentFailed("bad_answer", said) from error
