"""`python -m tests.bench.turn_trace FILE ARGUMENT…`: a `headrace` command with stamps in FILE."""

from __future__ import annotations

import sys
from pathlib import Path

from headrace.services.operate.cli import main
from tests.bench.turn_trace.stamps import install

if __name__ == "__main__":
    install(Path(sys.argv.pop(1)))
    main()
