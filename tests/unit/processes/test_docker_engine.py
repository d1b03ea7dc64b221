"""Calls of the Docker engine, to one that says only what a test has it say."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import headrace.services.processes.docker.docker_engine
from headrace.errors import InfrastructureError
from headrace.services.processes.docker import docker_client
from headrace.services.processes.docker.docker_engine import CALLS, Conflict, DockerEngine, NotThere
from tests.unit.processes.docker_fake import (
    BOUND_S,
    EXEC,
    START,
    VERSION,
    FakeEngine,
    engine_threads,
    fake,
    hangs,
    on,
    says,
    streams,
    until,
)


@pytest.mark.parametrize(
    ("status", "said", "error", "kind"),
    [
        (404, {"message": "No such container: a"}, NotThere, "sandbox_lost"),
        (409, {"message": "Conflict. The name is in use"}, Conflict, "sandbox_conflict"),
        (500, {"message": "Container a is not running: Removal In Progress"}, Conflict, "conflict"),
        (500, {"message": "write /a: no space left on device"}, InfrastructureError, "no_space"),
        (500, {"message": "something else"}, InfrastructureError, "engine_error"),
        (502, {"no": "message"}, InfrastructureError, 'engine_error: .*{"no": "message"}'),
        (403, "Forbidden", InfrastructureError, "engine_error: .*Forbidden"),
    ],
)
@pytest.mark.parametrize("call", [EXEC, START])
def test_a_refusal_is_typed(
    tmp_path: Path, call: str, status: int, said: Any, error: type[Exception], kind: str
) -> None:
    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        with pytest.raises(error, match=kind) as raised:
            async with engine.run("a", ("true",), "1", "/"):
                pass
        assert type(raised.value) is error

    on(tmp_path, {call: says(said, status)}, test)


def test_an_engine_that_refuses_to_tell_its_version_says_why(tmp_path: Path) -> None:
    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        with pytest.raises(InfrastructureError, match=r"engine_error: .*still starting"):
            await engine.info()

    on(tmp_path, {VERSION: says({"message": "still starting"}, 503)}, test)


def test_it_is_spoken_to_by_its_own_version_of_the_api(tmp_path: Path) -> None:
    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        with pytest.raises(InfrastructureError, match=r"GET /v1\.43/containers/a/json"):
            await engine.inspect("a")

    answers = {VERSION: says({"ApiVersion": "1.43"}), "GET /containers/a/json": says({}, 500)}
    on(tmp_path, answers, test)


def test_an_engine_that_hangs_is_silent_and_may_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More calls than threads: none waits longer than one call may take."""
    monkeypatch.setattr(headrace.services.processes.docker.docker_engine, "CALL_S", 1)

    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        began = time.monotonic()
        calls = [engine.rename("a", "b") for _ in range(9 * CALLS)]
        refused = await asyncio.gather(*calls, return_exceptions=True)
        assert time.monotonic() - began < 6  # 9 s if they waited for each other
        assert {str(each).partition(":")[0] for each in refused} == {"engine_silent"}
        assert "rename a" in str(refused[0])
        await until(lambda: made.open == 0)  # A late call that were answered would keep its own.
        made.answers["POST /containers/a/rename"] = says({})
        monkeypatch.setattr(headrace.services.processes.docker.docker_engine, "CALL_S", BOUND_S)
        assert engine._client is not None
        engine._client.timeout = round(BOUND_S)
        await asyncio.gather(*(engine.rename("a", "b") for _ in range(CALLS)))

    on(tmp_path, {"POST /containers/a/rename": hangs}, test)


def test_a_slow_engine_that_many_calls_wait_for_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call is answered in time, but the last one waits for its turn longer than that."""
    monkeypatch.setattr(headrace.services.processes.docker.docker_engine, "CALL_S", 3)
    monkeypatch.setattr(headrace.services.processes.docker.docker_engine, "CALLS", 2)

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.4)
        await says({})(reader, writer)

    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        await engine.rename("a", "b")
        began = time.monotonic()
        await asyncio.gather(*(engine.rename("a", "b") for _ in range(18)))
        assert time.monotonic() - began > 3.5
        assert made.open <= 2

    on(tmp_path, {"POST /containers/a/rename": slow}, test)


def test_who_gives_up_waiting_for_a_turn_takes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headrace.services.processes.docker.docker_engine, "CALLS", 1)

    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        for _ in range(5):
            calls = [asyncio.create_task(engine.info()) for _ in range(5)]
            await asyncio.sleep(0.02)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
        async with asyncio.timeout(5):
            assert await engine.info() == {"Name": "x"}

    on(tmp_path, {"GET /info": says({"Name": "x"})}, test)


def test_an_engine_that_hangs_as_it_connects_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headrace.services.processes.docker.docker_engine, "CALL_S", 1)

    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        began = time.monotonic()
        refused = await asyncio.gather(*(engine.info() for _ in range(9)), return_exceptions=True)
        assert time.monotonic() - began < 5
        assert {str(each).partition(":")[0] for each in refused} == {"engine_silent"}
        made.answers |= {VERSION: says({"ApiVersion": "1.30"}), "GET /info": says({"Name": "x"})}
        assert (await engine.info())["Name"] == "x"

    on(tmp_path, {VERSION: hangs}, test)


def test_a_connection_that_comes_too_late_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = docker_client.DockerClient
    kept: list[docker_client.DockerClient] = []

    def slow(*settings: Any) -> docker_client.DockerClient:
        kept.append(plain(*settings))
        time.sleep(0.5)
        return kept[-1]

    monkeypatch.setattr(docker_client, "DockerClient", slow)

    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.info(), 0.2)
        await until(lambda: bool(made.asked) and made.open == 0)

    on(tmp_path, {}, test)


def test_an_engine_that_was_away_is_found_again(tmp_path: Path) -> None:
    """It restarts: the connections that were kept are of no use any more."""

    async def main() -> None:
        answers = {"GET /info": says({"Name": "x"})}
        async with fake(tmp_path, answers) as (made, engine):
            await asyncio.gather(*(engine.info() for _ in range(5)))
            for writer in made.writers:
                writer.close()
            await until(lambda: made.open == 0)
            (tmp_path / "engine.sock").rename(tmp_path / "away")
            with pytest.raises(InfrastructureError, match=r"engine_unreachable: .*No such file"):
                await engine.info()
            (tmp_path / "away").rename(tmp_path / "engine.sock")
            assert (await engine.info())["Name"] == "x"

    asyncio.run(main())


def test_what_waits_for_a_thread_is_not_done_once_it_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headrace.services.processes.docker.docker_engine, "CALLS", 1)
    go_on = asyncio.Event()

    async def waits(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        await says({})(reader, writer)

    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        first = asyncio.create_task(engine.info())
        await until(lambda: "GET /info" in made.asked)
        second = asyncio.create_task(engine.rename("a", "b"))
        await asyncio.sleep(0.1)
        second.cancel()
        await asyncio.wait({second})
        go_on.set()
        await first
        await engine.info()
        await until(lambda: engine_threads() == 0)  # A thread ends after its call is answered.
        assert made.asked == [VERSION, "GET /info", "GET /info"]

    on(tmp_path, {"GET /info": waits}, test)


def test_a_pull_that_fails_says_why(tmp_path: Path) -> None:
    async def fails(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (
            b'{"status": "Pulling"}\r\n{"errorDetail": {}, "error": "toomanyrequests: wait"}\r\n'
        )
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(lines), lines))

    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        with pytest.raises(InfrastructureError, match=r"^pull_failed: toomanyrequests: wait$"):
            await engine.pull("a/b")
        made.answers["POST /images/create"] = says({"message": "no such manifest"}, 404)
        with pytest.raises(InfrastructureError, match=r"^pull_failed: .*no such manifest"):
            await engine.pull("a/b:1")
        with pytest.raises(InfrastructureError, match=r"^engine_error: .*Repository name"):
            await engine.pull("https://a/b")

    on(tmp_path, {"POST /images/create": fails}, test)


def test_an_engine_that_goes_amid_a_pull_is_infrastructure(tmp_path: Path) -> None:
    async def goes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b'17\r\n{"status": "Waiting"}\r\n\r\n')
        await writer.drain()
        writer.close()

    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        with pytest.raises(InfrastructureError, match=r"engine_unreachable: .*pull a: .*broken"):
            await engine.pull("a")

    on(tmp_path, {"POST /images/create": goes}, test)


@pytest.mark.parametrize("progress", [True, False], ids=["drags on", "hangs"])
def test_a_pull_that_takes_too_long_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: bool
) -> None:
    monkeypatch.setattr(headrace.services.processes.docker.docker_engine, "PULL_S", 1)

    async def drags(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while progress:
            writer.write(b'17\r\n{"status": "Waiting"}\r\n\r\n')
            await writer.drain()
            await asyncio.sleep(0.05)
        await hangs(reader, writer)

    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        with pytest.raises(InfrastructureError, match=r"engine_silent: .*pull a"):
            await engine.pull("a")
        await until(lambda: made.open == 0)  # its thread has gone on

    on(tmp_path, {"POST /images/create": drags}, test)


ENDS = """
import asyncio, sys
from headrace.services.processes.docker.docker_engine import DockerEngine as Engine

async def main():
    asking = asyncio.create_task(Engine(sys.argv[1]).info())
    await asyncio.to_thread(sys.stdin.readline)
    assert not asking.done()

asyncio.run(main())
"""


def test_a_call_that_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake(tmp_path, {"GET /info": hangs}) as (made, engine):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", ENDS, engine.host), stdin=subprocess.PIPE
            )
            await until(lambda: made.asked == [VERSION, "GET /info"])
            async with asyncio.timeout(BOUND_S / 2):  # a call may take twice as long
                await process.communicate(b"\n")
            assert process.returncode == 0

    asyncio.run(main())


def test_measuring_what_is_being_removed_says_that_it_is_gone(tmp_path: Path) -> None:
    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        with pytest.raises(NotThere, match="container c is gone"):
            await engine.usage("c")

    empty = streams(b"", head=b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    on(tmp_path, {"GET /containers/c/stats": empty}, test)


def test_a_container_without_a_name_is_not_listed(tmp_path: Path) -> None:
    """Docker lists one for ever that was renamed while it was removed."""

    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        found = await engine.containers({"headrace.deadline": ""})
        assert [one["Id"] for one in found] == ["b"]

    listed = [{"Id": "a", "Names": []}, {"Id": "b", "Names": ["/b"]}]
    on(tmp_path, {"GET /containers/json": says(listed)}, test)
