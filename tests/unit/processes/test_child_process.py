"""Real commands as child processes: what they say, how they end, and that nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.services.base.redactor import REDACTOR
from headrace.services.processes import guard
from headrace.services.processes.child_process import ChildProcess, LineTooLong

BOUND_S = 60.0
PRINTS = """
import sys
import time
from headrace.services.processes.pipes import take_pipes
received, sent = take_pipes()
print("not for the parent")
sent.write(received.readline().upper() + sys.stdin.read().encode())
sent.flush()
"""


def run(command: list[str], test: Callable[[ChildProcess], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with (
            asyncio.timeout(BOUND_S),
            aclosing(await ChildProcess.start(command, **options)) as child,
        ):
            return await test(child)

    return asyncio.run(main())


def shell(script: str, test: Callable[[ChildProcess], Awaitable[Any]], **options: Any) -> Any:
    return run(["/bin/sh", "-c", script], test, **options)


@pytest.mark.parametrize("own", [True, False])
def test_its_own_folder_goes_with_it(tmp_path: Path, own: bool) -> None:
    folder = tmp_path / "own"
    folder.mkdir()

    async def test(child: ChildProcess) -> None:
        child.stdin.close()
        assert await child.wait() == 0

    shell("echo > one; cat", test, folder=str(folder), own_folder=own)
    assert folder.exists() != own


async def end_of(child: ChildProcess) -> str:
    assert await child.receive() is None
    return await child.describe_end()


def test_lines_go_there_and_back() -> None:
    async def test(child: ChildProcess) -> list[bytes | None]:
        child.send(b"one")
        child.send(b"two")
        child.stdin.close()
        return [await child.receive() for _ in range(3)]

    assert shell("cat", test) == [b"one\n", b"two\n", None]


def test_only_what_a_module_sends_reaches_its_parent(capfd: pytest.CaptureFixture[str]) -> None:
    async def test(child: ChildProcess) -> list[bytes | None]:
        child.send(b"said")
        return [await child.receive() for _ in range(2)]

    surroundings = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    assert run([sys.executable, "-c", PRINTS], test, environment=surroundings) == [b"SAID\n", None]
    assert capfd.readouterr().err == "not for the parent\n"


def test_what_it_prints_to_stderr_has_no_secrets(capfd: pytest.CaptureFixture[str]) -> None:
    REDACTOR.add("CHILD", "child-canary-1234")
    # The secret is printed in two parts, the last line has no end, and one line is very long.
    script = (
        "printf 'it is child-' >&2; sleep 0.1; printf 'canary-1234\\n' >&2; "
        "head -c 200000 /dev/zero | tr '\\0' x >&2; printf '\\nchild-canary-1234' >&2"
    )
    assert shell(script, end_of) == "exit code 0"
    first, long, last = capfd.readouterr().err.split("\n")
    assert (first, long, last) == ("it is [secret CHILD]", "x" * 200_000, "[secret CHILD]")


def test_a_line_is_bounded() -> None:
    async def test(child: ChildProcess) -> None:
        assert await child.receive() == b"short\n"
        with pytest.raises(LineTooLong):
            await child.receive()

    shell("echo short; yes | tr -d '\\n'", test, limit=1000)


@pytest.mark.parametrize(
    ("script", "end"),
    [("exit 7", "exit code 7"), ("kill -9 $$", "SIGKILL"), ("no-such-program", "exit code 127")],
)
def test_how_it_ended_is_told(script: str, end: str) -> None:
    assert shell(script, end_of) == end


def test_a_child_that_says_no_more_but_goes_on_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.services.processes.child_process.END_S", 0.2)
    assert shell("exec >&-; sleep 600", end_of) == "it closed its stdout"


def test_a_command_that_is_not_there_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["no-such-program"], end_of) == "exit code 127"
    assert capfd.readouterr().err == "can't run no-such-program: No such file or directory\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part is Linux's")
def test_what_left_the_process_group_ends_too() -> None:
    async def test(child: ChildProcess) -> psutil.Process:
        told = await child.receive()
        assert told is not None
        return psutil.Process(int(told))

    left = shell("trap '' TERM; setsid sh -c 'echo $$; exec sleep 600'", test)
    assert not left.is_running()


def test_a_lifeline_that_has_ended_already_ends_the_command() -> None:
    for _ in range(10):
        reading, writing = os.pipe()
        os.close(writing)
        command = [sys.executable, "-I", "-S", guard.__file__, str(reading), "", "sleep", "600"]
        process = subprocess.Popen(command, pass_fds=(reading,), start_new_session=True)
        os.close(reading)
        try:
            assert process.wait(BOUND_S / 6) == 128 + signal.SIGKILL
        finally:
            process.kill()
            process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are listed there")
def test_no_descriptor_is_left(tmp_path: Path) -> None:
    async def main() -> tuple[list[str], list[str]]:
        seen = []
        for _ in range(2):
            child = await ChildProcess.start(["cat"], stderr=asyncio.subprocess.PIPE)
            await child.aclose()
            with pytest.raises(FileNotFoundError):
                await ChildProcess.start(["cat"], folder=str(tmp_path / "absent"))
            seen.append(os.listdir("/proc/self/fd"))
        return seen[0], seen[1]

    first, second = asyncio.run(main())
    assert first == second


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the children of a process")
@pytest.mark.parametrize("turns", range(12))
def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path, turns: int) -> None:
    """Also if the command has started a process by then: on a busy machine it may be that soon.
    Also if it is cancelled again meanwhile."""
    pid_file = tmp_path / "pid"

    async def main() -> None:
        command = ["/bin/sh", "-c", f"trap '' HUP; sleep 600 & echo $! > {pid_file}.new; "
                   f"mv {pid_file}.new {pid_file}; wait"]  # fmt: skip
        starting = asyncio.create_task(ChildProcess.start(command))
        for _ in range(turns):
            await asyncio.sleep(0)
        until = time.monotonic() + 0.5
        while not pid_file.exists() and time.monotonic() < until:
            time.sleep(0.01)  # The event loop stands still meanwhile.
        if starting.cancel():
            for _ in range(turns):
                await asyncio.sleep(0)
            starting.cancel()
            await asyncio.wait([starting])
            assert starting.cancelled()
        else:
            await starting.result().aclose()

    asyncio.run(asyncio.wait_for(main(), BOUND_S))
    if pid_file.exists():
        assert not psutil.pid_exists(int(pid_file.read_text()))
