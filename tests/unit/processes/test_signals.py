"""Signals to children: the one who waits for a child still sees its exit code."""

from __future__ import annotations

import asyncio
import signal
import sys
import time

import psutil

from headrace.services.processes.signals import send_signal


def test_a_child_that_ends_meanwhile_keeps_its_exit_code() -> None:
    async def test() -> None:
        for _ in range(20):
            child = await asyncio.create_subprocess_exec("/bin/sh", "-c", "exit 7")
            until = time.monotonic() + 60
            while not _has_ended(child.pid):  # its end is not awaited: asyncio can't see it
                send_signal(child, 0)
                assert time.monotonic() < until
            send_signal(child, 0)
            assert await child.wait() == 7

    asyncio.run(test())


def test_a_signal_ends_a_child() -> None:
    async def test() -> None:
        command = "import time; time.sleep(600)"
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", command)
        send_signal(child, signal.SIGKILL)
        assert await child.wait() == -signal.SIGKILL
        send_signal(child, signal.SIGKILL)

    asyncio.run(test())


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
