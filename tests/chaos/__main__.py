"""python -m tests.chaos: faults of many kinds on a real broker, and the checker's word in the end.

Exit code 0: nothing lost, nothing doubled, everything drained. 1: something was. Ctrl-C heals and
judges what was until then; a second one ends at once, with exit code 130.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.chaos import disks
from tests.chaos.injections import KINDS
from tests.chaos.report import Outcome
from tests.chaos.run import Options, run


def main() -> None:
    """Reads the command line, runs, prints."""
    asked = _parse()
    disks.enclose()
    options = Options(
        seconds=asked.seconds,
        injections=asked.injections,
        seed=asked.seed,
        kinds=asked.kinds,
        brokers=asked.brokers,
        policies=asked.policies,
        disks=disks.enclosed(),
        keep=asked.keep,
    )
    if not options.disks:
        print("no disks can be made here: none will be full", file=sys.stderr)
    folder = Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    _configure_logging(folder)
    try:
        outcome = asyncio.run(_until_ended(options, folder))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit(130) from None
    finally:
        if asked.keep:
            shutil.copytree(folder, asked.keep, ignore=_bulky, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    if asked.json:
        Path(asked.json).write_text(outcome.to_json())
    print(outcome)
    raise SystemExit(0 if outcome.good else 1)


def _configure_logging(folder: Path) -> None:
    """Progress to the terminal; what the clients say of dead brokers into a file."""
    (folder / "logs").mkdir()
    logging.basicConfig(filename=folder / "logs" / "chaos.log", format="%(asctime)s %(message)s")
    progress = logging.StreamHandler(sys.stdout)
    progress.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
    logging.getLogger("chaos").addHandler(progress)
    logging.getLogger("chaos").setLevel(logging.INFO)


async def _until_ended(options: Options, folder: Path) -> Outcome:
    """Runs; SIGTERM is taken as Ctrl-C is."""
    task = asyncio.current_task()
    assert task is not None

    def on_signal() -> None:
        if options.enough.is_set():
            task.cancel()
        options.enough.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return await run(options, folder)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long faults go on")
    parser.add_argument("--injections", type=int, help="end after so many")
    parser.add_argument("--seed", type=int, default=1, help="of the mixes")
    parser.add_argument("--brokers", type=int, choices=(1, 3), default=1)
    parser.add_argument(
        "--policies", type=int, choices=(1, 2), default=1, help="2: with a barrier between them"
    )
    parser.add_argument("--kinds", type=_kinds, default=tuple(KINDS), help="with commas between")
    parser.add_argument("--json", help="a file for the report")
    parser.add_argument("--keep", type=Path, help="a folder for all logs, and data if it failed")
    return parser.parse_args()


def _kinds(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in KINDS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(KINDS)}")
    return names


def _bulky(_: str, names: list[str]) -> set[str]:
    """What isn't kept: data, but no logs."""
    return {"kafka", "registry-data", "blobs", "checkpoints", "tmp"} & set(names)


if __name__ == "__main__":
    main()
