"""Has the processes that `multiprocessing` spawns end with this process, from their first moment.

A spawned process imports what it needs first, which takes seconds with torch. If its parent is
killed meanwhile, it would go on. So it starts as another program, which asks Linux to be killed
when its parent dies, and then becomes what multiprocessing wants it to be.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import spawn
from typing import Any

from headrace.services.processes.guard import PR_SET_PDEATHSIG

BEGIN = f"""import ctypes, os, sys
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {int(signal.SIGKILL)}, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


@contextmanager
def spawned_end_with_parent() -> Iterator[None]:
    """Each process that is spawned meanwhile gets SIGKILL when the thread that spawned it ends."""
    before = spawn.get_command_line

    def command_line(**named: Any) -> list[str]:
        python, *arguments = before(**named)
        begin = (python, "-I", "-S", "-c", BEGIN, str(os.getpid()))
        return [*begin, python, *arguments]

    spawn.get_command_line = command_line
    try:
        yield
    finally:
        spawn.get_command_line = before
