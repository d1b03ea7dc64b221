"""Runs a command, and ends all that it began: `python -I -S guard.py LIFELINE COMMAND...`.

LIFELINE is the reading end of a pipe that only the worker holds open. When that ends, by kill -9
too, or the command does, every process that came of the command is killed: on Linux those as well
that left its process group, for they become this process's children. Exits as the command did,
with 128 and the signal's number where one ended it.
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
"""Exit code of a command that could not be run, as a shell has it."""


def main() -> None:
    """Runs the command to its end, or to the lifeline's."""
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
    """Becomes the command, in a session of its own."""
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
    """Linux's prctl; nothing elsewhere."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def reap(pid: int) -> int | None:
    """Buries children that have ended. The exit code of `pid`, should it be among them."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == pid:
                code = os.waitstatus_to_exitcode(ended[1])
                code = code if code >= 0 else 128 - code
    return code


def kill_all(group: int) -> None:
    """Kills the command's group, and all children; theirs become ours, until there are none."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            for pid in children():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def children() -> list[int]:
    """Processes whose parent this one is, as Linux tells."""
    own, found = str(os.getpid()), []
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        if name.isdecimal():
            with suppress(OSError), open(f"/proc/{name}/stat") as file:
                if file.read().rpartition(")")[2].split()[1] == own:
                    found.append(int(name))
    return found


if __name__ == "__main__":
    main()
