"""`python -m tests.fuzz`: fuzzes the decoder and the consumers, and says what came of it."""

from __future__ import annotations

import argparse
import os
import sys

from tests.fuzz.fuzz import PARTS, fuzz


def main() -> int:
    """The command. Returns its exit code: 1 where anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000, help="in all; default 100000")
    parser.add_argument("--seed", type=int, default=0, help="of the first part; default 0")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--only", choices=sorted(PARTS), help="one half of it")
    options = parser.parse_args()
    only = [options.only] if options.only else list(PARTS)
    failures = 0
    for command, text in fuzz(options.messages, options.seed, options.jobs, only):
        failures += 1
        print(f"\n{text}\nrepeat it: {command}", file=sys.stderr)
    print(f"{failures} failures" if failures else "no failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
