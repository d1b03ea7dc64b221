"""Child processes that don't outlive their parent, however that died. Nothing but Python's own.

Run as a program, `parent.py PARENT COMMAND…`, it keeps a command: its process group ends when the
command does, or process PARENT.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
"""Of Linux's prctl.h."""


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Has the kernel signal this process when process `parent` dies, which must have started it.

    Linux alone can; elsewhere this does nothing, and the end of a pipe has to do.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
        if os.getppid() != parent:  # it died before the kernel was told
            os.kill(os.getpid(), by)


def keep(parent: int, command: Sequence[str]) -> None:
    """Runs a command to its end or the parent's; then kills the process group, this one too."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    die_with(parent, signal.SIGTERM)
    child = os.posix_spawnp(command[0], list(command), os.environ, setsigmask=[])
    # The command alone holds its pipes: their end is its end.
    os.close(0)
    os.close(1)
    while signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGCHLD:
        if os.waitpid(child, os.WNOHANG)[0] == child:
            break
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    keep(int(sys.argv[1]), sys.argv[2:])
