"""Detached processes, locks and ports: the operating system's part of the local stack.

A process is identified by its pid *and* its start, so a recycled pid is never taken for ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from headrace.errors import DependencyError
from headrace.services.base.files import describe_log, private

_LOCK_POLL_S = 0.05
_SIGKILL_BOUND_S = 10.0
PORTS: Sequence[int] = range(16_384, 32_768)
"""Ports for servers. By their defaults, systems give none of these to outgoing connections (Linux
begins at 32768, macOS at 49152), one of which could take the port of a server that restarts."""
MOST_PORTS = 1_000
"""So many of them are tried."""


class Cancelled(Exception):
    """The start was cancelled: it was interrupted, or the other server did not start."""


class Interrupts:
    """A `with` block that notes Ctrl-C in `noted`, and raises KeyboardInterrupt only at its end.

    KeyboardInterrupt can be raised between any two instructions of the main thread: also between
    the start of a process and the line that records it, or inside a lock of the standard library.
    The block checks `noted` at points where it can end cleanly.

    Does nothing outside the main thread, or if the program has a SIGINT handler of its own.
    """

    def __init__(self) -> None:
        self.noted = False
        self._handles = False

    def __enter__(self) -> Interrupts:
        self._handles = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._handles:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handles:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.noted:
            raise KeyboardInterrupt

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.noted = True


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process. Another process may get the same pid later, but not with the same start."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Returns the process that has this pid now, or None if there is none or it is a zombie."""
        started = _started(pid)
        return None if started is None else cls(pid, started)

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return ProcessId.of(self.pid) == self


def _started(pid: int) -> str | None:
    if sys.platform == "linux":
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        # proc(5): the command may contain any character, so count from its last parenthesis.
        fields = stat.rpartition(")")[2].split()
        state, ticks_since_boot = fields[0], fields[19]
        if state in "ZX":
            return None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{ticks_since_boot}"
    shown = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.split(maxsplit=1)
    return None if not shown or shown[0].startswith("Z") else shown[1].strip()


def spawn(command: Sequence[str], *, log: Path, folder: Path | None = None) -> ProcessId:
    """Starts `command` in `folder` and in its own session. Appends its output to `log`.

    A shell starts it and ends, so that it becomes a child of init: Ctrl-C in a terminal does not
    reach it, it leaves no zombie here, and it outlives this process. Raises DependencyError if it
    ends at once.
    """
    with open(log, "ab", opener=private) as output:
        shell = subprocess.run(
            ["/bin/sh", "-c", '"$@" >&2 & echo $!', "sh", *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,
            check=True,
            text=True,
            umask=0o077,  # its files hold what the topics hold
            env={**os.environ, "LC_ALL": "C.UTF-8"},  # Java reads paths by the locale
        )
    process = ProcessId.of(int(shell.stdout))
    if process is None:
        raise DependencyError(f"{command[0]} ended at once; {describe_log(log)}")
    return process


def wait_for_exit(process: ProcessId, bound_s: float | None) -> bool:
    """Waits at most `bound_s` seconds; None means no limit. Returns whether `process` has ended."""
    if sys.platform == "linux":
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return True
        try:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            # Check this only now: from here on the descriptor can't mean another process.
            return not process.alive or bool(poller.poll(bound_s and bound_s * 1000))
        finally:
            os.close(descriptor)
    with contextlib.closing(select.kqueue()) as queue:
        ended = select.kevent(
            process.pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT
        )
        try:
            return not process.alive or bool(queue.control([ended], 1, bound_s))
        except ProcessLookupError:
            return True


def stop(processes: Sequence[ProcessId], bound_s: float) -> bool:
    """Sends SIGTERM to `processes`, and SIGKILL to those that run after `bound_s` seconds.

    Returns whether all ended on SIGTERM. Raises DependencyError if one survives SIGKILL.
    """
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            if process.alive:
                os.kill(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + bound_s
    stubborn = [
        process
        for process in processes
        if not wait_for_exit(process, max(0.001, deadline - time.monotonic()))
    ]
    for process in stubborn:
        # Kill its whole session: a Java runtime may have a child that writes its start-up archive.
        with contextlib.suppress(ProcessLookupError):
            if process.alive:
                os.killpg(os.getpgid(process.pid), signal.SIGKILL)
    for process in stubborn:
        if not wait_for_exit(process, _SIGKILL_BOUND_S):
            raise DependencyError(f"process {process.pid} did not end on SIGKILL; end it by hand")
    return not stubborn


@contextlib.contextmanager
def locked(
    path: Path, bound_s: float, cancelled: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Holds an exclusive lock on `path`. The kernel frees it if this process dies.

    Raises DependencyError if another process or thread holds it for `bound_s` seconds, and
    Cancelled if `cancelled()` becomes true while it waits.
    """
    deadline = time.monotonic() + bound_s
    with path.open("ab") as opened:
        while True:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if cancelled():
                    raise Cancelled from None
                if time.monotonic() > deadline:
                    raise DependencyError(
                        f"another process has held {path} for {bound_s:.0f} s. End the headrace "
                        "command that hangs there, then try again"
                    ) from error
                time.sleep(_LOCK_POLL_S)
        yield


def share(path: Path) -> None:
    """Holds a shared lock on `path` until this process ends. Does nothing if it is `locked` now."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o600)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def port_is_free(port: int) -> bool:
    """Returns whether a server can listen on this port of 127.0.0.1 now."""
    with socket.socket() as probe:
        # Servers set this too: a port is free although it has connections of an ended server.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def free_port(other_than: int | None = None) -> int:
    """Returns a port of 127.0.0.1 on which nothing listens. It is chosen at random, so two calls
    may return the same one. Raises DependencyError if there seems to be none."""
    for port in random.sample(PORTS, MOST_PORTS):
        if port != other_than and port_is_free(port):
            return port
    raise DependencyError(
        f"{MOST_PORTS} ports of 127.0.0.1 between {PORTS[0]} and {PORTS[-1]} are taken: end "
        "processes that listen there"
    )
