"""The preloader with real processes of `headrace`: what it forks is what a command line starts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from headrace.services.base.files import last_lines
from headrace.services.operate.processes import (
    ENDED_UNSEEN,
    NEVER_BORN,
    STARTS,
    ForkedProcess,
    Preloader,
    headrace_command,
)
from headrace.services.operate.run.supervisor import ChildSpec, Supervisor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are not forked here")

WAITING = headrace_command("serve", "agent", "null", "--parent-fd", "{parent_fd}")
"""Waits for the cluster's configuration, and ends cleanly when the pipe ends."""
BOUND_S = 150


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not condition():
            await asyncio.sleep(0.01)


ENDING = """
import atexit, sys, threading, time
from headrace.services.operate.run.preload import run_and_exit

class Freed:
    def __del__(self):
        print("freed", flush=True)

freed = Freed()

def thread():
    time.sleep(0.1)
    print("thread")

def command():
    atexit.register(print, "atexit")
    threading.Thread(target=thread).start()
    print("command")
    sys.exit({code})

run_and_exit(command)
"""


class Nursery:
    """A preloader, and a pipe and a log for what it forks."""

    def __init__(self, folder: Path) -> None:
        self.notes: list[str] = []
        self.preloader = Preloader(Path("null"), [WAITING], self.notes.append)
        self.log = folder / "child.log"
        self._folder = folder

    async def open(self) -> None:
        await self.preloader.open(lambda: self._folder)

    def kill(self) -> None:
        assert self.preloader._process is not None
        os.kill(self.preloader._process.pid, signal.SIGKILL)

    def fork(self, *command: str) -> tuple[ForkedProcess, int]:
        """The process, and the end of its pipe that is ours."""
        reading, writing = os.pipe()
        with self.log.open("ab") as log:
            process = self.preloader.fork(command, reading, log.fileno())
        os.close(reading)
        assert process is not None
        return process, writing

    async def code_of(self, *arguments: str) -> int:
        """The exit code of a command that ends by itself."""
        process, pipe = self.fork(*headrace_command(*arguments))
        os.close(pipe)
        return await asyncio.wait_for(process.wait(), BOUND_S)


@pytest.mark.slow
def test_what_is_forked_is_what_its_command_line_would_start(tmp_path: Path) -> None:
    async def main() -> None:
        nursery = Nursery(tmp_path)
        await nursery.open()
        process, pipe = nursery.fork(*WAITING)
        await until(lambda: process.pid is not None)
        assert process.pid is not None
        shown = psutil.Process(process.pid)
        await until(lambda: shown.cmdline()[1:7] == list(WAITING[1:7]))
        assert shown.cmdline()[7].isdecimal()
        await until(lambda: os.getsid(process.pid or 0) == process.pid)
        modules = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" in modules  # the trainer's, imported ahead

        assert await nursery.code_of("--version") == 0
        assert await nursery.code_of("serve", "nonsense", "null") == 2
        assert "'nonsense' is not one of" in nursery.log.read_text()

        assert process.returncode is None
        os.close(pipe)
        assert await asyncio.wait_for(process.wait(), BOUND_S) == 0
        assert "the parent process ended" in nursery.log.read_text()

        process, pipe = nursery.fork(*WAITING)
        await until(lambda: process.pid is not None)
        process.send_signal(signal.SIGKILL)
        assert await asyncio.wait_for(process.wait(), BOUND_S) == -signal.SIGKILL
        os.close(pipe)

        process, pipe = nursery.fork(*WAITING)
        await until(lambda: process.pid is not None)
        assert nursery.notes == []
        nursery.kill()
        await until(lambda: nursery.notes == ["the preloader died and was started again"])
        assert process.returncode is None
        os.close(pipe)
        assert await asyncio.wait_for(process.wait(), BOUND_S) == ENDED_UNSEEN
        await nursery.preloader.close()

    asyncio.run(main())


def test_what_a_dead_preloader_was_asked_for_is_not_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        nursery = Nursery(tmp_path)
        await nursery.open()
        unborn, pipe = nursery.fork(*WAITING)
        nursery.kill()
        assert await asyncio.wait_for(unborn.wait(), BOUND_S) == NEVER_BORN
        await until(lambda: nursery.notes == ["the preloader died and was started again"])
        # The next one is still at its imports: a process that starts now does better by itself.
        assert nursery.preloader.fork(WAITING, pipe, pipe) is None
        os.close(pipe)
        await nursery.preloader.close()

    asyncio.run(main())


@pytest.mark.slow
def test_without_a_preloader_that_works_children_start_plainly(tmp_path: Path) -> None:
    async def main() -> None:
        notes: list[str] = []
        command = ("/bin/bash", "-c", "read -r line <&{parent_fd}; echo cluster $line")
        preloader = Preloader(tmp_path / "absent.toml", [command], notes.append)
        supervisor = Supervisor(
            [ChildSpec("a", command, may_end=True)], tmp_path, preloader=preloader
        )
        await supervisor.start()
        supervisor.send_cluster("here")
        await asyncio.wait_for(supervisor.watch(), BOUND_S)
        assert last_lines(tmp_path / "a.log", 9) == ["cluster here"]
        assert supervisor.restarts == 0
        await until(lambda: len(notes) == STARTS)
        assert "absent.toml" in (tmp_path / "preloader.log").read_text()
        await supervisor.stop()

    asyncio.run(main())


@pytest.mark.parametrize(("code", "exit_code"), [("3", 3), ("", 0), ("'why'", 1)])
def test_a_forked_process_exits_as_python_does_but_frees_nothing(code: str, exit_code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING.format(code=code)],
        capture_output=True, text=True, timeout=BOUND_S, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("command\nthread\natexit\n", exit_code)
    assert done.stderr == ("why\n" if exit_code == 1 else "")
