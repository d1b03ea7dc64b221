"""The OpenEnv adapter: OpenEnv's own server, and servers that break the protocol or go away."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import WSMsgType, web
from pydantic import JsonValue

from headrace.errors import EnvironmentFailed, InfrastructureError, UsageError
from headrace.services.base.types import Observation
from headrace.services.env.openenv.openenv_environment import OpenEnvEnvironment
from headrace.services.env.openenv.openenv_messages import render
from tests.adapters.stage import Stage, recipe, server, view

HERE = Path(__file__).parent
GUESS: dict[str, Any] = {"action": "number", "render": "text", "reset": {"highest": 3}}
OBSERVATION = {"type": "observation", "data": {"observation": {"text": "hi"}, "reward": 1}}


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What starts OpenEnv's own server: it has packages that don't go with Headrace's."""
    folder = tmp_path_factory.mktemp("openenv")
    uv, python = [sys.executable, "-m", "uv"], str(folder / "bin" / "python")
    quietly = ["--quiet", "--no-config", "--python"]
    subprocess.run([*uv, "venv", *quietly, sys.executable, "--clear", str(folder)], check=True)
    locked = ["--no-deps", "--requirements", str(HERE / "openenv_requirements.txt")]
    subprocess.run([*uv, "pip", "install", *quietly, python, *locked], check=True)
    return [python, "-I", str(HERE / "openenv_server.py")]


@pytest.fixture(scope="module")
def urls(command: list[str]) -> Iterator[str]:
    with server(command) as (url, _):
        yield url


@pytest.fixture
def guess(urls: str) -> str:
    """Keeps many sessions."""
    return f"{urls}/guess"


async def play(environment: OpenEnvEnvironment, actions: list[str], **task: Any) -> list[Any]:
    """The answers to a reset and to actions; then closes."""
    try:
        answers = [await environment.reset(view(**task))]
        return answers + [await environment.step(action) for action in actions]
    finally:
        await environment.aclose()


def test_an_episode_tells_what_is_no_action_and_goes_on(guess: str) -> None:
    async def main() -> None:
        environment = OpenEnvEnvironment(guess, **GUESS)
        environment.set_name("n.1.0.1")
        first, refused, *hints = await play(environment, ["one", "1", "2", "3"], seed=2**62)
        assert first == Observation("1 to 3?", {**first.data, "metadata": {"episode": "n.1.0.1"}})
        assert refused.text.startswith("error: number: Input should be a valid integer")
        assert (refused.reward, refused.done) == (None, False)
        assert sorted(hint.text for hint in hints) == ["no", "no", "yes"]
        assert [hint.reward for hint in hints] == [float(hint.text == "yes") for hint in hints]
        assert [hint.terminated for hint in hints] == [hint.text == "yes" for hint in hints]
        again = await play(OpenEnvEnvironment(guess, **GUESS), ["1", "2", "3"], seed=2**62)
        assert again[1:] == hints

    asyncio.run(main())


def test_actions_as_json_and_arguments_of_the_payload(guess: str) -> None:
    async def main() -> None:
        environment = OpenEnvEnvironment(guess)
        actions = ['{"number": 1}', '{"number": 2, "game": 5}', "7", "{", "[" * 100_000]
        first, done, *refused = await play(environment, actions, payload={"highest": 1})
        assert json.loads(first.text) == {"text": "1 to 1?", "tries": 0}
        assert (done.reward, done.terminated, done.data["tries"]) == (1.0, True, 1)
        assert [answer.text[:31] for answer in refused] == [
            "error: game: Input should be a ",
            "error: an action must be a JSON",
            "error: an action must be JSON: ",
            "error: an action must be JSON: ",
        ]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"action": "nummer"}, "nummer: Extra inputs are not permitted. Check"),
        ({"action": "number", "fields": {"game": 5}}, "game: Input should be a valid string"),
        (
            {"action": "number", "render": "txt"},
            "has none of these fields; it has episode, text, tries",
        ),
        ({"tools": True}, "refused the step .*list_tools"),
    ],
)
def test_a_recipe_that_does_not_fit_the_server_is_reported(
    guess: str, options: Any, match: str
) -> None:
    with pytest.raises(UsageError, match=match):
        asyncio.run(play(OpenEnvEnvironment(guess, **options), ["1"]))


@pytest.mark.parametrize(
    ("action", "error", "match"),
    [
        ("-1", EnvironmentFailed, "server_error: .*EXECUTION_ERROR: by zero"),
        ("-3", InfrastructureError, "server_silent: .* within 3 s"),
        ("-4", EnvironmentFailed, "answer_too_large: .* more than 64 KiB"),
    ],
)
def test_what_a_server_does_wrong_is_typed(
    guess: str, action: str, error: type[Exception], match: str
) -> None:
    async def main() -> None:
        limit_s = 3.0 if "server_silent" in match else 60.0
        environment = OpenEnvEnvironment(guess, timeout_s=limit_s, answer_kb=64, **GUESS)
        with pytest.raises(error, match=match):
            await play(environment, [action])
        with pytest.raises(InfrastructureError, match="sandbox_lost"):
            await environment.step("1")
        assert (await play(environment, []))[0].text == "1 to 3?"

    asyncio.run(main())


def test_a_full_server_is_waited_for_and_a_closed_session_makes_room(urls: str) -> None:
    async def main(url: str) -> None:
        one, other = OpenEnvEnvironment(url, **GUESS), OpenEnvEnvironment(url, **GUESS)
        await one.reset(view())
        await one.step("1")
        assert (await one.reset(view())).data["tries"] == 0  # in the same session
        with pytest.raises(InfrastructureError, match=r"server_busy: .*CAPACITY_REACHED"):
            await OpenEnvEnvironment(url, timeout_s=3.0, **GUESS).reset(view())
        waiting = asyncio.create_task(other.reset(view()))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await one.aclose()
        assert (await waiting).text == "1 to 3?"
        await other.aclose()

    asyncio.run(asyncio.wait_for(main(f"{urls}/guess-alone"), 60))


def test_through_the_worker_until_the_server_dies(command: list[str], tmp_path: Path) -> None:
    async def main() -> None:
        with server(command) as (url, _):
            options = {"url": f"{url}/guess-alone", "timeout_s": 5.0, **GUESS}
            async with Stage(recipe("openenv", options), tmp_path).played() as stage:
                assert (await stage.reset()).text == "1 to 3?"
                await stage.stop()  # its session ends with it: there is room for another
                stage.start()
                lost = await stage.step("1")
                assert _failure(lost) == ("infrastructure", "sandbox_lost")
                await stage.reset(attempt=2)
                dead = await stage.step("-2", attempt=2)
                assert _failure(dead) == ("infrastructure", "sandbox_lost")
                gone = await stage.reset(attempt=3)
                assert _failure(gone) == ("infrastructure", "server_unreachable")

    asyncio.run(main())


def test_a_replayable_one_is_stepped_again_by_the_next_worker(guess: str, tmp_path: Path) -> None:
    async def main() -> None:
        options = {"url": guess, "replayable": True, **GUESS}
        async with Stage(recipe("openenv", options), tmp_path).played() as stage:
            await stage.reset()
            await stage.step("9")
            await stage.stop()
            stage.start()
            answer = await stage.step("8")
            assert (answer.failure, json.loads(answer.data)["tries"]) == (None, 2)

    asyncio.run(main())


def _failure(answer: Any) -> tuple[str, str]:
    assert answer.reward is None
    return answer.failure.origin, answer.failure.code


def test_tools_are_called_until_the_answer_is_handed_in(urls: str) -> None:
    def call(name: str, **arguments: Any) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    async def main(url: str) -> None:
        wrong = [call("add", a="x", b=1), call("subtract")]
        both = call("add", a=2, b=3) + call("submit", answer=5) + call("add", a=1, b=1)
        answers = await play(
            OpenEnvEnvironment(url, tools=True, render="question"),
            [*wrong, both],
            payload={"plus": 3},
        )
        first, refused, unknown, last = answers
        assert first.text == "2 plus 3?"
        assert [tool["function"]["name"] for tool in first.data["tools"]] == ["add", "submit"]
        assert first.data["tools"][0]["function"]["parameters"]["required"] == ["a", "b"]
        assert "valid integer" in refused.text
        assert unknown.text == "error: there is no tool 'subtract'; tools are add, submit"
        assert (last.text, last.reward, last.terminated) == ("5\ntaken", 1.0, True)
        assert [each["metadata"]["step"] for each in last.data["results"]] == [2, 3]
        (_, last) = await play(OpenEnvEnvironment(url, tools=True), ["5"], payload={"plus": 3})
        assert last == Observation(data={"results": []}, terminated=True)

    asyncio.run(main(f"{urls}/tools"))


@asynccontextmanager
async def answering(
    respond: Callable[[web.WebSocketResponse], Awaitable[None]], autoping: bool = True
) -> AsyncIterator[str]:
    """A server that does with a connection whatever it likes."""

    async def connected(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(autoping=autoping)
        await socket.prepare(request)
        await respond(socket)
        return socket

    app = web.Application()
    app.router.add_get("/ws", connected)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"ws://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def sending(*messages: Any) -> Callable[[web.WebSocketResponse], Awaitable[None]]:
    """Answers the first message so, then waits for the end."""

    async def respond(socket: web.WebSocketResponse) -> None:
        await socket.receive()
        for message in messages:
            if isinstance(message, bytes):
                await socket.send_bytes(message)
            else:
                await socket.send_str(message if isinstance(message, str) else json.dumps(message))
        async for _ in socket:
            pass

    return respond


def error(code: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": "so it is", **more}}


async def hang_up(socket: web.WebSocketResponse) -> None:
    await socket.receive()
    await socket.close(code=1012, message=b"service restart")


async def vanish(socket: web.WebSocketResponse) -> None:
    await socket.receive()
    assert socket._req is not None
    assert socket._req.transport is not None
    socket._req.transport.abort()


@pytest.mark.parametrize(
    ("respond", "kind", "match"),
    [
        (sending("<html>"), EnvironmentFailed, "bad_answer: .*the body: "),
        (sending(b"\x00"), EnvironmentFailed, "bad_answer: .*a binary message"),
        (sending([1]), EnvironmentFailed, "bad_answer"),
        (sending({"type": "state", "data": {}}), EnvironmentFailed, "of unknown type 'state'"),
        (sending({"type": "observation", "data": {}}), EnvironmentFailed, "observation: Field req"),
        (
            sending('{"type": "observation", "data": ' + '{"a":' * 5000),
            EnvironmentFailed,
            "bad_ans",
        ),
        (
            sending('{"type": "observation", "data": {"observation": {}, "reward": NaN}}'),
            EnvironmentFailed,
            "bad_answer: .*reward.float: ",
        ),
        (
            sending(error("FACTORY_ERROR")),
            EnvironmentFailed,
            "server_error: .*FACTORY_ERROR: so it",
        ),
        (sending(error("VALIDATION_ERROR")), EnvironmentFailed, "server_error"),
        (
            sending({"type": "error", "data": {"errors": 1}}),
            EnvironmentFailed,
            "bad_answer: .*errors",
        ),
        (sending(), InfrastructureError, "server_silent: .* did not answer within 0.5 s"),
        (hang_up, InfrastructureError, "sandbox_lost: .*hung up: 1012 service restart"),
        (vanish, InfrastructureError, "sandbox_lost: .*hung up"),
    ],
)
def test_what_is_no_server_is_typed(respond: Any, kind: type[Exception], match: str) -> None:
    async def main() -> None:
        async with answering(respond) as url:
            limit_s = 0.5 if "server_silent" in match else 60.0
            environment = OpenEnvEnvironment(url, timeout_s=limit_s)
            with pytest.raises(kind, match=match):
                await environment.reset(view())
            await environment.aclose()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_pings_are_answered_while_the_policy_thinks() -> None:
    answered = asyncio.Event()

    async def respond(socket: web.WebSocketResponse) -> None:
        await socket.receive()
        await socket.send_json(OBSERVATION)
        await socket.ping(b"there?")
        pong = await socket.receive()
        assert (pong.type, pong.data) == (WSMsgType.PONG, b"there?")
        answered.set()
        await socket.receive()

    async def main() -> None:
        async with answering(respond, autoping=False) as url:
            environment = OpenEnvEnvironment(url)
            assert (await environment.reset(view())).text == '{"text": "hi"}'
            await answered.wait()
            await environment.aclose()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_comes_unasked_is_never_taken_for_an_answer() -> None:
    async def main() -> None:
        async with answering(sending(OBSERVATION, OBSERVATION)) as url:
            environment = OpenEnvEnvironment(url)
            await environment.reset(view())
            async with asyncio.timeout(60):
                while environment._session.open:
                    await asyncio.sleep(0.01)
            with pytest.raises(EnvironmentFailed, match="no request asked for"):
                await environment.step("{}")

    asyncio.run(main())


def test_a_step_that_is_given_up_ends_the_session() -> None:
    ended = asyncio.Event()

    async def respond(socket: web.WebSocketResponse) -> None:
        await sending(OBSERVATION)(socket)
        ended.set()

    async def main() -> None:
        async with answering(respond) as url:
            environment = OpenEnvEnvironment(url)
            await environment.reset(view())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(environment.step("{}"), 0.2)
            await ended.wait()
            with pytest.raises(InfrastructureError, match="sandbox_lost"):
                await environment.step("{}")

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    ("status", "kind", "match"),
    [
        (404, UsageError, "answered 404"),
        (503, InfrastructureError, "server_busy"),
        (200, UsageError, "answered 200"),
    ],
)
def test_an_address_without_such_a_server(status: int, kind: type[Exception], match: str) -> None:
    async def main() -> None:
        app = web.Application()

        async def refuse(request: web.Request) -> web.Response:
            assert request.headers["Authorization"] == "Bearer secret"
            return web.Response(status=status)

        app.router.add_get("/ws", refuse)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        environment = OpenEnvEnvironment(url, timeout_s=2.0, token="secret")
        with pytest.raises(kind, match=match):
            await environment.reset(view())
        await environment.aclose()
        await runner.cleanup()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"url": "localhost:8000"}, "give the server's address"),
        ({"url": "http://"}, "give the server's address"),
        ({"url": "http://x", "tools": True, "action": "number"}, "without action and fields"),
    ],
)
def test_wrong_options_say_what_is_wrong(options: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        OpenEnvEnvironment(**options)


def test_observations_are_rendered_whole_or_by_their_fields() -> None:
    code: dict[str, JsonValue] = {
        "stdout": "é",
        "stderr": "",
        "exit_code": 0,
        "metadata": {"task": "t"},
    }
    assert render(code, []) == '{"stdout": "é", "stderr": "", "exit_code": 0}'
    assert render({"metadata": {"task": "t"}}, []) == '{"task": "t"}'
    assert render({"metadata": {}}, []) == ""
    assert render(code, ["stdout"]) == "é"
    assert render(code, ["exit_code"]) == "0"
    assert render(code, ["task"]) == "t"
    assert render(code, ["stdout", "stderr", "exit_code"]) == "stdout: é\nexit_code: 0"
