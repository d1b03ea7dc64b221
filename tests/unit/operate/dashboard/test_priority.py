"""A dashboard runs with a low priority, also against processes of other sessions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

AUTOGROUP = Path("/proc/self/autogroup")
SCRIPT = f"""
import os
from pathlib import Path
from headrace.services.operate.dashboard import dashboard
dashboard._give_way()
print(os.nice(0), Path("{AUTOGROUP}").read_text())
"""


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this system does not weigh sessions")
@pytest.mark.parametrize("own_session", [True, False])
def test_only_a_session_of_its_own_gets_a_lower_priority(own_session: bool) -> None:
    before = AUTOGROUP.read_text()
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True, text=True, timeout=60, check=True, start_new_session=own_session,
    ).stdout  # fmt: skip
    niceness, _, autogroup = found.partition(" ")
    assert int(niceness) >= 10
    if own_session:
        assert re.search(r"nice 10$", autogroup.strip())
    else:
        assert autogroup.strip() == before.strip()
