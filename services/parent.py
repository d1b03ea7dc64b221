"""A child process that doesn't outlive its parent, however that died."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""Of Linux's prctl.h."""


def die_with(parent: int) -> None:
    """Has the kernel kill this process when process `parent` dies, which must have started it.

    Linux alone can; elsewhere this does nothing, and the end of a pipe has to do.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel was told
            os.kill(os.getpid(), signal.SIGKILL)
