"""Runs the program of one attempt as a process of this host."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass

from headrace.services.processes.child_process import CHUNK_BYTES, ChildProcess
from headrace.services.processes.program_starter import ProgramStarter

TAIL_BYTES = 1 << 16
"""Bytes that are kept from the end of each output. The rest is read and dropped."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended."""

    code: int
    output: str
    """The end of its stdout."""
    errors: str
    """The end of its stderr."""


@asynccontextmanager
async def running(
    program: ProgramStarter, environment: Mapping[str, str], given: bytes
) -> AsyncIterator[asyncio.Task[Ended]]:
    """Runs a program with `given` at its stdin, and with exactly the variables of `environment`.

    At the end, kills it and all that it started. Raises OSError if it can't be started.
    """
    started = await program.start(environment)
    async with aclosing(started) as process:
        watching = asyncio.create_task(_watch(process, given))
        try:
            yield watching
        finally:
            watching.cancel()
            await asyncio.wait({watching})


async def _watch(process: ChildProcess, given: bytes) -> Ended:
    assert process.stderr is not None
    output, errors, _ = await asyncio.gather(
        _tail(process.stdout), _tail(process.stderr), _give(process.stdin, given)
    )
    return Ended(await process.wait(), output, errors)


async def _give(stream: asyncio.StreamWriter, given: bytes) -> None:
    # The command may end without reading its input.
    with suppress(BrokenPipeError, ConnectionResetError):
        stream.write(given)
        await stream.drain()
    stream.close()


async def _tail(stream: asyncio.StreamReader) -> str:
    tail = b""
    while chunk := await stream.read(CHUNK_BYTES):
        tail = (tail + chunk)[-TAIL_BYTES:]
    return tail.decode(errors="replace")
