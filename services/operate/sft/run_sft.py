"""Runs a fine-tuning: loads the model, learns, can be interrupted, and writes the model folder."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from headrace.errors import Interrupted, UsageError
from headrace.services.models.weights import model_folder
from headrace.services.operate.export.model_export import beside
from headrace.services.operate.sft.fine_tuning import FineTuning, SftProgress
from headrace.services.operate.sft.sft_checkpoints import drop_checkpoints, find_checkpoint
from headrace.services.operate.sft.sft_job import SftJob, SftTarget
from headrace.services.operate.sft.sft_model import write_model
from headrace.services.operate.sft.sft_stop import stop_on_signals
from headrace.services.operate.sft.sft_view import SftStatus, SftView
from headrace.trainer.checkpoint import Checkpoints
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
    unfinished: list[Path] = []

    async def work(learner: AnyLearner, thread: ThreadPoolExecutor) -> None:
        def call(task: Callable[[], T]) -> asyncio.Future[T]:
            return asyncio.get_running_loop().run_in_executor(thread, task)

        tuning = FineTuning(learner, job.sequences, job.plan, checkpoints, job.digest, progress)
        if found is not None:
            await call(partial(tuning.resume, *found))
            view.say(f"continues after update {progress.done} of {progress.updates}")
        status.begin(progress)
        if await call(partial(tuning.run, stop, view.say)):
            status.phase = "writing the model"
            told = {**facts, **progress.facts()}
            with beside(target.folder) as temporary:
                unfinished.append(temporary)
                weights = temporary / "weights"
                await call(partial(learner.write_weights, weights))
                made = await asyncio.to_thread(
                    write_model, job, weights, learner.base, progress.done, told, target
                )
            written.append(made)

    clean = partial(_clean, view, unfinished)
    async with stop_on_signals(view.say, clean) as stop, _refreshing(view):
        await with_learner(
            model_folder(job.policy.model, weights=True), job.policy, training.processes, work
        )
    if not written:
        raise Interrupted(
            f"stopped after update {progress.done} of {progress.updates}. "
            + _continuation(progress, target)
        )
    drop_checkpoints(target.checkpoints)
    return written[0]


def _clean(view: SftView, unfinished: Sequence[Path]) -> None:
    view.close()
    for folder in unfinished:
        shutil.rmtree(folder, ignore_errors=True)


def _continuation(progress: SftProgress, target: SftTarget) -> str:
    """Says where the same command goes on after an interruption."""
    if progress.saved is None:
        return "No checkpoint was written: the same command begins from the start"
    after = "it" if progress.saved == progress.done else f"it, after update {progress.saved}"
    return f"The checkpoint is in {target.checkpoints}: the same command continues from {after}"


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
