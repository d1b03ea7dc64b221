"""A dashboard runs with a low priority, also against processes of other sessions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

AUTOGROUP = Path("/proc/self/autogroup")
SCRIPT = """
import asyncio, os, sys
from pathlib import Path
from headrace.services.operate.dashboard.session_priority import SessionPriority

def session():
    return Path("/proc/self/autogroup").read_text().split()[-1]

async def until(niceness):
    # Linux limits the changes of all users' sessions together.
    async with asyncio.timeout(20):
        while sys.argv[1] == "own" and session() != niceness:
            await asyncio.sleep(0.05)
    print(os.nice(0), session())

async def main():
    caught_up = asyncio.Event()
    priority = SessionPriority(caught_up)
    lowering = asyncio.create_task(priority.lower_when_read())
    await until("10")
    caught_up.set()
    await until("19")
    with priority.answering():
        with priority.answering():
            await until("10")
        await until("10")
    await until("19")

asyncio.run(main())
"""


def _shown(own_session: bool) -> list[list[str]]:
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, "own" if own_session else "shared"],
        capture_output=True, text=True, timeout=60, check=True, start_new_session=own_session,
    ).stdout  # fmt: skip
    return [line.split() for line in found.splitlines()]


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this system does not weigh sessions")
def test_a_session_of_its_own_goes_last_unless_somebody_asks() -> None:
    shown = _shown(own_session=True)
    assert [session for _, session in shown] == ["10", "19", "10", "10", "19"]
    assert all(int(niceness) >= 10 for niceness, _ in shown)


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this system does not weigh sessions")
def test_a_session_with_other_programs_keeps_its_priority() -> None:
    before = re.findall(r"nice (-?\d+)", AUTOGROUP.read_text())
    shown = _shown(own_session=False)
    assert {session for _, session in shown} == set(before)
    assert all(int(niceness) >= 10 for niceness, _ in shown)
