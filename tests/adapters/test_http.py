"""The HTTP environment against servers that know nothing of Headrace, and against bad ones."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import EnvironmentFailed, InfrastructureError, UsageError
from headrace.services.base.types import Observation
from headrace.services.env.http_environment import HttpEnvironment
from tests.adapters.stage import Stage, recipe, server, view

EXAMPLES = Path(__file__).parents[2] / "examples"
PYTHON = [sys.executable, "-I", str(EXAMPLES / "guess_server.py"), "0"]
SERVERS = {"python": PYTHON}
if node := shutil.which("node"):
    SERVERS["node"] = [node, str(EXAMPLES / "guess_server.mjs"), "0"]

Respond = Callable[[bytes], bytes | Awaitable[bytes]]


def play(environment: HttpEnvironment, actions: list[str], name: str = "n.1.0.1") -> list[Any]:
    """The answers to a reset and to actions; then closes."""

    async def main() -> list[Observation]:
        environment.set_name(name)
        try:
            answers = [await environment.reset(view(seed=5))]
            answers += [await environment.step(action) for action in actions]
        finally:
            await environment.aclose()
        return answers

    return asyncio.run(main())


@asynccontextmanager
async def answering(respond: Respond, port: int = 0) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that answers every request by raw bytes: its address, and the requests."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            requests.append(await reader.readexactly(length))
            content = respond(requests[-1])
            writer.write(content if isinstance(content, bytes) else await content)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", port)
    port = listening.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", requests
    finally:
        listening.close()


def reply(content: bytes, status: int = 200, header: bytes = b"") -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\nConnection: close\r\n"
    return head.encode() + header + b"\r\n" + content


def fails(
    respond: Respond, error: type[Exception], match: str, **options: Any
) -> tuple[Exception, list[bytes]]:
    """What a reset raises if the server answers so."""

    async def main() -> tuple[Exception, list[bytes]]:
        async with answering(respond) as (url, requests):
            environment = HttpEnvironment(url, **options)
            environment.set_name("x")
            with pytest.raises(error, match=match) as caught:
                await environment.reset(view())
            await environment.release()
            return caught.value, requests

    return asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("language", SERVERS)
def test_an_episode_in_another_language(language: str) -> None:
    with server(SERVERS[language]) as (url, _):
        answers = play(HttpEnvironment(url, {"highest": 3}), ["7", "1", "2", "3"])
    assert answers[0] == Observation(text="1 to 3?")
    assert [answer.text for answer in answers[1:]].count("yes") == 1
    assert sum(answer.reward for answer in answers[1:]) == 1.0
    assert [answer.terminated for answer in answers[1:]] == [a.text == "yes" for a in answers[1:]]


@pytest.mark.parametrize("language", SERVERS)
def test_another_worker_goes_on_with_the_episode(language: str, tmp_path: Path) -> None:
    async def main() -> None:
        with server(SERVERS[language]) as (url, pid):
            options = {"url": url, "timeout_s": 2.0}
            async with Stage(recipe("http", options), tmp_path).played() as stage:
                assert (await stage.reset()).text == "1 to 10?"
                assert (await stage.step("99")).text == "no"
                await stage.stop()
                stage.start()
                answer = await stage.step("98")
                assert (answer.text, answer.reward, answer.failure) == ("no", 0.0, None)
                os.kill(pid, signal.SIGKILL)
                lost = await stage.step("97")
                assert lost.reward is None
                assert lost.failure is not None
                assert (lost.failure.origin, lost.failure.code) == (
                    "infrastructure",
                    "server_unreachable",
                )

    asyncio.run(main())


def test_a_lost_answer_is_asked_for_again_under_its_index() -> None:
    async def main() -> None:
        tries = 0

        def respond(request: bytes) -> bytes:
            nonlocal tries
            tries += 1
            return b"" if tries in (2, 3) else reply(b'{"text": "ok", "reward": 1}')

        async with answering(respond) as (url, requests):
            environment = HttpEnvironment(url)
            environment.set_name("n")
            await environment.reset(view())
            assert (await environment.step("go")).reward == 1
            asked = [json.loads(request) for request in requests]
            assert [each["index"] for each in asked] == [0, 1, 1, 1]
            await environment.aclose()
            assert json.loads(requests[-1]) == {"episode": "n"}

    asyncio.run(main())


def test_a_server_that_is_gone_is_no_fault_of_the_environment() -> None:
    error, requests = fails(lambda _: b"", InfrastructureError, "server_unreachable")
    assert len(requests) == 3
    assert "Disconnected" in str(error)


def test_a_silent_server_is_given_up() -> None:
    async def never() -> bytes:
        await asyncio.Event().wait()
        return b""

    fails(lambda _: never(), InfrastructureError, "did not answer within 0.2 s", timeout_s=0.2)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "the body"),
        (b"<html>", "the body"),
        (b"[1]", "bad_answer"),
        (b"{}", "text: Field required"),
        (b'{"text": 1}', "text: "),
        (b'{"text": "\\ud800"}', "bad_answer"),
        (b'{"text": "x", "terminate": true}', "terminate: no such key"),
        (b'{"text": "x", "reward": NaN}', "reward: "),
        (b'{"text": "x", "reward": true}', "reward: "),
        (b'{"text": "x", "rewards": {"a": 1e999}}', "rewards.a: "),
        (b'{"text": "x", "data": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001, "bad_answer"),
    ],
)
def test_garbage_is_the_environments_own_failure(content: bytes, match: str) -> None:
    error, requests = fails(lambda _: reply(content), EnvironmentFailed, match)
    assert len(requests) == 1, error


def test_a_flood_is_cut_off() -> None:
    endless = b"HTTP/1.1 200 X\r\n\r\n" + b"x" * (1 << 20)
    fails(lambda _: endless, EnvironmentFailed, "more than 64 KiB", answer_kb=64)


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [
        (410, InfrastructureError, "sandbox_lost"),
        (409, InfrastructureError, "sandbox_lost"),
        (500, EnvironmentFailed, "server_error"),
        (404, UsageError, "answered 404: why"),
        (401, UsageError, "answered 401: why"),
    ],
)
def test_a_status_says_whose_fault_it_is(status: int, error: type[Exception], code: str) -> None:
    fails(lambda _: reply(b"why", status), error, code)


@pytest.mark.parametrize("status", [408, 425, 429, 502, 503, 504])
def test_a_busy_server_is_asked_until_it_has_room(status: int) -> None:
    async def main() -> None:
        tries = 0

        def respond(request: bytes) -> bytes:
            nonlocal tries
            tries += 1
            return reply(b"full", status) if tries in (1, 3, 4) else reply(b'{"text": "ok"}')

        async with answering(respond) as (url, requests):
            environment = HttpEnvironment(url)
            environment.set_name("n")
            await environment.reset(view())
            await environment.step("go")
            await environment.release()
            assert [json.loads(each)["index"] for each in requests] == [0, 0, 1, 1, 1]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_server_that_restarts_is_waited_for() -> None:
    async def main() -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = HttpEnvironment(f"http://127.0.0.1:{port}")
        environment.set_name("n")
        resetting = asyncio.create_task(environment.reset(view()))
        await asyncio.sleep(1.0)
        assert not resetting.done()
        async with answering(lambda _: reply(b'{"text": "ok"}'), port):
            assert (await resetting).text == "ok"
            await environment.release()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_server_that_stays_busy_is_given_up() -> None:
    busy = lambda _: reply(b"why", 429)  # noqa: E731
    _, requests = fails(busy, InfrastructureError, "server_busy: .*429: why", timeout_s=2.0)
    assert 3 <= len(requests) <= 8


@pytest.mark.parametrize(("after", "few"), [(b"1", True), (b"3600", True), (b"never", False)])
def test_a_busy_server_is_left_alone_for_as_long_as_it_says(after: bytes, few: bool) -> None:
    busy = lambda _: reply(b"", 503, b"Retry-After: " + after + b"\r\n")  # noqa: E731
    _, requests = fails(busy, InfrastructureError, "server_busy", timeout_s=1.1)
    assert (len(requests) == 2) == few


def test_a_busy_server_is_not_taken_for_a_step_that_hangs(tmp_path: Path) -> None:
    """That would count against the policy, if the recipe says so."""

    async def main() -> None:
        respond = lambda body: reply(b'{"text": ""}') if b"task" in body else reply(b"", 503)  # noqa: E731
        async with answering(respond) as (url, _):
            stage = Stage(recipe("http", {"url": url}, step_s=1.0), tmp_path)
            async with stage.played():
                await stage.reset()
                failure = (await stage.step("go")).failure
                assert failure is not None
                assert (failure.origin, failure.code) == ("infrastructure", "server_busy")
                assert "answered 503" in failure.message

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("use", ["http", "openenv"])
def test_a_server_that_is_not_there_is_not_taken_for_a_reset_that_hangs(
    use: str, tmp_path: Path
) -> None:
    async def main() -> None:
        stage = Stage(recipe(use, {"url": "http://127.0.0.1:1"}, step_s=1.0), tmp_path)
        async with stage.played():
            failure = (await stage.reset()).failure
            assert failure is not None
            assert (failure.origin, failure.code) == ("infrastructure", "server_unreachable")

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_call_has_the_time_that_the_recipe_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import aiohttp.client

    monkeypatch.setattr(aiohttp.client, "DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=0.2))

    async def main() -> None:
        async def slowly() -> bytes:
            await asyncio.sleep(1.0)
            return reply(b'{"text": "ok"}')

        async with answering(lambda _: slowly()) as (url, requests):
            environment = HttpEnvironment(url)
            environment.set_name("n")
            assert (await environment.reset(view())).text == "ok"
            await environment.release()
            assert len(requests) == 1

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_redirect_is_not_followed() -> None:
    location = b"Location: http://127.0.0.1:1/\r\n"
    fails(lambda _: reply(b"", 302, location), UsageError, "answered 302")


def test_an_address_must_be_a_url() -> None:
    with pytest.raises(UsageError, match="give the server's address"):
        HttpEnvironment("127.0.0.1:1")


def test_a_task_cant_choose_the_address(tmp_path: Path) -> None:
    from headrace.schemas.events import EnvironmentUse

    async def main() -> None:
        stage = Stage(recipe("http", {"url": "http://127.0.0.1:1"}), tmp_path)
        async with stage.played():
            elsewhere = EnvironmentUse(use="default", options='{"url": "http://127.0.0.1:2"}')
            answer = await stage.reset(environment=elsewhere)
            assert answer.failure is not None
            assert answer.failure.origin == "operator"
            assert "can't set the options ['url']" in answer.failure.message

    asyncio.run(main())
