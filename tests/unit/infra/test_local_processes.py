"""Processes that are told apart by their start, locks, and ports, on the real operating system."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import DependencyError
from headrace.infra.local import detached
from headrace.infra.local.detached import (
    Cancelled,
    Interrupts,
    ProcessId,
    free_port,
    locked,
    port_is_free,
    spawn,
    stop,
    wait_for_exit,
)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_recycled_pid_is_neither_alive_nor_killed(sleeper: subprocess.Popen[bytes]) -> None:
    predecessor = ProcessId(sleeper.pid, "an earlier start")

    assert not predecessor.alive
    assert wait_for_exit(predecessor, 0)
    assert stop([predecessor], 1)
    assert sleeper.poll() is None


def test_zombie_counts_as_ended(sleeper: subprocess.Popen[bytes]) -> None:
    process = ProcessId.of(sleeper.pid)
    assert process is not None
    assert process.alive
    assert not wait_for_exit(process, 0)

    sleeper.kill()

    assert wait_for_exit(process, 10)  # not waited for: the kernel still lists its pid
    assert not process.alive


def test_absent_pid_is_no_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    assert ProcessId.of(int(ended.stdout)) is None


def test_spawned_process_is_detached_and_ends_on_sigterm(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = spawn(
        ["/bin/sh", "-c", "echo $(pwd) $LC_ALL; exec sleep 60"], log=log, folder=tmp_path
    )
    try:
        assert os.getsid(process.pid) != os.getsid(0)
        while not log.read_text():
            assert process.alive
    finally:
        assert stop([process], 10)
    assert log.read_text() == f"{tmp_path} C.UTF-8\n"


def test_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
    process = spawn(["/bin/sh", "-c", script], log=log)
    while not log.read_text():
        assert process.alive

    assert not stop([process], 0.2)
    assert not process.alive


def test_lock_is_exclusive_between_threads_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    errors: list[DependencyError] = []

    def contend() -> None:
        try:
            with locked(path, 0.1):
                pass
        except DependencyError as error:
            errors.append(error)

    with locked(path, 1):
        other = threading.Thread(target=contend)
        other.start()
        other.join()
    assert str(path) in str(errors[0])
    with locked(path, 0.1):
        pass


def test_who_waits_for_a_lock_can_give_up(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    polls = iter([False, False, True])
    with locked(path, 1), pytest.raises(Cancelled), locked(path, 60, lambda: next(polls)):
        pass
    assert next(polls, None) is None


@pytest.fixture
def sigint() -> Iterator[None]:
    """Python's own handler, which a test run in the background does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint")
def test_ctrl_c_is_noted_and_raised_at_the_end() -> None:
    interrupts = Interrupts()

    def ctrl_c_twice() -> None:
        with interrupts:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            noted.append(interrupts.noted)

    noted: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        ctrl_c_twice()

    assert noted == [True]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("sigint")
def test_a_handler_of_the_programs_own_stays() -> None:
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)

    assert received == [signal.SIGINT]
    assert not interrupts.noted


def test_lock_is_freed_by_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    script = (
        "import sys, time\nfrom pathlib import Path\n"
        "from headrace.infra.local.detached import locked\n"
        "with locked(Path(sys.argv[1]), 1): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        holder.send_signal(signal.SIGKILL)
    with locked(path, 5):
        pass


def test_listening_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not port_is_free(server.getsockname()[1])
    assert port_is_free(free_port())


def test_a_second_free_port_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka ends if its controller has the port of the broker."""
    monkeypatch.setattr(detached, "PORTS", (first := free_port(), free_port(first)))
    monkeypatch.setattr(detached, "MOST_PORTS", 2)
    assert {free_port(other_than=first) for _ in range(20)} == {detached.PORTS[1]}


def test_without_a_free_port_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(detached, "PORTS", (server.getsockname()[1],))
        monkeypatch.setattr(detached, "MOST_PORTS", 1)
        with pytest.raises(DependencyError, match="end processes that listen there"):
            free_port()
