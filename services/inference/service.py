"""The inference worker: one process, the engines that its policies need, prompts in, answers out.

Policies of the same model and engine settings share an engine. The worker joins the consumer
group only once it serves, for every policy, a version that was newest when it began to load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.events import PolicyPublished
from headrace.schemas.recipe.policy import Policy
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import POLICIES, PROMPTS
from headrace.services.base.concurrency import until_first
from headrace.services.base.plugins import Loader, load
from headrace.services.inference.engine import Engine, EngineSetup
from headrace.services.inference.local_weights import LocalWeights, ScratchFolder
from headrace.services.inference.pinned import PinnedVersions
from headrace.services.inference.serving import ServedPolicy, Slots
from headrace.services.inference.shard import PromptShard
from headrace.services.inference.tokenizer import Tokenizer
from headrace.services.inference.weights_follower import WeightsFollower
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import EventLog
from headrace.services.log.event_reader import CaughtUp, EventReader
from headrace.services.log.positions import Start
from headrace.services.models.weights import model_folder
from headrace.services.worker.service_context import ServiceContext
from headrace.services.worker.shard import ShardContext
from headrace.services.worker.worker import Worker


def _torch() -> Any:
    from headrace.services.inference.engines.torch_engine import TorchEngine

    return TorchEngine


def _vllm() -> Any:
    from headrace.services.inference.engines.vllm_engine import VllmEngine

    return VllmEngine


def _scripted() -> Any:
    from headrace.services.inference.engines.scripted import ScriptedEngine

    return ScriptedEngine


BUILTIN: dict[str, Loader] = {
    "torch": _torch,
    "vllm": _vllm,
    "scripted": _scripted,
}


async def run(context: ServiceContext, policy: str | None = None) -> None:
    """Serves one policy, or all of the recipe, until `context.stopping` is set."""
    names = tuple(context.recipe.policies) if policy is None else (policy,)
    engines = await asyncio.to_thread(make_engines, context.recipe, names)
    slots = {id(engine): Slots(engine) for engine in engines.values()}
    served = {
        name: _served(context, name, engine, slots[id(engine)]) for name, engine in engines.items()
    }
    scratch = ScratchFolder(context.state / "weights")
    pinned = {
        name: _pinned(context, name, scratch.path)
        for name in names
        if context.recipe.policies[name].training is not None
    }
    try:
        await _serve(context, served, pinned, scratch.path)
    finally:
        for versions in pinned.values():
            await versions.close()
        scratch.remove()
        for engine in {id(engine): engine for engine in engines.values()}.values():
            await engine.close(drain_s=0)


def _served(context: ServiceContext, name: str, engine: Engine, slots: Slots) -> ServedPolicy:
    tokenizer = Tokenizer(model_folder(context.recipe.policies[name].model))
    return ServedPolicy(name, engine, slots, tokenizer, context.worker_id)


def _pinned(context: ServiceContext, name: str, scratch: Path) -> PinnedVersions:
    def make() -> ServedPolicy:
        engine = _make_engine([context.recipe.policies[name]])
        return _served(context, name, engine, Slots(engine))

    weights = LocalWeights(context.blobs, scratch / f"pinned-{name}")
    return PinnedVersions(name, make, partial(find_published, context.log), weights.weights)


async def find_published(log: EventLog, policy: str, version: int) -> PolicyPublished | None:
    """The publication of a version that counts: its last record. None where it has none."""
    reader = EventReader(log, {Partition(log.topics.name(POLICIES), 0): "first"})
    found = None
    try:
        async for item in reader:
            if isinstance(item, CaughtUp):
                break
            event = item.event
            if isinstance(event, PolicyPublished) and event.policy == policy:
                found = event if event.version == version else found
        return found
    finally:
        await reader.aclose()


def prepare(recipe: Recipe) -> None:
    """Imports what the recipe's engines need: seconds, for torch. `run` does so too, but later.

    UsageError where an engine can't be imported.
    """
    for policy in recipe.policies.values():
        load("engine", policy.engine.use, BUILTIN)


def make_engines(recipe: Recipe, names: Sequence[str]) -> dict[str, Engine]:
    """Each policy's engine. Blocks: it imports torch, and makes one engine for equal settings.

    UsageError where a policy is unknown, or its model or engine is none.
    """
    alike: dict[str, list[str]] = {}
    for name in names:
        if name not in recipe.policies:
            raise UsageError(f"no policy {name!r} in the recipe, but {sorted(recipe.policies)}")
        policy = recipe.policies[name]
        learns = "weights" if policy.lora is None else "an adapter"
        kind = f"{policy.model} {policy.dtype} {learns} {policy.engine.model_dump_json()}"
        alike.setdefault(kind, []).append(name)
    engines: dict[str, Engine] = {}
    for group in alike.values():
        engines |= dict.fromkeys(group, _make_engine([recipe.policies[name] for name in group]))
    return engines


def _make_engine(policies: Sequence[Policy]) -> Engine:
    """One for policies that differ in nothing that matters to it."""
    policy = policies[0]
    ranks = [one.lora.rank for one in policies if one.lora is not None]
    settings = policy.engine
    setup = EngineSetup(
        model=model_folder(policy.model),
        slots=settings.slots,
        threads=settings.threads,
        device=settings.device,
        dtype=policy.dtype,
        options=settings.options,
        adapters=len(ranks),
        rank=max(ranks, default=0),
    )
    engine: Engine = load("engine", settings.use, BUILTIN)(setup)
    return engine


async def _serve(
    context: ServiceContext,
    served: dict[str, ServedPolicy],
    pinned: dict[str, PinnedVersions],
    scratch: Path,
) -> None:
    """Follows the weights and answers prompts; what fails of the two, ends both."""
    topics = context.log.topics
    # One policy's newest version is at the end; of several, one may have been quiet for long.
    start: Start = "tail" if len(topics.policies) == 1 else "first"
    publications = EventReader(context.log, {Partition(topics.name(POLICIES), 0): start})
    follower = WeightsFollower(publications, context.blobs, served, scratch)

    def make_shard(shard: ShardContext) -> PromptShard:
        name = topics.by_name(shard.partition.topic).policy
        assert name is not None
        return PromptShard(shard, served[name], pinned.get(name))

    async def answer() -> None:
        await until_first(follower.ready.wait(), context.stopping.wait())
        if not follower.ready.is_set():
            return
        await Worker(
            context.log,
            topics=[topics.name(PROMPTS, name) for name in served],
            consumer_group=context.consumer_group("inference"),
            make_shard=make_shard,
            stopping=context.stopping,
        ).run()

    try:
        await until_first(follower.run(), answer())
    finally:
        await publications.aclose()
