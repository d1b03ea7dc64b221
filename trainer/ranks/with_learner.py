"""Loads a learner, in one process or in several, for as long as work needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headrace.schemas.recipe.policy import Policy
from headrace.trainer.learner import Learner
from headrace.trainer.ranks.rank_processes import StartedRanks, started_ranks
from headrace.trainer.ranks.shared_learner import SharedLearner

AnyLearner = Learner | SharedLearner
Work = Callable[[AnyLearner, ThreadPoolExecutor], Coroutine[Any, Any, None]]
"""What is done with a learner. All calls of the learner belong into the one thread."""


async def with_learner(folder: Path, policy: Policy, processes: int, work: Work) -> None:
    """Loads version 0 of a policy from a folder, in so many processes, and does the work.

    With several processes this one is rank 0; the others are started, unless `torchrun` has. Raises
    what `Learner` and `StartedRanks.watch` raise.
    """
    # All work with torch happens in one thread: the asyncio loop stays responsive, and no two calls
    # run in parallel.
    with ThreadPoolExecutor(1, thread_name_prefix="torch") as torch_thread:
        if processes > 1 and policy.training is not None:
            async with started_ranks(policy.training) as ranks:
                together = _as_rank_0(ranks, folder, policy, work, torch_thread)
                await ranks.watch(together, torch_thread)
            return
        loop = asyncio.get_running_loop()
        await work(await loop.run_in_executor(torch_thread, Learner, folder, policy), torch_thread)


async def _as_rank_0(
    ranks: StartedRanks,
    folder: Path,
    policy: Policy,
    work: Work,
    torch_thread: ThreadPoolExecutor,
) -> None:
    loop = asyncio.get_running_loop()
    group = await loop.run_in_executor(torch_thread, ranks.join)
    learner = await loop.run_in_executor(torch_thread, SharedLearner, group, folder, policy)
    await work(learner, torch_thread)
    await loop.run_in_executor(torch_thread, learner.close)
