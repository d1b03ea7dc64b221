"""Real programs, started as new processes and forked from a fork server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.services.processes.child_process import CHUNK_BYTES, ChildProcess
from headrace.services.processes.program_starter import (
    DEATHS,
    ProgramStarter,
    PythonCommand,
    read_command,
    split_environment,
)

BOUND_S = 60.0
linux = pytest.mark.skipif(sys.platform != "linux", reason="programs are not forked here")
SECRET = "a-variable-that-only-attempts-have"
ONLY = {"ONLY_ATTEMPTS": SECRET}

SHOWS = """
import atexit, inspect, json, os, sys, signal
import marked
atexit.register(lambda: print("the end", os.getpid() == pid))
pid = os.getpid()
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "path": sys.path, "name": __name__,
    "file": globals().get("__file__"), "package": __package__,
    "spec": getattr(__spec__, "name", None),
    "main": sys.modules["__main__"].__dict__ is globals(), "annotations": __annotations__,
    "loader": type(__loader__).__name__, "given": sys.stdin.read(), "cwd": os.getcwd(),
    "environment": dict(os.environ), "files": sorted(os.listdir("/proc/self/fd")),
    "session": os.getsid(0) == pid, "executable": sys.executable, "flags": str(sys.flags),
    "signals": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGPIPE, signal.SIGCHLD)],
    "modules": sorted(n for n in sys.modules if n.startswith(("guard", "headrace_", "imports_"))),
}))
print("to stderr", file=sys.stderr)
def fail():
    raise ValueError("nothing works")
if sys.argv[-1] == "fail":
    fail()
sys.exit(3)
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that count as installed, with `marked`, which prints to stdout."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    (folder / "marked.py").write_text("import os\nvalues = []\nprint('marked', end='')")
    return folder


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "", **ONLY, **more}


async def outcome(child: ChildProcess, given: bytes = b"") -> tuple[int, str, str]:
    """Its exit code, stdout and stderr."""
    assert child.stderr is not None
    async with aclosing(child):
        child.stdin.write(given)
        child.stdin.close()
        output, errors = await asyncio.gather(child.stdout.read(), child.stderr.read())
        return await child.wait(), output.decode(), errors.decode()


def run(
    command: list[str],
    test: Callable[[ProgramStarter], Awaitable[Any]],
    *,
    forks: bool = True,
    folder: str | None = None,
) -> Any:
    async def main() -> Any:
        starter = ProgramStarter(command, folder)
        if forks:
            starter.open()
        try:
            async with asyncio.timeout(BOUND_S):
                return await test(starter)
        finally:
            await starter.aclose()

    return asyncio.run(main())


def server_of(starter: ProgramStarter) -> psutil.Process:
    """The fork server itself, which is the child of its guard."""
    assert starter._server is not None
    server = starter._server.result()
    assert server is not None
    return psutil.Process(server.pid).children()[0]


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python a.py b", PythonCommand(1, is_module=False)),
        ("/x/bin/python3.12 -u -OO -Xutf8 -W ignore a.py", PythonCommand(6, is_module=False)),
        ("python -m a b", PythonCommand(2, is_module=True)),
        ("python -u -m a", PythonCommand(3, is_module=True)),
        ("python", None),
        ("python -m", None),
        ("python -c pass", None),
        ("python - a.py", None),
        ("python -i a.py", None),
        ("python folder", None),
        ("uv run a.py", None),
        ("./a.py", None),
    ],
)
def test_commands_of_python_are_recognized(command: str, expected: PythonCommand | None) -> None:
    assert read_command(command.split()) == expected


def test_a_fork_server_gets_no_variables_but_the_usual_ones() -> None:
    shared = {"PATH": "/bin", "LC_ALL": "C", "PYTHONWARNINGS": "error", "OMP_PROC_BIND": "true"}
    withheld = {"API_TOKEN": "x", "HF_HOME": "y", "OPENAI_API_KEY": "z"}
    assert split_environment({**shared, **withheld}) == (shared, withheld)


@linux
@pytest.mark.parametrize("how", ["file", "module", "fail"])
def test_a_forked_program_sees_what_a_started_one_sees(
    tmp_path: Path, packages: Path, how: str
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "shows.py").write_text(SHOWS)
    program = {"module": ["-m", "own.shows"]}.get(how, ["own/shows.py"])
    command = [sys.executable, "-u", "-W", "ignore", *program, "a", how]

    async def test(starter: ProgramStarter) -> tuple[int, Any, list[str], str]:
        child = await starter.start(environment())
        code, output, errors = await outcome(child, b"the task\n")
        first, *rest = output.removeprefix("" if starter._python else "marked").splitlines()
        return code, json.loads(first), rest, errors.replace("marked", "")

    started, forked = (
        run(command, test, forks=forks, folder=str(tmp_path)) for forks in (False, True)
    )
    different = {name for name, value in started[1].items() if forked[1][name] != value}
    assert {name: (started[1][name], forked[1][name]) for name in different} == {}
    assert forked == started
    code, seen, rest, errors = forked
    assert code == (1 if how == "fail" else 3)
    assert (seen["given"], rest) == ("the task\n", ["the end True"])
    assert errors.startswith("to stderr")
    assert ('in fail\n    raise ValueError("nothing works")' in errors) == (how == "fail")


@linux
def test_nothing_carries_over_from_one_attempt_to_the_next(tmp_path: Path, packages: Path) -> None:
    (tmp_path / "own.py").write_text("seen = []")
    (tmp_path / "program.py").write_text(
        "import json, os, random, sys, uuid\nimport numpy.random\nimport marked, own\n"
        "before = [len(marked.values), len(own.seen), os.environ.get('CHANGED')]\n"
        "marked.values.append(1)\nown.seen.append(1)\nos.environ['CHANGED'] = 'x'\n"
        "os.chdir('/')\nsys.setrecursionlimit(999)\n"
        "print(json.dumps([before, random.random(), uuid.uuid4().hex, uuid.uuid1().hex,"
        " numpy.random.rand(), os.getpid()]))"
    )

    async def test(starter: ProgramStarter) -> list[list[Any]]:
        children = [await starter.start(environment(OPENBLAS_NUM_THREADS="1")) for _ in range(3)]
        assert "numpy" in Path(f"/proc/{server_of(starter).pid}/maps").read_text()
        outcomes = [await outcome(child) for child in children]
        assert [code for code, _, _ in outcomes] == [0, 0, 0]
        return [json.loads(output) for _, output, _ in outcomes]

    said = run([sys.executable, str(tmp_path / "program.py")], test)
    assert [before for before, *_ in said] == [[0, 0, None]] * 3
    for drawn in list(zip(*said, strict=True))[1:]:
        assert len(set(drawn)) == 3


@linux
def test_a_changed_program_is_the_next_attempt_s(tmp_path: Path, packages: Path) -> None:
    program, own = tmp_path / "program.py", tmp_path / "own.py"

    async def test(starter: ProgramStarter) -> list[str]:
        said = []
        for version in ("one", "three"):
            program.write_text(f"import marked, own\nprint('{version}', own.version)")
            own.write_text(f"version = '{version}'")
            said.append((await outcome(await starter.start(environment())))[1])
        program.unlink()
        code, _, errors = await outcome(await starter.start(environment()))
        assert (code, errors[-26:]) == (2, "No such file or directory\n")
        return said

    assert run([sys.executable, str(program)], test) == ["one one\n", "three three\n"]


@linux
@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True)"
         ".start()", "it starts threads (1)"),
        ("import subprocess\np = subprocess.Popen(['sleep', '60'])", "it starts processes"),
        ("file = open(__file__)", "it leaves files or sockets open"),
        ("os.getenv('ONLY_ATTEMPTS')", "it reads ONLY_ATTEMPTS of the environment"),
        ("copy = dict(os.environ)", "it reads all variables of the environment"),
    ],
)  # fmt: skip
def test_an_import_that_makes_a_fork_unsafe_is_left_to_the_attempts(
    tmp_path: Path, packages: Path, caplog: pytest.LogCaptureFixture, does: str, why: str
) -> None:
    (packages / "unsafe.py").write_text(f"import os\npid = os.getpid()\n{does}")
    (packages / "safe.py").write_text("import os\npid = os.getpid()")
    program = tmp_path / "program.py"
    program.write_text(
        "import unsafe, safe, os\n"
        "print(safe.pid != os.getpid(), unsafe.pid == os.getpid(), flush=True)\nos._exit(0)"
    )

    async def test(starter: ProgramStarter) -> str:
        with caplog.at_level(logging.WARNING):
            return (await outcome(await starter.start(environment())))[1]

    # The safe package was imported ahead, and the other one was not.
    assert run([sys.executable, str(program)], test) == "True True\n"
    (said,) = caplog.messages
    assert "each attempt imports unsafe for itself, because a fork would not be safe" in said
    assert why in said


@linux
def test_an_interpreter_that_cannot_be_forked_starts_each_attempt(
    tmp_path: Path, packages: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (packages / "sitecustomize.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    program = tmp_path / "program.py"
    program.write_text("import os\nprint('played', flush=True)\nos._exit(0)")

    async def test(starter: ProgramStarter) -> list[str]:
        return [(await outcome(await starter.start(environment())))[1] for _ in range(2)]

    assert run([sys.executable, str(program)], test) == ["played\n"] * 2
    (said,) = caplog.messages
    assert said.endswith("each attempt is a new process (it starts threads (1))")


@linux
def test_kill_9_of_the_fork_server_ends_its_attempts_and_the_next_one_is_forked(
    tmp_path: Path, packages: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import subprocess, sys, time\n"
        "if sys.argv[1:]: subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "print('ready', flush=True)\ntime.sleep(60 if sys.argv[1:] else 0)"
    )

    async def test(starter: ProgramStarter) -> None:
        servers = set()
        for death in range(1, DEATHS + 1):
            child = await starter.start(environment())
            assert await child.receive() == b"ready\n"
            left = descendants()
            server = server_of(starter)
            servers.add(server.pid)
            server.kill()
            assert (await outcome(child))[0] == 128 + signal.SIGKILL
            while {*left} & {*descendants()}:  # psutil's wait would take the exit code from asyncio
                await asyncio.sleep(0.01)
            assert len(servers) == death
        child = await starter.start(environment())
        assert await child.receive() == b"ready\n"
        assert starter._python is None
        await child.aclose()

    run([sys.executable, str(program), "stay"], test)
    assert not descendants()
    assert "the fork server ended (SIGKILL) and is started again" in caplog.text
    assert f"ended (SIGKILL) {DEATHS} times. Each attempt is now a new process" in caplog.text


@linux
def test_an_attempt_that_is_closed_takes_all_that_it_started_along(
    tmp_path: Path, packages: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, subprocess, sys, time\n"
        "subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "print(os.getpid(), flush=True)\ntime.sleep(60)"
    )

    async def test(starter: ProgramStarter) -> None:
        first, second = [await starter.start(environment()) for _ in range(2)]
        pids = [int((await child.receive() or b"").strip()) for child in (first, second)]
        own = psutil.Process(pids[0])
        family = [own, *own.children()]
        assert len(family) == 2
        await first.aclose()
        assert not any(one.is_running() for one in family)
        assert psutil.pid_exists(pids[1])
        # No zombie stays: there are two guards of the server and of the other attempt, these two,
        # and the other attempt's child.
        while len(descendants()) > 5:
            await asyncio.sleep(0.01)
        await starter.aclose()
        assert not descendants()
        await second.aclose()

    run([sys.executable, str(program)], test)


@linux
def test_secrets_of_attempts_are_not_in_the_fork_server(tmp_path: Path, packages: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import marked, os\nprint(os.environ['ONLY_ATTEMPTS'])")

    async def test(starter: ProgramStarter) -> None:
        assert (await outcome(await starter.start(environment())))[1] == f"{SECRET}\n"
        for process in (server := server_of(starter)), server.parent():
            assert process is not None
            for file in ("environ", "cmdline"):
                text = Path(f"/proc/{process.pid}/{file}").read_bytes()
                assert b"PATH" in text if file == "environ" else program.name.encode() in text
                assert SECRET.encode() not in text
        assert SECRET.encode() not in writable_memory(server.pid)

    run([sys.executable, str(program)], test)


def writable_memory(pid: int) -> bytes:
    """What a process has in its own writable memory."""
    found = b""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            ends, mode = line.split()[:2]
            start, end = (int(number, 16) for number in ends.split("-"))
            if mode.startswith("rw"):
                with contextlib.suppress(OSError):
                    memory.seek(start)
                    found += memory.read(end - start)
    return found


@linux
def test_no_descriptor_of_a_fork_is_left(tmp_path: Path, packages: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('x' * 100_000)")

    async def test(starter: ProgramStarter) -> None:
        seen = []
        for _ in range(3):
            assert len((await outcome(await starter.start(environment())))[1]) > CHUNK_BYTES
            seen.append(sorted(os.listdir("/proc/self/fd")))
        assert seen[1] == seen[2]

    run([sys.executable, str(program)], test)


@linux
def test_other_usual_variables_mean_a_new_process(tmp_path: Path, packages: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os\nprint(os.environ['TZ'])")

    async def test(starter: ProgramStarter) -> list[str]:
        zones = ("UTC", "CET", "UTC")
        return [(await outcome(await starter.start(environment(TZ=zone))))[1] for zone in zones]

    assert run([sys.executable, str(program)], test) == ["UTC\n", "CET\n", "UTC\n"]


@linux
def test_imports_that_hang_mean_new_processes(
    tmp_path: Path, packages: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr("headrace.services.processes.program_starter.READY_S", 1.0)
    (packages / "hangs.py").write_text(
        "import os, time\ntime.sleep(60 if 'ONLY_ATTEMPTS' not in os.environ else 0)"
    )
    program = tmp_path / "program.py"
    program.write_text("import hangs\nprint('played')")

    async def test(starter: ProgramStarter) -> str:
        return (await outcome(await starter.start(environment())))[1]

    assert run([sys.executable, str(program)], test) == "played\n"
    assert caplog.messages[-1].endswith("a new process (its imports took more than 1 s)")
    assert not descendants()


@linux
def test_a_folder_that_is_gone_is_reported(tmp_path: Path, packages: Path) -> None:
    program, folder = tmp_path / "program.py", tmp_path / "folder"
    program.write_text("import os\nprint(os.getcwd())")
    folder.mkdir()

    async def test(starter: ProgramStarter) -> None:
        assert (await outcome(await starter.start(environment())))[1] == f"{folder}\n"
        folder.rmdir()
        with pytest.raises(FileNotFoundError):
            await starter.start(environment())

    run([sys.executable, str(program)], test, folder=str(folder))


@linux
def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path, packages: Path) -> None:
    (packages / "slow.py").write_text("import time\ntime.sleep(0.5)")
    program, mark = tmp_path / "program.py", uuid.uuid4().hex
    program.write_text("import slow, time\ntime.sleep(60)")

    async def test(starter: ProgramStarter) -> None:
        starting = [asyncio.create_task(starter.start(environment())) for _ in range(2)]
        await asyncio.sleep(0.1)
        starting[0].cancel()
        await asyncio.wait({starting[0]})
        child = await starting[1]
        await child.aclose()
        while len(descendants()) > 2:  # its guard is ending
            await asyncio.sleep(0.01)
        assert [mark in one.cmdline() for one in descendants()] == [True, True]

    run([sys.executable, str(program), mark], test)
    assert not descendants()
