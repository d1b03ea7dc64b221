"""One of two ranks stops amid a checkpoint (SIGSTOP), and the next start goes on from the last one.

The other rank waits for its time-out, and its error names the one that stopped. If that was rank 0,
it wakes up afterwards, as a machine does that was suspended.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import DependencyError
from headrace.trainer.learner import Learner
from tests.integration.test_ranks_killed_at_writes import (
    TIMEOUT_S,
    follower,
    meet,
    start,
    train,
    trained_twice,
)
from tests.integration.test_trainer_killed import Line, in_child, published

BOUND_S = 900
WAKES_S = TIMEOUT_S + 30.0
"""When a stopped rank 0 goes on although rank 1 has not ended. They were started meanwhile."""
SYNC, SAVED, MANIFEST = "fsync", "saved", "manifest.json"
STOPS = [
    (1, "__1_0.distcp"),
    (1, SYNC),
    (1, SAVED),
    (0, "__0_0.distcp"),
    (0, ".metadata.tmp"),
    (0, MANIFEST),
]
"""The rank that stops, and when: before it opens this file, before it syncs its own, or when its
part is done and rank 0 completes the checkpoint in the background, which ends with the manifest."""


def stop_itself(folder: Path, at: str) -> None:
    """Has this process stop at its first step of this kind."""
    plain_sync, plain_save = os.fsync, Learner.save

    def stop() -> None:
        if not (folder / "stopped").exists():
            (folder / "stopped").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and Path(str(arguments[0])).name == at and arguments[2] & os.O_WRONLY:
            stop()

    def sync(descriptor: int) -> None:
        stop()
        plain_sync(descriptor)

    def save(self: Learner, path: Path) -> None:
        plain_save(self, path)
        stop()

    if at == SYNC:
        os.fsync = sync  # type: ignore[assignment]
    elif at == SAVED:
        Learner.save = save  # type: ignore[method-assign]
    else:
        sys.addaudithook(on_event)


def wake(other: int, folder: Path, codes: list[int]) -> None:
    """Waits for the end of rank 1, but not for ever, and then lets rank 0 go on."""
    deadline = time.monotonic() + WAKES_S
    while not (ended := os.waitpid(other, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(int((folder / "stopped").read_text()), signal.SIGCONT)
    codes.append(os.waitstatus_to_exitcode((ended if ended[0] else os.waitpid(other, 0))[1]))


def run_until_one_stops(folder: Path, log: list[Line], rank: int, at: str) -> dict[str, Any]:
    """Makes version 3 in two ranks, one of which stops. Returns how both ended, and when."""
    errors = [folder / "error-0", folder / "error-1"]
    began = time.monotonic()

    def prepare(own: int) -> None:
        if own == rank:
            stop_itself(folder, at)

    async def lead(bench: Any) -> None:
        prepare(0)
        await train(bench, 3, errors[0])

    meet()
    other = follower(lambda: prepare(1), errors[1])
    codes: list[int] = []
    if rank == 0:
        waking = threading.Thread(target=wake, args=(other, folder, codes))
        waking.start()
        first = in_child(folder, log, lead)
        waking.join()
    else:
        first = in_child(folder, log, lead)
        os.kill(other, signal.SIGKILL)  # As its guard does.
        codes.append(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
    return {
        "codes": [first, *codes],
        "errors": [one.read_text() if one.exists() else "" for one in errors],
        "seconds": time.monotonic() - began,
    }


def main(root: Path) -> None:
    """Prints a JSON list of what happened at each of STOPS."""
    log, expected = trained_twice(root)
    found = []
    for rank, at in STOPS:
        folder, mine = root / "stops", list(log)
        shutil.copytree(root / "base", folder)
        one = run_until_one_stops(folder, mine, rank, at)
        assert published(mine) == expected[:4], f"after a stop of rank {rank} at {at}"
        checkpoints = folder / "test" / "checkpoints" / "learner"
        one["kept"] = sorted(path.name for path in checkpoints.glob("v*"))
        assert start(folder, mine, 4) == [0, 0]
        assert published(mine) == expected, f"after a stop of rank {rank} at {at}"
        kept = sorted(path.name for path in checkpoints.iterdir())
        assert kept[1:] == ["v000000000004"], f"two, and nothing unfinished: {kept}"
        shutil.rmtree(folder)
        print(rank, at, one, file=sys.stderr)
        found.append(one)
    print(json.dumps(found))


@pytest.mark.long
def test_whichever_rank_stops_amid_a_checkpoint_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    module = "tests.integration.test_ranks_stopped_at_checkpoints"
    done = subprocess.run(
        [sys.executable, "-m", module, str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=BOUND_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-8000:]
    for (rank, at), one in zip(STOPS, json.loads(done.stdout), strict=True):
        print(f"rank {rank} stopped at {at}: both had ended after {one['seconds']:.0f} s")
        # At the manifest, rank 1 ends while it has nothing to do. Rank 0 may still write it.
        newest = {SAVED: (3,), MANIFEST: (2, 3)}.get(at, (2,))
        assert one["kept"][-1] in [f"v{one:012d}" for one in newest], (rank, at, one["kept"])
        noticed = one["errors"][1 - rank]
        assert f"rank {rank}" in noticed.partition(":")[2], (rank, at, noticed)
        assert one["codes"][1 - rank] == DependencyError.exit_code
        assert TIMEOUT_S < one["seconds"] < WAKES_S


if __name__ == "__main__":
    main(Path(sys.argv[1]))
