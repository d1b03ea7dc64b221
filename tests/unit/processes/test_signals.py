"""Signals to children: the one who waits for a child still sees its exit code."""

from __future__ import annotations

import asyncio
import signal
import sys

import psutil

from headrace.services.processes.signals import send_signal


def test_a_child_that_ends_meanwhile_keeps_its_exit_code() -> None:
    async def test() -> None:
        for _ in range(20):
            child = await asyncio.create_subprocess_exec("/bin/sh", "-c", "exit 7")
            while psutil.pid_exists(child.pid):  # its end is not awaited: asyncio can't see it
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
