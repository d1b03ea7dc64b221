"""The guard: ends a local stack when its owner has ended, even if that was killed.

python -m headrace.infra.local STATE OWNER_PID OWNER_STARTED
"""

from __future__ import annotations

import sys
from pathlib import Path

from headrace.infra.local.detached import ProcessId, wait_for_exit
from headrace.infra.local.stack import down_abandoned


def main() -> None:
    """Waits until the owner has ended, then takes the stack down."""
    state, pid, started = sys.argv[1:]
    owner = ProcessId(int(pid), started)
    wait_for_exit(owner, bound_s=None)
    down_abandoned(Path(state), owner)


if __name__ == "__main__":
    main()
