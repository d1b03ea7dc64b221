"""Runs the trainer of one policy as a service.

It first fences its predecessor. Only then is what it reads of the policy's publications complete.
If several processes train together, only rank 0 does that: the others know no log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from headrace.errors import UsageError
from headrace.schemas.recipe.learning.lora_settings import check_processes
from headrace.schemas.recipe.policy import Policy, Training
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.models.torch_models import DTYPES
from headrace.services.models.weights import model_folder
from headrace.services.worker.service_context import ServiceContext
from headrace.trainer.contract.training_session import CHECK_S
from headrace.trainer.loop import Trainer
from headrace.trainer.model_loading import import_model, load_policy, trained_weights
from headrace.trainer.publish import Publisher, sole_publisher
from headrace.trainer.ranks.rank_group import outside_rank
from headrace.trainer.ranks.rank_process import follow_rank_0
from headrace.trainer.ranks.rank_processes import outside_store
from headrace.trainer.ranks.with_learner import AnyLearner, with_learner
from headrace.trainer.sequences import Stopped


async def run(
    context: ServiceContext, policy: str | None = None, skipped: Collection[int] = ()
) -> None:
    """Trains `policy` until `context.stopping`. None means the recipe's only policy.

    `skipped` are versions whose batches are not trained on, because a recorded run that is trained
    again skipped them. Raises Fenced if another trainer has started, and DependencyError if the log
    or the blob store is out of reach.
    """
    name = _policy_name(context, policy)
    settings = context.recipe.policies[name]
    if settings.training is not None and settings.training.external:
        raise UsageError(
            f"policies.{name}.training.external says that another trainer trains this policy: "
            "start that one, or remove the key for a new run"
        )
    folder = model_folder(settings.model, weights=True)
    rank, size = _place(settings)
    if rank > 0 and settings.training is not None:
        await _follow(context, settings.training, rank, size)
        return
    async with sole_publisher(context, name) as publisher:
        publisher.history.skipped.update(skipped)
        if settings.training is None:
            await _serve_untrained(context, publisher, settings)
            return

        async def work(learner: AnyLearner, torch_thread: ThreadPoolExecutor) -> None:
            based = await asyncio.to_thread(publisher.with_base, learner.base, settings.lora)
            await Trainer(context, based, learner, torch_thread).run()

        await with_learner(folder, settings, size, work)


def _place(settings: Policy) -> tuple[int, int]:
    """Returns the rank of this process, and how many train the policy together.

    Raises UsageError if several were started from outside, and the policy can't use them.
    """
    outside = outside_rank()
    if settings.training is None or outside is None:
        return 0, 1 if settings.training is None else settings.training.processes
    try:
        check_processes(settings.lora, outside[1], settings.training.device)
    except ValueError as error:
        raise UsageError(f"{error}. WORLD_SIZE is {outside[1]}") from error
    return outside


async def _follow(context: ServiceContext, settings: Training, rank: int, size: int) -> None:
    """Trains as a rank above 0 that `torchrun` has started. Raises what `follow_rank_0` raises."""

    def check() -> None:
        if context.stopping.is_set():
            raise Stopped("the process is to stop")

    def work() -> None:
        store = outside_store(settings.rank_timeout_s)
        follow_rank_0(store, rank, size, settings.rank_timeout_s, settings.device, check)

    with suppress(Stopped):
        await asyncio.to_thread(work)


def prepare(recipe: Recipe) -> None:
    """Imports the code of the recipe's models, which takes seconds, before `run` needs it.

    Downloads models of the Hugging Face Hub. Raises UsageError if a model has no folder.
    """
    for policy in recipe.policies.values():
        import_model(model_folder(policy.model, weights=True))


def _policy_name(context: ServiceContext, policy: str | None) -> str:
    policies = context.recipe.policies
    if policy is None and len(policies) == 1:
        return next(iter(policies))
    if policy is None or policy not in policies:
        raise UsageError(
            f"a trainer trains one policy, but --policy is {policy}: name one of "
            f"{', '.join(policies)}"
        )
    return policy


async def _serve_untrained(context: ServiceContext, publisher: Publisher, settings: Policy) -> None:
    """Publishes version 0, the only one, and keeps its weights in the blob store."""
    folder = model_folder(settings.model, weights=True)
    model, base = await asyncio.to_thread(load_policy, folder, settings)
    weights = await asyncio.to_thread(trained_weights, model, DTYPES[settings.dtype])
    publisher = await asyncio.to_thread(publisher.with_base, base, settings.lora)
    if publisher.history.newest is None:
        await publisher.publish(0, "initial", weights)
    else:
        await publisher.resume(publisher.history.newest, weights)
    while True:
        try:
            async with asyncio.timeout(CHECK_S):
                await context.stopping.wait()
            return
        except TimeoutError:
            await publisher.repair(0)
