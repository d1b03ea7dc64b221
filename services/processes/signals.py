"""Signals to child processes that leave the exit code to the one who waits for it."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Protocol


class SignalledChild(Protocol):
    """What asyncio's `Process` says of a child."""

    @property
    def pid(self) -> int:
        """Its process id."""

    @property
    def returncode(self) -> int | None:
        """Its exit code, or None while it runs or nobody has seen its end."""


def send_signal(child: SignalledChild, number: int) -> None:
    """Sends a signal to a child of this process. Does nothing if the child has ended.

    asyncio's own `send_signal`, `terminate` and `kill` first ask the kernel whether the child has
    ended. If it has, they take its exit code, and whoever waits for the child gets 255. On Python
    3.11 a thread of asyncio takes it and says so a moment later. If the child's number belongs to
    another process by then, that one gets the signal.
    """
    if child.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(child.pid, number)
