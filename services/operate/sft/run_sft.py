"""Runs a fine-tuning: loads the model, learns, can be interrupted, and writes the model folder."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from headrace.errors import Interrupted, UsageError
from headrace.services.models.weights import model_folder
from headrace.services.operate.export.model_export import beside
from headrace.services.operate.sft.fine_tuning import FineTuning, SftProgress
from headrace.services.operate.sft.sft_checkpoints import drop_checkpoints, find_checkpoint
from headrace.services.operate.sft.sft_job import SftJob, SftTarget
from headrace.services.operate.sft.sft_model import write_model
from headrace.services.operate.sft.sft_view import SftStatus, SftView
from headrace.trainer.checkpoint import Checkpoints
from headrace.trainer.loop import FINISH_S
from headrace.trainer.ranks.rank_group import outside_rank
from headrace.trainer.ranks.with_learner import AnyLearner, with_learner

REFRESH_S = 0.5
T = TypeVar("T")


async def run_sft(
    job: SftJob, target: SftTarget, facts: Mapping[str, Any], view: SftView, status: SftStatus
) -> dict[str, Any]:
    """Learns, and writes the model folder. Returns what its `headrace.json` says.

    `facts` is where the data comes from. Raises Interrupted after SIGINT or SIGTERM: the same call
    then continues from a checkpoint. Raises UsageError if the checkpoints are of something else.
    """
    training = job.policy.training
    assert training is not None, "a job has its training"
    if outside_rank() is not None:
        raise UsageError(
            "`headrace sft` starts its processes itself: set training.processes, and start it "
            "without `torchrun`"
        )
    checkpoints = Checkpoints(target.checkpoints, training.keep_checkpoints)
    found = await asyncio.to_thread(find_checkpoint, checkpoints, target.checkpoints, job)
    await asyncio.to_thread(checkpoints.remove_partial)
    progress = SftProgress(len(job.plan.updates), job.plan.epoch_ends)
    written: list[dict[str, Any]] = []

    async def work(learner: AnyLearner, thread: ThreadPoolExecutor) -> None:
        def call(task: Callable[[], T]) -> asyncio.Future[T]:
            return asyncio.get_running_loop().run_in_executor(thread, task)

        tuning = FineTuning(learner, job.sequences, job.plan, checkpoints, job.digest, progress)
        if found is not None:
            await call(partial(tuning.resume, *found))
            view.say(f"continues after update {progress.done} of {progress.updates}")
        status.begin(progress)
        if await call(partial(tuning.run, stopping, cut, view.say)):
            status.phase = "writing the model"
            told = {**facts, **progress.facts()}
            with beside(target.folder) as temporary:
                weights = temporary / "weights"
                await call(partial(learner.write_weights, weights))
                made = await asyncio.to_thread(
                    write_model, job, weights, learner.base, progress.done, told, target
                )
            written.append(made)

    async with _signals(view) as (stopping, cut), _refreshing(view):
        await with_learner(
            model_folder(job.policy.model, weights=True), job.policy, training.processes, work
        )
    if not written:
        raise Interrupted(
            f"stopped after update {progress.done} of {progress.updates}. The checkpoint is in "
            f"{target.checkpoints}: the same command continues from it"
        )
    drop_checkpoints(target.checkpoints)
    return written[0]


@asynccontextmanager
async def _signals(view: SftView) -> AsyncIterator[tuple[threading.Event, threading.Event]]:
    """Yields an event for the wish to stop, and one for the wish to stop within an update.

    The second one follows the first after FINISH_S, or at once if the signal comes again.
    """
    stopping, cut = threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stopping.is_set():
            cut.set()
            return
        view.say("stopping: this update is finished first, and a checkpoint is written")
        stopping.set()
        loop.call_later(FINISH_S, cut.set)

    signals = (signal.SIGINT, signal.SIGTERM)
    for one in signals:
        loop.add_signal_handler(one, on_signal)
    try:
        yield stopping, cut
    finally:
        for one in signals:
            loop.remove_signal_handler(one)


@asynccontextmanager
async def _refreshing(view: SftView) -> AsyncIterator[None]:
    """Opens the view, refreshes it now and then, and closes it in the end."""

    async def refresh() -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            view.refresh()

    view.open()
    task = asyncio.create_task(refresh())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        view.close()
