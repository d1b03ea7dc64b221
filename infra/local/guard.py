"""Ends a local stack whose owner has ended, kill -9 included.

python -m infra.local.guard STATE OWNER_PID OWNER_STARTED
"""

from __future__ import annotations

import sys
from pathlib import Path

from infra.local.processes import ProcessId, wait_for_exit
from infra.local.stack import down_abandoned


def main() -> None:
    """Wait for the owner's end, however long that takes, then take the stack down."""
    state, pid, started = sys.argv[1:]
    owner = ProcessId(int(pid), started)
    wait_for_exit(owner, bound_s=None)
    down_abandoned(Path(state), owner)


if __name__ == "__main__":
    main()
