"""Checks a recipe in a child process, so that code which hangs or exits can't harm the command."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from headrace.errors import HeadraceError, UsageError
from headrace.services.operate.processes import (
    ENDED_UNSEEN,
    NEVER_BORN,
    Process,
    headrace_command,
    spawn,
)
from headrace.services.processes import guard

Start = Callable[[Sequence[str], int, int], Awaitable[Process]]
"""Starts a process from its command line, the reading end of its pipe, and where it writes."""

TRYING = "trying "
"""How the announcement of a part begins."""
SLOW_S = 10.0
"""A part that takes longer is noted."""
LIMIT_S = 120.0
"""A part that takes longer fails."""
LONG_S = 1800.0
"""The same for imports, and for data sets, which may be downloaded."""
DATA_SETS = ("tasks.use", "warm_start.use", "evaluation.use")
MESSAGE_CHARACTERS = 4_000
"""Most characters of the check's messages that are kept, from the end."""


def check_apart(arguments: Sequence[str]) -> int:
    """Runs `headrace check --here` in a child with these streams. Returns its exit code.

    So Ctrl-C ends it at once with all that it started, whatever a part of the recipe does. Raises
    HeadraceError if a signal ends it.
    """
    ours, lifeline = os.pipe()
    command = headrace_command(*arguments)
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, str(ours), "", *command],
            pass_fds=(ours,), start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(ours)
    try:
        code = child.wait()
    finally:
        os.close(lifeline)
        child.wait()
    if code > 128:
        raise HeadraceError(
            f"{signal.Signals(code - 128).name} ended the check. The part that it named last may "
            "be why: try it by itself"
        )
    return code


async def check_in_child(recipe: Path, start: Start, say: Callable[[str], None]) -> None:
    """Runs `headrace check` on the file of a resolved recipe.

    Notes a part that takes long. Raises UsageError if a part can't be used or does not return.
    """
    said, code = await _run(recipe, start, say)
    if code in (NEVER_BORN, ENDED_UNSEEN):  # the preloader died, which says nothing of the recipe
        said, code = await _run(recipe, spawn, say)
    if code != 0:
        _, marker, message = said.rpartition("error: ")
        raise UsageError(
            message.strip() if marker else f"`headrace check` ended with exit code {code}:\n{said}"
        )


async def _run(recipe: Path, start: Start, say: Callable[[str], None]) -> tuple[str, int]:
    """Returns the end of what the check said, and its exit code."""
    ours, theirs = os.pipe()  # ends when this process ends
    reading, writing = os.pipe()
    command = headrace_command("check", str(recipe), "--offline", "--parent-fd", "{parent_fd}")
    process: Process | None = None
    try:
        try:
            process = await start(command, ours, writing)
        finally:
            os.close(ours)
            os.close(writing)
        return await _read(reading, process, say), await process.wait()
    finally:
        os.close(theirs)
        os.close(reading)
        if process is not None and process.returncode is None and process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _read(descriptor: int, process: Process, say: Callable[[str], None]) -> str:
    """Returns the end of what the check says. Raises UsageError if a part does not return."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    pipe = os.fdopen(os.dup(descriptor), "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    said, part, waited_s = "", "", 0.0
    try:
        while True:
            try:
                data = await asyncio.wait_for(reader.read(65_536), SLOW_S)
            except TimeoutError:
                if process.returncode is not None:  # what a part has started still has the pipe
                    return said
                waited_s += SLOW_S
                if waited_s >= (LONG_S if part in ("", *DATA_SETS) else LIMIT_S):
                    raise UsageError(
                        f"{part or 'the check'} did not return within {waited_s:.0f} s. It may "
                        "hang, or wait for something: try it by itself"
                    ) from None
                if part:
                    say(f"checking the recipe: {part} has not returned for {waited_s:.0f} s")
                continue
            if not data:
                return said
            said = (said + data.decode(errors="replace"))[-MESSAGE_CHARACTERS:]
            waited_s = 0.0
            if trying := [line for line in said.splitlines() if line.startswith(TRYING)]:
                part = trying[-1].removeprefix(TRYING)
    finally:
        transport.close()


def end_with_parent(descriptor: int) -> None:
    """Lets this process exit as soon as the parent's pipe ends."""

    def wait() -> None:
        while os.read(descriptor, 1024):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()
