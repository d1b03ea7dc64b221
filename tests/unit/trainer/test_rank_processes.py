"""The processes of the ranks as rank 0 sees them: too few GPUs, and ranks that end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from headrace.errors import DependencyError, UsageError
from headrace.schemas.recipe.policy import Training
from headrace.services.processes.child_process import ChildProcess
from headrace.trainer.ranks.rank_group import own_gpu
from headrace.trainer.ranks.rank_processes import started_ranks

PROGRAM = Path(__file__).with_name("blocked_rank_0.py")
WAITING = Path(__file__).with_name("waiting_rank_1.py")
SILENT = r"does not answer\. .* The error was: rank 0 has shown no life for 2 s"
ENDS_S = 30.0
"""Far less than the ranks' own time-out in the program, which is 600 s."""


def test_too_few_gpus_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    async def start() -> None:
        async with started_ranks(Training(processes=3)):
            raise AssertionError("it has only two GPUs")

    with pytest.raises(UsageError, match=r"3 processes .* one GPU each, and it shows 2\. Set"):
        asyncio.run(start())
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UsageError, match="shows 2"):
        own_gpu("auto", 0)


@pytest.mark.parametrize(("code", "error"), [(2, UsageError), (1, DependencyError)])
def test_a_rank_that_refuses_to_go_on_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception]
) -> None:
    plain = ChildProcess.start

    async def ends(_: Sequence[str]) -> ChildProcess:
        return await plain((sys.executable, "-c", f"raise SystemExit({code})"))

    monkeypatch.setattr(ChildProcess, "start", ends)

    async def work() -> None:
        await asyncio.sleep(60)

    async def start() -> None:
        async with started_ranks(Training(processes=2, device="cpu")) as ranks:
            with ThreadPoolExecutor(1) as torch_thread:
                await ranks.watch(work(), torch_thread)

    with pytest.raises(error, match="rank 1 of 2"):
        asyncio.run(start())


@pytest.mark.long
def test_rank_0_ends_in_time_although_a_collective_blocks_it() -> None:
    """Rank 1 is stopped and so leaves rank 0 in a collective, and then rank 2 dies."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(PROGRAM)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment,
    ) as rank_0:  # fmt: skip
        try:
            assert rank_0.stdout is not None
            assert rank_0.stdout.readline().strip() == "blocked"
            ranks = {
                one.cmdline()[3]: one
                for one in psutil.Process(rank_0.pid).children(recursive=True)
                if one.cmdline()[1:3] == ["-m", "headrace.trainer.ranks.rank_process"]
            }
            ranks["1"].send_signal(signal.SIGSTOP)
            ranks["2"].send_signal(signal.SIGKILL)
            began = time.monotonic()
            _, said = rank_0.communicate(timeout=ENDS_S)
            print(f"all ranks ended after {time.monotonic() - began:.1f} s")
        finally:
            rank_0.kill()
    assert rank_0.returncode == DependencyError.exit_code, said
    assert "rank 2 of 3 ended: SIGKILL" in said
    _, left = psutil.wait_procs(ranks.values(), timeout=ENDS_S)
    assert left == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "what", "said"),
    [
        (0, "stop", f"the process of rank 0, or the one that serves the store, {SILENT}"),
        (1, "stop", f"rank 0 {SILENT}"),
        (0, "stop-early", f"the process of rank 0, or the one that serves the store, {SILENT}"),
        (0, "stop-joined", "rank 1 of 2 can't .* has shown no life for 2 s"),
        (0, "stop-joining", "can't join the others: the process with the store has shown no life"),
        (0, "idle", "ended cleanly"),
    ],
)
def test_a_rank_waits_for_an_idle_rank_0_but_not_for_one_that_stopped(
    server: int, what: str, said: str
) -> None:
    """Whoever serves the store: with `torchrun` that is a process of its own."""
    done = subprocess.run(
        [sys.executable, str(WAITING), "2", str(server), what],
        capture_output=True, text=True, check=True, timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert re.search(said, done.stdout)
    assert ("has shown no life for 2 s" in done.stdout) == (what != "idle")
