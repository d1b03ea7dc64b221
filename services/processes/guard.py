"""Runs a command, and kills all that it started.

`python -I -S guard.py LIFELINE FOLDER COMMAND...`

LIFELINE is the reading end of a pipe whose other end only the parent holds, so the pipe ends even
if the parent is killed. When the pipe or the command ends, this program kills every process that
the command started. On Linux that includes processes that left its process group, because they
become children of this program. Then it removes FOLDER, an absolute path, with the files in it,
unless that is empty text. It exits as the command did: with 128 plus the signal's number if a
signal ended the command.

It imports only a little of the standard library, so that it starts in milliseconds.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
from contextlib import suppress

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
"""https://man7.org/linux/man-pages/man2/prctl.2.html"""
NOT_FOUND = 127
"""Exit code of a command that could not be run, as a shell has it."""


def main() -> None:
    """Runs the command until it ends or the lifeline does."""
    lifeline, folder, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    os.set_inheritable(lifeline, False)
    fork_guarded(lifeline, folder=folder)
    run(command)


def fork_guarded(lifeline: int, status: int | None = None, folder: str = "") -> None:
    """Forks. Returns in the new process, which has a session of its own.

    The old process never returns. When the new process or the lifeline ends, it kills the new
    process and all that this started, removes `folder`, writes the exit code to `status` as a line,
    and exits with it.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    own = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        die_with_parent()
        if os.getppid() != own:
            os._exit(NOT_FOUND)
        return
    # Only the new process holds its pipes now, so the end of the pipes means its end.
    os.close(0)
    os.close(1)
    _thread.start_new_thread(kill_at_end, (lifeline, pid))
    ended = wait_status = 0
    while ended != pid:
        ended, wait_status = os.waitpid(-1, 0)
    kill_all(pid)
    if folder:
        remove(folder)
    code = os.waitstatus_to_exitcode(wait_status)
    code = code if code >= 0 else 128 - code
    if status is not None:
        with suppress(OSError):
            os.write(status, b"%d\n" % code)
    os._exit(code)


def kill_at_end(lifeline: int, group: int) -> None:
    """Waits for the end of the lifeline, then kills the command with its group."""
    os.read(lifeline, 1)
    with suppress(ProcessLookupError):
        os.kill(group, signal.SIGKILL)  # it may not have its group yet
    kill_group(group)


def run(command: list[str]) -> None:
    """Becomes the command."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"can't run {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(NOT_FOUND)


def die_with_parent() -> None:
    """Has Linux kill this process when its parent dies. Does nothing on other systems.

    A parent that has died before this call is not noticed.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def prctl(option: int, value: int) -> None:
    """Calls Linux's prctl; does nothing on other systems."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def kill_all(group: int) -> None:
    """Kills the command's group and all children of this process.

    On Linux the children of a killed process become children of this one. So this repeats until all
    of them have ended.
    """
    kill_group(group)
    with suppress(ChildProcessError):
        while True:
            for pid in children():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def remove(folder: str) -> None:
    """Removes a folder of files."""
    with suppress(OSError):
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def kill_group(group: int) -> None:
    """Kills what is left of a process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def children() -> list[int]:
    """The children of this process. Only Linux lists them; none elsewhere."""
    own, found = str(os.getpid()), []
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        if name.isdecimal():
            with suppress(OSError), open(f"/proc/{name}/stat") as file:
                if file.read().rpartition(")")[2].split()[1] == own:
                    found.append(int(name))
    return found


if __name__ == "__main__":
    main()
