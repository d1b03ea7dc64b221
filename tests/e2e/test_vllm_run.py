"""Whole runs on vLLM: a worker or a rank that is killed in the middle leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headrace.infra import local
from headrace.schemas.topics import Topics
from tests.e2e import harness

TOPICS = Topics("quickstart", ("default",), 4)
RUN_S = 420.0


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state folder, of which nothing runs in the end."""
    yield tmp_path
    harness.end_all_of(tmp_path)


@pytest.mark.long
@pytest.mark.vllm
def test_the_quickstart_learns_on_vllm_though_its_worker_is_killed(state: Path) -> None:
    arguments = ("run", "quickstart", "--state", str(state), "--check", "reward>=0.95")
    engine = ("--set", "policies.default.engine.use=vllm")

    async def main() -> None:
        async with harness.headrace(*arguments, *engine) as run:
            with harness.usual_ports_taken():
                await run.says("running", RUN_S)
            stack = local.find(state)
            assert stack is not None
            async with harness.watching(stack.bootstrap_servers, TOPICS) as watch:
                await watch.count("policies", 4, RUN_S)
                worker = harness.child_of(state, "inference")
                assert worker.children(recursive=True) == []
                harness.kill(worker.pid)
                await watch.more("policies", 2, RUN_S)
            assert await run.ends(RUN_S) == 0, run.said

    asyncio.run(asyncio.wait_for(main(), 3 * RUN_S))
    harness.gone(state)


async def serving(state: Path) -> tuple[psutil.Process, list[psutil.Process]]:
    """The inference worker and its two ranks, once they are there."""
    async with asyncio.timeout(RUN_S):
        while True:
            found = harness.processes_of(state, "serve", "inference")
            with contextlib.suppress(psutil.NoSuchProcess):
                ranks = [r for one in found for r in one.children() if "Worker" in r.name()]
                if len(ranks) == 2:
                    return found[0], ranks
            await asyncio.sleep(0.1)


@pytest.mark.long
@pytest.mark.vllm
def test_a_run_goes_on_though_a_rank_is_killed_and_a_worker_with_ranks(state: Path) -> None:
    """A worker ends if a rank does, and ranks end if their worker does."""
    options = ("engine.use=vllm", "engine.options.tensor_parallel_size=2")
    settings = [word for one in options for word in ("--set", f"policies.default.{one}")]

    async def main() -> None:
        arguments = ("run", "quickstart", "--state", str(state), *settings)
        async with harness.headrace(*arguments) as run:
            with harness.usual_ports_taken():
                await run.says("running", RUN_S)
            stack = local.find(state)
            assert stack is not None
            async with harness.watching(stack.bootstrap_servers, TOPICS) as watch:
                for victim in ("rank", "worker"):
                    worker, ranks = await serving(state)
                    await watch.more("policies", 2, RUN_S)
                    harness.kill(ranks[1].pid if victim == "rank" else worker.pid)
                    assert not psutil.wait_procs([worker, *ranks], 10)[1]
                await serving(state)
                await watch.more("policies", 2, RUN_S)
            log = "".join(path.read_text() for path in state.rglob("inference.log"))
            assert re.search(r"rank 1 of 2 \(process \d+\) ended by SIGKILL", log)
            run.kill(signal.SIGINT)
            await run.ends(RUN_S)

    asyncio.run(asyncio.wait_for(main(), 3 * RUN_S))
    harness.gone(state)
