"""Answers the prompts of an episode that is tried: a person, chance, or the model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

from headrace.errors import UsageError
from headrace.schemas.events import GenerationCompleted, GenerationRequested
from headrace.schemas.recipe.policy import Policy
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.base.concurrency import in_daemon_thread
from headrace.services.inference.engine import Engine, EngineSetup, Weights
from headrace.services.inference.engine_slots import Slots
from headrace.services.inference.engines.scripted import ScriptedEngine
from headrace.services.inference.service import make_engines
from headrace.services.inference.serving import ServedPolicy
from headrace.services.inference.tokenizer import Tokenizer
from headrace.services.models.weights import model_folder
from headrace.services.operate.options import say

Player = Callable[[GenerationRequested], Awaitable[GenerationCompleted | None]]
"""Answers a prompt. None means that it does not answer any more: the episode is cancelled."""


async def open_player(recipe: Recipe, by: str, scratch: str) -> Player:
    """Returns the player `hand`, `random` or `model`. Raises UsageError if it can't play."""
    if by == "random":
        _require_allowed(recipe)
    if by == "model":
        served = await _with_models(recipe, Path(scratch))
        return lambda request: _complete(served, request)
    served = _without_models(recipe)
    texts = _chosen(recipe) if by == "random" else _entered
    return lambda request: _dictated(served, request, texts)


def scripted_player(recipe: Recipe, answer: Callable[[str], str]) -> Player:
    """Returns a player that answers with a function from a prompt's new text to the answer.

    The player raises UsageError if the policy can't give an answer of the function.
    """
    served = _without_models(recipe)

    async def choose(request: GenerationRequested) -> str:
        return answer(request.chat or request.text)

    return lambda request: _dictated(served, request, choose, _refuse)


def _without_models(recipe: Recipe) -> dict[str, ServedPolicy]:
    """Serves every policy with answers that it is given."""
    return {
        name: _serve(policy, name, _without_weights(policy))
        for name, policy in recipe.policies.items()
    }


async def _with_models(recipe: Recipe, scratch: Path) -> dict[str, ServedPolicy]:
    """Loads the model of every policy as it is before training, and serves it."""
    served = {}
    for name, policy in recipe.policies.items():
        opened, weights = await asyncio.to_thread(_open, name, policy, scratch)
        changed = recipe.model_copy(update={"policies": {name: opened}})
        [(engine, _)] = await asyncio.to_thread(make_engines, changed, [name])
        await engine.load(weights)
        served[name] = _serve(policy, name, engine)
    return served


async def _complete(
    served: dict[str, ServedPolicy], request: GenerationRequested
) -> GenerationCompleted | None:
    policy = served[request.policy]
    slot = await policy.slots.take()
    try:
        return await policy.complete(request, slot, queue_s=0.0)
    finally:
        slot.free()


async def _dictated(
    served: dict[str, ServedPolicy],
    request: GenerationRequested,
    texts: Callable[[GenerationRequested], Awaitable[str | None]],
    on_impossible: Callable[[str], None] = say,
) -> GenerationCompleted | None:
    """Answers with a text, as agents demonstrate, until one is possible."""
    while request.demonstration is None:
        text = await texts(request)
        if text is None:
            return None
        answer = await _complete(served, request.model_copy(update={"demonstration": text}))
        if answer is None or answer.failure is None or answer.failure.code != "bad_tokens":
            return answer
        on_impossible(f"the policy can't answer this: {answer.failure.message}")
    return await _complete(served, request)


def _refuse(message: str) -> None:
    raise UsageError(message)


async def _entered(request: GenerationRequested) -> str | None:
    """Returns a line that was entered, or None at the end of the input.

    Raises UsageError if it is not UTF-8.
    """
    try:
        text = await asyncio.wrap_future(in_daemon_thread(lambda: input("> "), "input"))
        text.encode()  # in some locales, a byte that is not UTF-8 becomes a surrogate
        return text
    except EOFError:
        return None
    except UnicodeError:
        raise UsageError("the input is not UTF-8 text: convert it, and enter it again") from None


def _chosen(recipe: Recipe) -> Callable[[GenerationRequested], Awaitable[str | None]]:
    async def choose(request: GenerationRequested) -> str | None:
        return random.choice(recipe.policies[request.policy].sampling.allowed)

    return choose


def _require_allowed(recipe: Recipe) -> None:
    for name in recipe.tasks.roles.values():
        if not recipe.policies[name].sampling.allowed:
            raise UsageError(
                f"--by random chooses from policies.{name}.sampling.allowed, which is empty: use "
                "--by hand or --by model"
            )


def _serve(policy: Policy, name: str, engine: Engine) -> ServedPolicy:
    tokenizer = Tokenizer(model_folder(policy.model), policy.chat_template_kwargs)
    return ServedPolicy(name, engine, Slots(engine), tokenizer, "try")


def _without_weights(policy: Policy) -> Engine:
    """Returns an engine that only knows how long the model's context is."""
    return ScriptedEngine(EngineSetup(model_folder(policy.model), slots=1, threads=1))


def _open(name: str, policy: Policy, scratch: Path) -> tuple[Policy, Weights]:
    """Returns a policy without its adapter, and the weights before its training. Blocks."""
    # It imports torch, which takes seconds: only a model needs it.
    from headrace.services.operate.chat.terminal_chat import model_of_folder

    folder = model_folder(policy.model, weights=True)
    if any(folder.glob("*.safetensors")):
        model = model_of_folder(folder, scratch)
        changes = {"lora": None, "dtype": model.dtype}
        return policy.model_copy(update=changes), Weights(name, 0, model.weights.path)
    from headrace.trainer.model_loading import initial_weights

    path = scratch / f"{name}.safetensors"
    path.write_bytes(initial_weights(folder, policy))
    return policy.model_copy(update={"lora": None}), Weights(name, 0, path)
