"""Runs the program of one attempt as a process that ends with its worker, with all it started."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

TAIL_BYTES = 1 << 16
"""Bytes that are kept from the end of each output. The rest is read and dropped."""
CLOSE_S = 5.0
"""Seconds that the guard has to end the process. It needs milliseconds."""
GUARD = Path(__file__).with_name("guard.py")
SECRET = "HEADRACE_"
"""Prefix of the variables that the process doesn't get: they may contain passwords."""


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
    command: Sequence[str], environment: Mapping[str, str], folder: str | None, given: bytes
) -> AsyncIterator[asyncio.Task[Ended]]:
    """Runs a command with `given` as its stdin. At the end, kills it and all that it started."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(SECRET)}
    ours, lifeline = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(GUARD), str(ours), *command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**own, **environment},
            cwd=folder,
            pass_fds=(ours,),
            start_new_session=True,
        )
    except BaseException:
        os.close(lifeline)
        raise
    finally:
        os.close(ours)
    watching = asyncio.create_task(_watch(process, given))
    try:
        yield watching
    finally:
        os.close(lifeline)
        await asyncio.wait({watching}, timeout=CLOSE_S)
        if not watching.done():
            with suppress(ProcessLookupError):
                process.kill()
            await asyncio.wait({watching}, timeout=CLOSE_S)
            watching.cancel()


async def _watch(process: asyncio.subprocess.Process, given: bytes) -> Ended:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    output, errors, _ = await asyncio.gather(
        _tail(process.stdout), _tail(process.stderr), _give(process.stdin, given)
    )
    code = await process.wait()
    return Ended(code, output, errors)


async def _give(stream: asyncio.StreamWriter, given: bytes) -> None:
    # The command may end without reading its input.
    with suppress(BrokenPipeError, ConnectionResetError):
        stream.write(given)
        await stream.drain()
    stream.close()


async def _tail(stream: asyncio.StreamReader) -> str:
    tail = b""
    while chunk := await stream.read(1 << 16):
        tail = (tail + chunk)[-TAIL_BYTES:]
    return tail.decode(errors="replace")
