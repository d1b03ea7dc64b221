"""Is rank 0 of three, and waits for rank 1 in a collective that does not end: `blocked_rank_0.py`.

It prints `blocked` once it waits.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from headrace.errors import HeadraceError
from headrace.schemas.recipe.policy import Training
from headrace.trainer.ranks.rank_processes import StartedRanks, started_ranks


async def main() -> None:
    with ThreadPoolExecutor(1) as torch_thread:
        async with started_ranks(Training(processes=3, device="cpu")) as ranks:
            await ranks.watch(wait_for_rank_1(ranks, torch_thread), torch_thread)


async def wait_for_rank_1(ranks: StartedRanks, torch_thread: ThreadPoolExecutor) -> None:
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(torch_thread, ranks.join)
    print("blocked", flush=True)
    await loop.run_in_executor(torch_thread, lambda: dist.recv(torch.zeros(1), src=1))


if __name__ == "__main__":
    logging.basicConfig()
    try:
        asyncio.run(main())
    except HeadraceError as error:
        sys.exit(f"not blocked: {error}")
