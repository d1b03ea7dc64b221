"""A whole run on vLLM: it learns, and a worker that is killed in the middle leaves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

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
