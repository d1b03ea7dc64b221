"""How long a thread waits for a processor."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headrace.services.kafka.scarcity import SCARCE, ProcessorWait

RIVAL = "import os; os.sched_setaffinity(0, {%d})\nwhile True: pass"


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="only on Linux")
def test_a_thread_whose_processor_another_process_uses_waits() -> None:
    mine = os.sched_getaffinity(0)
    one = min(mine)
    rival = subprocess.Popen([sys.executable, "-c", RIVAL % one])
    try:
        os.sched_setaffinity(0, {one})
        wait = ProcessorWait()
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            pass
        share = wait.share()
        wait.close()
    finally:
        os.sched_setaffinity(0, mine)
        rival.kill()
        rival.wait()
    assert SCARCE < share < 1


def test_a_thread_that_sleeps_does_not_count_as_waiting() -> None:
    wait = ProcessorWait()
    time.sleep(0.2)
    wait.share()
    assert 0.0 <= wait.share() <= 1.0
    wait.close()
    assert wait.share() == 0.0


def test_a_system_that_does_not_count_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "get_native_id", lambda: 0)
    wait = ProcessorWait()
    assert wait.share() == 0.0
    wait.close()
