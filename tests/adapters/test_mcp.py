"""MCP tool servers: a real one by pipes and by HTTP, and some that break the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from headrace.errors import EnvironmentFailed, InfrastructureError, UsageError
from headrace.infra.local.detached import free_port
from headrace.services.base.types import Observation
from headrace.services.env.mcp.mcp_environment import McpEnvironment
from headrace.services.operate import cli
from tests.adapters.stage import Stage, recipe, view

HERE = Path(__file__).parent
CALCULATOR = [sys.executable, str(HERE.parents[1] / "examples" / "calculator_server.py")]
ODD = [sys.executable, str(HERE / "odd_server.py")]
TOOLS: dict[str, Any] = {"reset_tool": "ask", "score_tool": "score"}
ADD = '{"name": "add", "arguments": {"a": 2, "b": 3}}'


@contextmanager
def by_http() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The calculator at an address of its own, once it listens."""
    port = free_port()
    with subprocess.Popen([*CALCULATOR, str(port)]) as process:
        try:
            asyncio.run(_listening(port))
            yield f"http://127.0.0.1:{port}/mcp", process
        finally:
            process.kill()


async def _listening(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


async def play(environment: McpEnvironment) -> list[Observation]:
    """An episode of the calculator, with some calls that are not valid."""
    answers = [await environment.reset(view(seed=5, payload={"plus": 2}))]
    for action in (
        f"I add.\n<tool_call>{ADD}</tool_call><tool_call>{ADD}</tool_call>",
        '{"name": "add", "arguments": {"a": "x"}}',
        '{"name": "score", "arguments": {}}',
        '{"name": "add", ',
        "7",
    ):
        answers.append(await environment.step(action))
    await environment.aclose()
    return answers


def check(answers: list[Observation]) -> None:
    first, added, refused, hidden, torn, last = answers
    assert first.text == "What is 5 plus 2?"
    (tool,) = first.data["tools"]
    assert tool["function"]["name"] == "add"
    assert tool["function"]["parameters"]["required"] == ["a", "b"]
    assert added.text == "5\n5"
    assert "valid integer" in refused.text
    assert hidden.text == "error: there is no tool 'score'; tools are add"
    assert torn.text.startswith("error: a tool call must be JSON")
    assert not any(answer.done or answer.reward for answer in answers[:-1])
    assert (last.reward, last.terminated) == (1.0, True)


def test_an_episode_by_pipes_leaves_no_process() -> None:
    async def main() -> None:
        check(await play(McpEnvironment(command=CALCULATOR, **TOOLS)))

    asyncio.run(main())
    assert not [each for each in psutil.Process().children(recursive=True) if _serves(each)]


def _serves(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any("calculator_server" in part for part in process.cmdline())
    return False


def test_an_episode_by_http_and_a_server_that_dies_in_it() -> None:
    with by_http() as (url, process):

        async def main() -> None:
            check(await play(McpEnvironment(url=url, **TOOLS)))
            environment = McpEnvironment(url=url, **TOOLS)
            await environment.reset(view(payload={"plus": 2}))
            process.kill()
            process.wait()
            with pytest.raises(InfrastructureError, match="server_unreachable"):
                await environment.step(ADD)
            await environment.aclose()

        asyncio.run(main())


@contextmanager
def restarted_later(url: str) -> Iterator[None]:
    """The calculator at this address, from half a second on."""
    port = url.rpartition(":")[2].removesuffix("/mcp")
    command = ["sh", "-c", 'sleep 0.5; exec "$@"', "sh", *CALCULATOR, port]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            yield
        finally:
            process.kill()


def test_an_episode_waits_for_a_server_that_restarts() -> None:
    with by_http() as (url, process):
        process.kill()
        process.wait()
        gone = McpEnvironment(url=url, timeout_s=0.5, **TOOLS)
        with pytest.raises(InfrastructureError, match=f"server_unreachable: {url}"):
            asyncio.run(gone.reset(view()))
        assert "server_unreachable" in str(gone.busy)
        with restarted_later(url):
            environment = McpEnvironment(url=url, **TOOLS)
            assert asyncio.run(play(environment))[0].text == "What is 5 plus 2?"
            assert environment.busy is None


async def _answers(request: web.Request) -> web.StreamResponse:
    """What a server of the protocol with sessions says to each request."""
    asked = json.loads(await request.read())
    body: dict[str, Any] = {"jsonrpc": "2.0", "id": asked.get("id")}
    if asked["method"] == "initialize":
        version = asked["params"]["protocolVersion"]
        about = {"protocolVersion": version, "capabilities": {"tools": {}}}
        body["result"] = {**about, "serverInfo": {"name": "test", "version": "1"}}
        return web.json_response(body, headers={"Mcp-Session-Id": "7"})
    if asked["method"] == "tools/list":
        tool = {"name": "add", "inputSchema": {"type": "object"}}
        body["result"] = {"tools": [tool]}
        return web.json_response(body)
    if "id" not in asked:
        return web.Response(status=202)
    body["error"] = {"code": -32601, "message": f"no method {asked['method']}"}
    return web.json_response(body, status=404 if asked["method"] == "server/discover" else 400)


@pytest.mark.parametrize(
    ("status", "sooner", "kind", "match"),
    [
        (503, False, InfrastructureError, "server_busy: .* answered 503: later"),
        (503, True, InfrastructureError, "server_busy: .* answered 503: later"),
        (401, True, UsageError, "answered 401: later.*url and options"),
        (404, True, UsageError, "answered 404: later.*url and options"),
        (404, False, InfrastructureError, "sandbox_lost: .* has lost the session"),
        (500, False, EnvironmentFailed, "server_error: .* answered 500: later"),
    ],
)
def test_the_policy_does_not_see_that_a_server_refuses(
    status: int, sooner: bool, kind: type[Exception], match: str
) -> None:
    """`sooner` says that it refuses before the session, not in it."""
    refuses = sooner

    async def answer(request: web.Request) -> web.StreamResponse:
        if refuses:
            return web.Response(status=status, text="later")
        return await _answers(request)

    async def main() -> None:
        nonlocal refuses
        app = web.Application()
        app.add_routes([web.post("/mcp", answer)])
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
            environment = McpEnvironment(url=url, timeout_s=1.0 if sooner else 60.0)
            if not sooner:
                await environment.reset(view())
                refused = await environment.step(ADD)
                assert refused.text == "error: no method tools/call"
                refuses = True
            with pytest.raises(kind, match=match):
                await (environment.reset(view()) if sooner else environment.step(ADD))
            await environment.aclose()
        finally:
            await runner.cleanup()

    asyncio.run(main())


def test_through_the_worker_and_anew_after_it(tmp_path: Path) -> None:
    async def main() -> None:
        options = {"command": CALCULATOR, "replayable": True}
        async with Stage(recipe("mcp", options), tmp_path).played() as stage:
            begun = await stage.reset(payload={"prompt": "2 + 3?", "answer": "5"})
            assert begun.text == "2 + 3?"
            assert (await stage.step(ADD)).text == "5"
            await stage.stop()
            stage.start()
            last = await stage.step(" 5\n")
            assert (last.failure, last.reward, last.terminated) == (None, 1.0, True)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("garbage", "server_silent"),
        ("flood", "server_gone"),
        ("exit", "server_ended: .*code 3"),
    ],
)
def test_what_is_no_server_is_infrastructures(kind: str, code: str) -> None:
    others = set(psutil.Process().children())

    async def main() -> None:
        limit_s = 5.0 if code == "server_silent" else 60.0
        environment = McpEnvironment(command=[*ODD, kind], timeout_s=limit_s, answer_kb=64)
        with pytest.raises(InfrastructureError, match=code):
            await environment.reset(view())
        await environment.aclose()

    asyncio.run(main())
    assert set(psutil.Process().children()) <= others


@pytest.mark.parametrize(
    ("status", "kind"), [(200, "application/json"), (500, "text/event-stream")]
)
def test_an_endless_answer_by_http_is_broken_off(status: int, kind: str) -> None:
    async def flood(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={"Content-Type": kind})
        await response.prepare(request)
        while True:
            await response.write(b" " * 4096)

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/mcp", flood)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
        environment = McpEnvironment(url=url, timeout_s=60.0, answer_kb=64)
        with pytest.raises((InfrastructureError, EnvironmentFailed)) as caught:
            await environment.reset(view())
        assert "the answer is too long" in str(caught.value)
        await environment.aclose()
        await runner.cleanup()

    asyncio.run(main())


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "gzip, gzip"])
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_a_compressed_answer_is_refused_before_it_is_decompressed(coding: str, kind: str) -> None:
    bomb = gzip.compress(bytes(16 << 20))

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=bomb, headers={"Content-Encoding": coding, "Content-Type": kind})

    async def main() -> None:
        app = web.Application()
        app.add_routes([web.post("/mcp", answer)])
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
            environment = McpEnvironment(url=url, timeout_s=60.0, answer_kb=64)
            with pytest.raises(InfrastructureError, match="compressed"):
                await environment.reset(view())
            await environment.aclose()
        finally:
            await runner.cleanup()

    asyncio.run(main())


def test_a_stubborn_server_and_its_child_end_with_the_episode(tmp_path: Path) -> None:
    pids_file = tmp_path / "pids"

    async def main() -> None:
        environment = McpEnvironment(command=[*ODD, "stubborn", str(pids_file)], timeout_s=600.0)
        resetting = asyncio.create_task(environment.reset(view()))
        await _until(pids_file.exists)
        resetting.cancel()
        await asyncio.wait([resetting])
        await environment.aclose()

    asyncio.run(main())
    _all_end(pids_file)


KILLED = """
import asyncio, sys
from headrace.services.env.mcp.mcp_environment import McpEnvironment
from headrace.services.base.types import TaskView

task = TaskView(number=0, sample=0, payload={{}}, options={{}}, seed=0)
asyncio.run(McpEnvironment(command={command!r}, timeout_s=600).reset(task))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part is Linux's")
def test_the_server_and_its_child_die_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    pids_file = tmp_path / "pids"
    script = KILLED.format(command=[*ODD, "stubborn", str(pids_file)])
    root = str(HERE.parents[1])
    surroundings = {**os.environ, "PYTHONPATH": root}
    with subprocess.Popen([sys.executable, "-c", script], env=surroundings) as worker:
        asyncio.run(_until(pids_file.exists))
        worker.kill()
    _all_end(pids_file)


async def _until(holds: Any) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.05)


def _all_end(pids_file: Path) -> None:
    asyncio.run(_until(lambda: pids_file.read_text().endswith("]")))
    pids = json.loads(pids_file.read_text())
    assert len(pids) == 2

    asyncio.run(_until(lambda: all(map(_has_ended, pids))))


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_command_that_ends_at_its_start_is_an_error_of_the_recipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = json.dumps(["sh", "-c", "echo no data here >&2; exit 3"])
    settings = ["--set=environments.default.use=mcp", "--set=environments.default.options={}"]
    settings.append(f"--set=environments.default.options.command={command}")
    assert cli._run(["check", "--here", "--offline", "null", *settings]) == 2
    said = capsys.readouterr().err
    assert "ended before it answered (exit code 3)" in said
    assert said.rstrip().endswith("The end of what it wrote to stderr:\nno data here")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "either a `command` or a `url`"),
        ({"command": ["no-such-program"]}, "no such program"),
        ({"url": "localhost"}, "give the server's address"),
        ({"command": ["cat"], "inherit": "HOME"}, "a list of names"),
    ],
)
def test_wrong_options_say_what_is_wrong(options: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        McpEnvironment(**options)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"tools": ["subtract"]}, UsageError, "no tools .'subtract'.; it has"),
        ({"reset_tool": "add"}, EnvironmentFailed, "tool_failed"),
    ],
)
def test_tools_of_the_recipe_must_be_there(
    options: Any, error: type[Exception], match: str
) -> None:
    async def main() -> None:
        environment = McpEnvironment(command=CALCULATOR, **options)
        with pytest.raises(error, match=match):
            await environment.reset(view())
        await environment.aclose()

    asyncio.run(main())
