"""Tells whether a thread has to wait for a processor."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

SCARCE = 0.2
"""The least share of its time ready to run that a thread waits if processors are scarce. With null
episodes on two cores it is 0.05 to 0.15 with one live, and 0.3 to 0.4 with 16."""


class ProcessorWait:
    """How long the thread that makes it waits for a processor.

    The figures are Linux's: `/proc/PID/task/TID/schedstat` has the nanoseconds on processors, those
    ready to run without one, and the number of slices. Without that file the wait is 0.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with suppress(OSError):
            path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._ran_ns, self._waited_ns = self._read()

    def share(self) -> float:
        """Since the last call: the share of its time ready to run that the thread waited."""
        ran_ns, waited_ns = self._read()
        ran, waited = ran_ns - self._ran_ns, waited_ns - self._waited_ns
        self._ran_ns, self._waited_ns = ran_ns, waited_ns
        return waited / (ran + waited) if waited > 0 else 0.0

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read(self) -> tuple[int, int]:
        if self._file is None:
            return 0, 0
        try:
            ran, waited, _ = map(int, os.pread(self._file, 100, 0).split())
        except (OSError, ValueError):  # The thread has ended, or the kernel counts nothing.
            return 0, 0
        return ran, waited
