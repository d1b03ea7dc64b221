"""Starts the processes of the ranks above 0 on this machine, and watches them."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Executor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from headrace.errors import DependencyError, HeadraceError, UsageError
from headrace.schemas.recipe.policy import Training
from headrace.services.models.torch_models import pick_device
from headrace.services.processes.child_process import ChildProcess
from headrace.trainer.ranks.rank_group import (
    RankGroup,
    check_gpus,
    loopback_variables,
    outside_rank,
    own_gpu,
    serve_store,
)

logger = logging.getLogger(__name__)

NOTICE_S = 3.0
"""How long the end of a process may take to be noticed after a collective has failed."""
BLOCKED_S = 5.0
"""How long torch may go on in rank 0 after another rank has ended."""


@dataclass(frozen=True)
class StartedRanks:
    """The ranks of a trainer, as rank 0 sees them. If others have started them, none is a child."""

    store: Store
    size: int
    settings: Training
    watches: tuple[asyncio.Task[None], ...] = ()
    """One for each child. It fails when the child has ended."""

    def join(self) -> RankGroup:
        """Joins the group as rank 0. Blocks. Raises DependencyError if a rank does not join."""
        own_gpu(self.settings.device, 0)
        device = pick_device(self.settings.device).type
        return RankGroup(
            self.store, 0, self.size, self.settings.rank_timeout_s, device, self._check
        )

    async def watch(self, work: Coroutine[Any, Any, None], torch_thread: Executor) -> None:
        """Does the work of rank 0, which calls torch in `torch_thread` alone.

        If a child ends before it, raises DependencyError, or UsageError if a restart would not
        help. If that thread then stays in a collective, it ends this process.
        """
        working = asyncio.create_task(work)
        try:
            await asyncio.wait({working, *self.watches}, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and isinstance(working.exception(), DependencyError) and self.watches:
                # A child that has ended is the reason.
                await asyncio.wait(
                    self.watches, timeout=NOTICE_S, return_when=asyncio.FIRST_COMPLETED
                )
            if not working.done() or isinstance(working.exception(), DependencyError):
                self._check()
            await working
        except HeadraceError as error:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            await _end_if_blocked(torch_thread, error)
            raise
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    def _check(self) -> None:
        for watch in self.watches:
            if watch.done() and not watch.cancelled() and (error := watch.exception()) is not None:
                raise error


@asynccontextmanager
async def started_ranks(settings: Training) -> AsyncIterator[StartedRanks]:
    """Starts the ranks above 0, unless `torchrun` has started them. Kills them in the end.

    Raises UsageError if this machine has too few GPUs.
    """
    outside = outside_rank()
    if outside is not None:
        store = await asyncio.to_thread(outside_store, settings.rank_timeout_s)
        yield StartedRanks(store, outside[1], settings)
        return
    check_gpus(settings.device, settings.processes)
    os.environ |= {k: v for k, v in loopback_variables().items() if k not in os.environ}
    store, port = serve_store()
    async with AsyncExitStack() as stack:
        watches = []
        for rank in range(1, settings.processes):
            command = (sys.executable, "-m", "headrace.trainer.ranks.rank_process", str(rank))
            arguments = (str(port), str(settings.processes), str(settings.rank_timeout_s))
            child = await ChildProcess.start((*command, *arguments, settings.device))
            stack.push_async_callback(child.aclose)
            watch = asyncio.create_task(_watch(rank, settings.processes, child))
            stack.push_async_callback(_cancel, watch)
            watches.append(watch)
        yield StartedRanks(store, settings.processes, settings, tuple(watches))


def outside_store(timeout_s: float) -> Store:
    """Returns the store at MASTER_ADDR and MASTER_PORT. Rank 0 serves it, or `torchrun` does.

    Blocks. Raises UsageError if the variables are wrong.
    """
    try:
        found = rendezvous("env://", timeout=timedelta(seconds=timeout_s))
        store: Store = next(found)[0]
        return store
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"the ranks can't meet at MASTER_ADDR and MASTER_PORT: {error}. Start the trainers "
            "with `torchrun`, or remove RANK and WORLD_SIZE from the environment"
        ) from error


async def _watch(rank: int, size: int, child: ChildProcess) -> None:
    while await child.receive() is not None:
        pass
    how = await child.describe_end()
    if how == f"exit code {UsageError.exit_code}":  # It would end in the same way again.
        raise UsageError(f"rank {rank} of {size} refused to go on. Its lines in this log say why")
    raise DependencyError(
        f"rank {rank} of {size} ended: {how}. All ranks end, and continue from the newest "
        "checkpoint"
    )


async def _end_if_blocked(torch_thread: Executor, error: HeadraceError) -> None:
    """Ends this process if its thread does not return from torch in time.

    NCCL notices the death of another rank only by its own time-out, and nothing else can end that
    wait. The guards of the other ranks kill them.
    """
    idle = asyncio.wrap_future(torch_thread.submit(int))
    done, _ = await asyncio.wait({idle}, timeout=BLOCKED_S)
    if not done:
        logger.critical("%s. Rank 0 waits for it in torch, so its process ends now", error)
        logging.shutdown()
        os._exit(error.exit_code)


async def _cancel(watch: asyncio.Task[None]) -> None:
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
