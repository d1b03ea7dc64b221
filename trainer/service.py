"""The trainer of one policy as a service: takes over as the sole writer, then trains.

Being the sole writer comes first: only then is what it reads of its own publications complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from headrace.errors import UsageError
from headrace.schemas.recipe.policy import Policy
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.models.lora import adapter_tensors
from headrace.services.models.weights import model_folder
from headrace.services.worker.service_context import ServiceContext
from headrace.trainer.learner import Learner
from headrace.trainer.loop import Trainer
from headrace.trainer.model_loading import (
    DTYPES,
    Base,
    add_adapter,
    import_model,
    load_model,
    weights_file,
)
from headrace.trainer.publish import CHECK_S, History, Publisher, sole_publisher


async def run(
    context: ServiceContext, policy: str | None = None, skipped: Collection[int] = ()
) -> None:
    """Trains `policy` until `context.stopping`; None is the recipe's only one.

    `skipped` are versions whose batches are not trained on whatever they hold, since a recorded
    run that is trained again skipped them.

    Fenced where another trainer has taken over. DependencyError where the log or the blob store
    is out of reach.
    """
    name = _only(context, policy)
    settings = context.recipe.policies[name]
    folder = model_folder(settings.model, weights=True)
    async with sole_publisher(context, name) as (publisher, history):
        history.skipped.update(skipped)
        if settings.training is not None:
            # One thread for all of torch: the loop stays alive, and nothing runs in parallel.
            with ThreadPoolExecutor(1, thread_name_prefix="torch") as torch_thread:
                loop = asyncio.get_running_loop()
                learner = await loop.run_in_executor(torch_thread, Learner, folder, settings)
                publisher = await _on_base(publisher, learner.base, settings, history)
                await Trainer(context, publisher, history, learner, torch_thread).run()
            return
        await _serve_untrained(context, publisher, history, settings)


def prepare(recipe: Recipe) -> None:
    """Imports what the recipe's models need: seconds. `run` does so too, but later.

    Fetches those of the Hugging Face Hub. UsageError where a model has no folder.
    """
    for policy in recipe.policies.values():
        import_model(model_folder(policy.model, weights=True))


def _only(context: ServiceContext, policy: str | None) -> str:
    policies = context.recipe.policies
    if policy is None and len(policies) == 1:
        return next(iter(policies))
    if policy is None or policy not in policies:
        raise UsageError(
            f"a trainer serves one policy, not {policy}: name one of {', '.join(policies)}"
        )
    return policy


async def _on_base(
    publisher: Publisher, base: Base | None, settings: Policy, history: History
) -> Publisher:
    if base is None or settings.lora is None:
        return publisher
    return await asyncio.to_thread(publisher.on_base, base, settings.lora, history)


async def _serve_untrained(
    context: ServiceContext, publisher: Publisher, history: History, settings: Policy
) -> None:
    """Publishes version 0, once and for all, and keeps its weights in the store."""
    weights, base = await asyncio.to_thread(_initial_weights, settings)
    publisher = await _on_base(publisher, base, settings, history)
    if history.newest is None:
        await publisher.publish(0, "initial", weights)
    else:
        await publisher.go_on(history.newest, weights)
    while True:
        try:
            async with asyncio.timeout(CHECK_S):
                await context.stopping.wait()
            return
        except TimeoutError:
            await publisher.mend(0)


def _initial_weights(settings: Policy) -> tuple[bytes, Base | None]:
    """Version 0's, and what they are an adapter of, if they are one."""
    folder, dtype = model_folder(settings.model, weights=True), DTYPES[settings.dtype]
    model = load_model(folder, settings.seed)
    if settings.lora is None:
        return weights_file(model.state_dict(), dtype), None
    base = add_adapter(model, folder, settings.lora, settings.seed, dtype)
    return weights_file(adapter_tensors(model), dtype), base
