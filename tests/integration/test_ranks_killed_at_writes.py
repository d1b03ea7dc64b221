"""Each of two ranks dies at each of its writes of a version, and the next start goes on.

As in test_trainer_killed, which has one process: it dies before its first write to the disk, its
second, …, and amid large ones. If it is rank 0, also before and after its records.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import DependencyError
from headrace.schemas.recipe.recipe import Recipe
from headrace.trainer import service
from headrace.trainer.ranks.rank_group import loopback_variables
from headrace.trainer.ranks.rank_process import follow_rank_0
from headrace.trainer.ranks.rank_processes import outside_store
from tests.integration.test_trainer import Bench
from tests.integration.test_trainer_killed import (
    DIED,
    Line,
    Steps,
    in_child,
    published,
    recipe,
    submitting,
)

BOUND_S = 1800
TIMEOUT_S = 10.0
"""The ranks' own one."""
SIZES = (1, 200_000, 400_000)
"""Bytes of a file at which a rank dies: the weights have 463,200, a rank's checkpoint more."""
Death = tuple[int, int, int]
"""The rank that dies, the number of its step, and the size of its file. 0 does not kill."""
NONE: Death = (0, 0, 0)


def of_two() -> Recipe:
    tree = recipe().model_dump(mode="json")
    tree["policies"]["learner"]["training"] |= {"processes": 2, "rank_timeout_s": TIMEOUT_S}
    return Recipe.model_validate(tree)


async def train(bench: Bench, until: int, noted: Path | None = None) -> None:
    """Is rank 0 until a version is published. Exits as a process does if the other one is gone, and
    may write its error to a file."""
    bench.recipe = of_two()
    context = bench.context()
    trainer = asyncio.ensure_future(service.run(context, "learner"))
    seen = asyncio.ensure_future(bench.published(until=until))
    try:
        await asyncio.wait({trainer, seen}, return_when=asyncio.FIRST_COMPLETED)
        context.stopping.set()
        await trainer
    except DependencyError as error:
        if noted is not None:
            noted.write_text(str(error))
        os._exit(error.exit_code)


def follower(prepare: Callable[[], object], noted: Path | None = None) -> int:
    """Forks rank 1, which may write its error to a file. Returns its process id."""
    if child := os.fork():
        return child
    code = 1
    try:
        os.environ["RANK"] = "1"
        prepare()
        follow_rank_0(outside_store(TIMEOUT_S), 1, 2, TIMEOUT_S, "cpu")
        code = 0
    except DependencyError as error:
        code = error.exit_code
        if noted is not None:
            noted.write_text(str(error))
    finally:
        os._exit(code)


def meet() -> None:
    """Chooses where the next two ranks meet."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), **loopback_variables()}


def start(folder: Path, log: list[Line], until: int, death: Death = NONE) -> list[int]:
    """Runs both ranks until a version is published or one of them dies. Returns their codes."""
    rank, step, size = death

    def prepare() -> None:
        if rank and size:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        Steps(folder, step if rank else 0)

    meet()
    other = follower(prepare)
    first = in_child(folder, log, lambda b: train(b, until), *((0, 0) if rank else (step, size)))
    if first == DIED or first < 0:
        os.kill(other, signal.SIGKILL)  # As its guard does.
    return [first, os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])]


def die(root: Path, log: list[Line], expected: list[Any], death: Death) -> bool:
    """Makes version 3, and one rank dies amid it. Both start again. False if none died."""
    folder, mine = root / "dies", list(log)
    shutil.copytree(root / "base", folder)
    codes = start(folder, mine, 3, death)
    died = codes != [0, 0]
    if died:
        assert codes[death[0]] in (DIED, -signal.SIGXFSZ), (codes, death)
        # The other one notices it, is killed by its guard, or was at its end already.
        survived = (0, DependencyError.exit_code, -signal.SIGKILL)
        assert codes[1 - death[0]] in survived, (codes, death)
    assert start(folder, mine, 4) == [0, 0]
    assert published(mine) == expected, f"after {death}"
    kept = sorted(path.name for path in (folder / "test" / "checkpoints" / "learner").iterdir())
    assert kept[1:] == ["v000000000004"], f"two, and nothing of the dead: {kept}"
    shutil.rmtree(folder)
    return died


def trained_twice(root: Path) -> tuple[list[Line], list[Any]]:
    """Makes two versions in the folder `base`. Returns their log, with batches of two more, and
    what is published with these."""
    log: list[Line] = []
    assert in_child(root / "base", log, submitting(1, 2)) == 0
    straight = list(log)
    assert in_child(root / "straight", straight, submitting(3, 4)) == 0
    assert start(root / "straight", straight, 4) == [0, 0]
    expected = published(straight)
    assert [version for version, _, _ in expected] == [0, 1, 2, 3, 4]
    assert start(root / "base", log, 2) == [0, 0]
    assert published(log) == expected[:3]
    assert in_child(root / "base", log, submitting(3, 4)) == 0
    return log, expected


def main(root: Path, every: int) -> None:
    """Kills each rank at its first step and each `every`-th one after it, and prints how often."""
    log, expected = trained_twice(root)
    died = [0, 0]
    for rank in (0, 1):
        while die(root, log, expected, (rank, 1 + died[rank] * every, 0)):
            died[rank] += 1
        killed = [die(root, log, expected, (rank, 0, size)) for size in SIZES]
        assert all(killed), (rank, killed)
    print(*died)


@pytest.mark.long
def test_whichever_rank_dies_at_whichever_write_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    module = "tests.integration.test_ranks_killed_at_writes"
    done = subprocess.run(
        [sys.executable, "-m", module, str(tmp_path), "1"],
        capture_output=True, text=True, check=False, timeout=BOUND_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-8000:]
    print(f"rank 0 and rank 1 died at so many writes: {done.stdout}")
    rank_0, rank_1 = map(int, done.stdout.split())
    assert rank_0 > 40
    assert rank_1 >= 3  # of its file of the checkpoint


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
