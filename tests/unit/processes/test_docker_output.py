"""What commands write, from an engine that says only what a test has it say."""

from __future__ import annotations

import asyncio
import io
import socket
import struct
from pathlib import Path

import pytest

from headrace.errors import InfrastructureError
from headrace.services.processes.docker.docker_engine import CALLS, DockerEngine, Output
from tests.unit.processes.docker_fake import (
    BOUND_S,
    INSPECT,
    OLD,
    START,
    UPGRADED,
    FakeEngine,
    counts,
    descriptors,
    engine_threads,
    fake,
    frame,
    hangs,
    on,
    streams,
    until,
)


async def read_all(output: Output) -> list[tuple[int, bytes]]:
    """What was written, each run of bytes of one stream as one."""
    said: list[tuple[int, bytes]] = []
    while chunk := await output.read():
        if said and said[-1][0] == output.stream:
            said[-1] = (output.stream, said[-1][1] + chunk)
        else:
            said.append((output.stream, chunk))
    return said


WRITTEN = (
    frame(b"out") + frame(b"") + frame(b"error", stream=2) + frame(b"x" * 100_000) + frame(b"end")
)
READ = [(1, b"out"), (2, b"error"), (1, b"x" * 100_000 + b"end")]


@pytest.mark.parametrize("head", [UPGRADED, OLD], ids=["upgraded", "old"])
@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
@pytest.mark.parametrize(
    "parts",
    [
        (WRITTEN,),
        (b"", WRITTEN),
        (*(WRITTEN[i : i + 1] for i in range(40)), WRITTEN[40:]),
        (WRITTEN[:5], WRITTEN[5:9], WRITTEN[9:50_000], WRITTEN[50_000:]),
        (WRITTEN[:8192], WRITTEN[8192:]),
    ],
    ids=["with the headers", "after them", "by bytes", "across headers", "one buffer"],
)
def test_output_is_whole_however_it_arrives(
    tmp_path: Path, parts: tuple[bytes, ...], tcp: bool, head: bytes
) -> None:
    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        async with engine.run("a", ("true",), "1", "/") as (run, output):
            await asyncio.sleep(0.02)  # its end has arrived too, if it came with the headers
            assert await read_all(output) == READ
            assert await output.read() == b""
        assert await engine.exit_code(run) == 0

    on(tmp_path, {START: streams(*parts, head=head)}, test, tcp=tcp)


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_a_command_gets_its_input_whole(tmp_path: Path, tcp: bool) -> None:
    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        for size in (1, 3_000_000):
            made.answers[START] = counts(size)
            given = io.BytesIO(bytes(size))
            given.seek(size)
            async with engine.run("a", ("wc",), "1", "/", given) as (_, output):
                assert await read_all(output) == [(1, str(size).encode())]

    on(tmp_path, {START: counts(1)}, test, tcp=tcp)


def test_a_command_that_ends_without_reading_its_input_is_no_failure(tmp_path: Path) -> None:
    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        async with engine.run("a", ("true",), "1", "/", io.BytesIO(bytes(5_000_000))) as (run, _):
            assert await engine.exit_code(run) == 0

    on(tmp_path, {START: streams(frame(b"over"))}, test)


def test_reading_may_be_given_up_and_gone_on_with(tmp_path: Path) -> None:
    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        async with engine.run("a", ("true",), "1", "/") as (_, output):
            said, given_up = b"", 0
            while not said.endswith(b"end"):
                try:
                    async with asyncio.timeout(0.001):
                        said += await output.read()
                except TimeoutError:
                    given_up += 1
            assert given_up > 5
            assert said == b"".join(text for _, text in READ)

    parts = [WRITTEN[i : i + 4] for i in range(0, 40, 4)]
    on(tmp_path, {START: streams(*parts, WRITTEN[40:])}, test)


def test_a_flood_leaves_others_their_turn(tmp_path: Path) -> None:
    """A command that always has more to say must not keep the event loop."""

    async def floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(UPGRADED)
        while True:
            writer.write(frame(b"y" * 30_000))
            await writer.drain()

    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        turns = 0

        async def take_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with engine.run("a", ("yes",), "1", "/") as (_, output):
            await asyncio.sleep(0.1)  # until the socket's buffer is full
            others = asyncio.create_task(take_turns())
            read, before = 0, turns
            while read < 150_000:
                read += len(await output.read())
            assert turns > before + 1
            others.cancel()

    on(tmp_path, {START: floods}, test)


def test_an_engine_that_goes_amid_a_command_is_infrastructure(tmp_path: Path) -> None:
    async def goes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(UPGRADED + frame(b"begun") + frame(b"cut short")[:-3])
        await writer.drain()
        (tmp_path / "engine.sock").unlink()
        writer.transport.abort()

    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        async with engine.run("a", ("true",), "1", "/") as (run, output):
            assert await read_all(output) == [(1, b"beguncut sh")]
        with pytest.raises(InfrastructureError, match=r"engine_unreachable: .*engine\.sock"):
            await engine.exit_code(run)

    on(tmp_path, {START: goes, INSPECT: hangs}, test)


def test_a_connection_that_breaks_amid_a_command_is_infrastructure(tmp_path: Path) -> None:
    async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(UPGRADED + frame(b"begun"))
        await writer.drain()
        await asyncio.sleep(0.1)
        # Closing resets the connection then, which tells it from the command's end.
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()

    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        async with engine.run("a", ("true",), "1", "/") as (_, output):
            with pytest.raises(InfrastructureError, match=r"engine_unreachable: .*reset by peer"):
                await read_all(output)

    on(tmp_path, {START: breaks}, test, tcp=True)


@pytest.mark.slow
def test_hundreds_of_commands_are_open_at_once_and_leave_nothing(tmp_path: Path) -> None:
    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        begun = 0

        async def one() -> None:
            nonlocal begun
            async with engine.run("a", ("sleep",), "1", "/") as (_, output):
                assert await output.read() == b"begun"
                begun += 1
                await output.drain()

        async with asyncio.timeout(BOUND_S):
            tasks = [asyncio.create_task(one()) for _ in range(400)]
            await until(lambda: begun == 400, BOUND_S)
            assert made.open >= 400
            await until(lambda: engine_threads() <= CALLS)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await until(lambda: made.open <= CALLS)
        await engine.aclose()
        await until(lambda: made.open == engine_threads() == 0)

    async def main() -> None:
        await until(lambda: engine_threads() == 0)  # those of the test before
        before = descriptors()
        async with fake(tmp_path, {START: streams(frame(b"begun"), ends=False)}) as (made, engine):
            await test(made, engine)
        await until(lambda: descriptors() <= before)

    asyncio.run(main())


def test_a_command_that_is_given_up_while_it_begins_leaves_no_connection(tmp_path: Path) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await go_on.wait()
        writer.write(UPGRADED + frame(b"begun"))
        await hangs(reader, writer)

    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        async def begin() -> None:
            async with engine.run("a", ("true",), "1", "/"):
                raise AssertionError("it was given up")

        beginning = asyncio.create_task(begin())
        await asked.wait()
        beginning.cancel()
        await asyncio.wait({beginning})
        assert beginning.cancelled()
        go_on.set()
        await until(lambda: made.open == 0)

    on(tmp_path, {START: late}, test)
