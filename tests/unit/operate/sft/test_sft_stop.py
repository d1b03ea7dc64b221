"""What signals do to a fine-tuning."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time

import pytest

from headrace.services.operate.sft import sft_stop
from headrace.services.operate.sft.sft_stop import SftStop, stop_on_signals
from headrace.trainer.loop import STOP_S


def after(
    monkeypatch: pytest.MonkeyPatch,
    *signals: signal.Signals,
    expected: list[str],
    drain_s: float = 60.0,
) -> SftStop:
    """Sends signals, and waits until what is `expected` was done, and that it stops was said once.

    Returns what is wished then. What SIGTERM does in time, a thread does, maybe before it is said.
    """
    done: list[str] = []
    lines: list[str] = []
    monkeypatch.setattr(os, "_exit", lambda code: done.append(f"exit {code}"))
    monkeypatch.setattr(sft_stop, "DRAIN_S", drain_s)
    monkeypatch.setattr(sft_stop, "FINISH_S", 0.01)

    async def main() -> SftStop:
        async with (
            asyncio.timeout(60),
            stop_on_signals(lines.append, lambda: done.append("clean")) as stop,
        ):
            for number in signals:
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.01)
            assert stop.stopping.is_set()
            while not stop.cut.is_set() or len(done) < len(expected):
                await asyncio.sleep(0.01)
            return stop

    stop = asyncio.run(main())
    assert done == expected
    assert len(lines) == 1
    return stop


def test_after_ctrl_c_a_checkpoint_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = after(monkeypatch, signal.SIGINT, expected=[], drain_s=0.001)
    assert stop.save_by == math.inf


def test_sigterm_leaves_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    before = time.monotonic()
    stop = after(monkeypatch, signal.SIGTERM, expected=[])
    assert before + STOP_S <= stop.save_by <= time.monotonic() + STOP_S


def test_sigterm_ends_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    after(monkeypatch, signal.SIGTERM, expected=["clean", "exit 130"], drain_s=0.01)


def test_a_second_ctrl_c_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    after(monkeypatch, signal.SIGINT, signal.SIGINT, expected=["clean", "exit 130"])
