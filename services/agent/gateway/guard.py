"""Runs a command, and ends all that it started: `python -I -S guard.py LIFELINE COMMAND...`.

LIFELINE is the reading end of a pipe that only the worker keeps open. It ends when the worker ends,
even by kill -9. Then, or when the command ends, the guard kills every process that the command
started. On Linux these include processes that left its process group, since they become children
of the guard. The guard exits with the command's exit code, or with 128 plus the number of the
signal that ended it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
"""https://man7.org/linux/man-pages/man2/prctl.2.html"""
NOT_FOUND = 127
"""The exit code if the command can't be run, as in a shell."""


def main() -> None:
    """Runs the command until it or the lifeline ends."""
    lifeline, command = int(sys.argv[1]), sys.argv[2:]
    os.set_inheritable(lifeline, False)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    own = os.getpid()
    pid = os.fork()
    if pid == 0:
        run(command, own)
    code = None
    while code is None:
        ready, _, _ = select.select([lifeline, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            code = reap(pid)
        if lifeline in ready:
            break
    kill_all(pid)
    os._exit(code if code is not None else 128 + signal.SIGKILL)


def run(command: list[str], parent: int) -> None:
    """Replaces this process by the command, in a session of its own."""
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"can't run {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(NOT_FOUND)


def prctl(option: int, value: int) -> None:
    """Calls Linux's prctl. Does nothing on other systems."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def reap(pid: int) -> int | None:
    """Collects children that have ended. Returns the exit code of `pid` if it is one of them."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == pid:
                code = os.waitstatus_to_exitcode(ended[1])
                code = code if code >= 0 else 128 - code
    return code


def kill_all(group: int) -> None:
    """Kills the command's group and all children, whose own children then become ours."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            for pid in children():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def children() -> list[int]:
    """Returns the children of this process. On systems other than Linux, returns none."""
    own, found = str(os.getpid()), []
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        if name.isdecimal():
            with suppress(OSError), open(f"/proc/{name}/stat") as file:
                if file.read().rpartition(")")[2].split()[1] == own:
                    found.append(int(name))
    return found


if __name__ == "__main__":
    main()
