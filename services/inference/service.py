"""The inference worker: one process that answers prompts with the engines of its policies.

Policies with the same model and engine settings share an engine. The worker joins the consumer
group once every policy serves a version that was the newest when its load began.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path

from headrace.errors import InfrastructureError, UsageError
from headrace.schemas import packed
from headrace.schemas.events import PolicyPublished, PoolLoad
from headrace.schemas.recipe.policy import Policy
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.resources.engine_settings import OPENAI
from headrace.schemas.topics import POLICIES, PROMPTS, Topics
from headrace.services.base.concurrency import until_first
from headrace.services.base.plugins import load
from headrace.services.base.reveal import reveal
from headrace.services.inference.drain import Drain
from headrace.services.inference.engine import Engine, EngineSetup, FailingEngine
from headrace.services.inference.engine_slots import Slots
from headrace.services.inference.local_weights import LocalWeights, scratch_folder
from headrace.services.inference.pinned import PinnedVersions
from headrace.services.inference.serving import ServedPolicy
from headrace.services.inference.shard import PromptShard
from headrace.services.inference.tokenizer import Tokenizer
from headrace.services.inference.weights_follower import WeightsFollower
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import WHOLE, Start, Tail, follow_events, read_events
from headrace.services.models.weights import model_folder
from headrace.services.tasks.teachers import teacher_of
from headrace.services.worker.limits.limits_of import call_limits
from headrace.services.worker.limits.shared_limits import Permits, SharedLimits
from headrace.services.worker.load_reports import LoadReports
from headrace.services.worker.service_context import ServiceContext
from headrace.services.worker.shard import ShardContext
from headrace.services.worker.worker import Worker

BUILTIN = {
    "torch": "headrace.services.inference.engines.torch_engine:TorchEngine",
    "vllm": "headrace.services.inference.engines.vllm_engine:VllmEngine",
    "openai": "headrace.services.inference.engines.openai.openai_engine:OpenaiEngine",
    "scripted": "headrace.services.inference.engines.scripted:ScriptedEngine",
}


async def run(context: ServiceContext, policy: str | None = None) -> None:
    """Serves one policy, or all policies of the recipe, until `context.stopping` is set."""
    names = tuple(context.recipe.policies) if policy is None else (policy,)
    engines = await asyncio.to_thread(make_engines, context.recipe, names)
    by_policy = {name: call_limits(context.recipe, name) for name in names}
    limits = {limit: value for own in by_policy.values() for limit, value in own.items()}
    shared = SharedLimits(context.worker_id, limits)
    permits = {name: shared.permits(own) for name, own in by_policy.items() if own}
    served: dict[str, ServedPolicy] = {}
    for engine, sharing in engines:
        slots = Slots(engine)
        for name in sharing:
            served[name] = _served(context, name, engine, slots, permits.get(name))
    with scratch_folder(context.state / "weights") as scratch:
        pinned = {
            name: _pinned(context, name, scratch, permits.get(name))
            for name in names
            if context.recipe.policies[name].training is not None
        }
        try:
            await until_first(
                shared.run(context.log),
                _serve(context, served, pinned, scratch, shared),
                *(engine.failed() for engine, _ in engines if isinstance(engine, FailingEngine)),
                *(versions.failed() for versions in pinned.values()),
            )
        finally:
            for versions in pinned.values():
                await versions.close()
            for engine, _ in engines:
                await engine.close(drain_s=0)


def measure_load(
    recipe: Recipe, topics: Topics, served: Iterable[ServedPolicy], worker: Worker
) -> list[PoolLoad]:
    """Returns what the worker can do for each policy now, and what waits for it."""
    loads = []
    for policy in served:
        topic = topics.name(PROMPTS, policy.name)
        slots = int(min(recipe.policies[policy.name].engine.slots, policy.share()))
        policy.metrics.slots.set(slots)
        loads.append(
            PoolLoad(
                policy=policy.name,
                partitions=packed.pack_i32(worker.numbers(topic)),
                slots=slots,
                busy=policy.slots.busy,
                waiting=policy.slots.waiting + policy.behind + worker.unhandled(topic),
                run_ms=int(1000 * policy.run_s),
                version=policy.version,
            )
        )
    return loads


def count_waiting(topics: Topics, served: Iterable[ServedPolicy], worker: Worker) -> dict[str, int]:
    """Returns how many calls wait for each limit."""
    waiting: dict[str, int] = {}
    for policy in served:
        if policy.permits is not None:
            unhandled = worker.unhandled(topics.name(PROMPTS, policy.name))
            count = policy.permits.waiting + policy.behind + unhandled
            waiting |= dict.fromkeys(policy.permits.limits, count)
    return waiting


def _served(
    context: ServiceContext, name: str, engine: Engine, slots: Slots, permits: Permits | None
) -> ServedPolicy:
    policy = context.recipe.policies[name]
    tokenizer = Tokenizer(model_folder(policy.model), policy.chat_template_kwargs)
    return ServedPolicy(name, engine, slots, tokenizer, context.worker_id, permits)


def _pinned(
    context: ServiceContext, name: str, scratch: Path, permits: Permits | None
) -> PinnedVersions:
    def make() -> ServedPolicy:
        if context.recipe.policies[name].engine.use == OPENAI:
            raise InfrastructureError(
                "no_pinned_version",
                f"the server of policy {name!r} serves its newest version alone: use torch or vllm "
                "for roles and evaluations that are pinned to a version",
                retryable=False,
            )
        engine = _make_engine([context.recipe.policies[name]])
        return _served(context, name, engine, Slots(engine), permits)

    weights = LocalWeights(context.blobs, scratch / f"pinned-{name}")
    return PinnedVersions(name, make, partial(find_published, context.log), weights.weights)


async def find_published(log: EventLog, policy: str, version: int) -> PolicyPublished | None:
    """Returns the last publication of a version, which is the valid one. None if there is none."""
    found = None
    async with aclosing(read_events(log, {log.topics.partition(POLICIES): WHOLE})) as deliveries:
        async for delivery in deliveries:
            event = delivery.event
            if isinstance(event, PolicyPublished) and event.policy == policy:
                found = event if event.version == version else found
    return found


def prepare(recipe: Recipe) -> None:
    """Imports the recipe's engines, so that `run` starts faster. torch takes seconds.

    Raises UsageError if an engine can't be imported, or is that of a teacher and can't score.
    """
    engines = {
        name: load("engine", policy.engine.use, BUILTIN) for name, policy in recipe.policies.items()
    }
    for name in set(filter(None, map(teacher_of, recipe.policies.values()))):
        if not hasattr(engines[name], "score"):
            raise UsageError(
                f"policies.{name}.engine: {engines[name].__name__} has no method `score`, so it "
                "can't serve a teacher. Add the method, or use the engine `torch` or `vllm`"
            )


def make_engines(recipe: Recipe, names: Sequence[str]) -> list[tuple[Engine, list[str]]]:
    """Makes the engines of policies, each with the names of the policies that share it. Blocks.

    Raises UsageError if a policy is unknown, or if its model or engine can't be used.
    """
    alike: dict[str, list[str]] = {}
    for name in names:
        if name not in recipe.policies:
            raise UsageError(f"no policy {name!r} in the recipe: use {sorted(recipe.policies)}")
        policy = recipe.policies[name]
        trains = "weights" if policy.lora is None else "an adapter"
        kind = f"{policy.model} {policy.dtype} {trains} {policy.engine.model_dump_json()}"
        alike.setdefault(kind, []).append(name)
    return [
        (_make_engine([recipe.policies[name] for name in sharing]), sharing)
        for sharing in alike.values()
    ]


def _make_engine(policies: Sequence[Policy]) -> Engine:
    """Makes one engine for policies with equal engine settings."""
    policy = policies[0]
    ranks = [one.lora.rank for one in policies if one.lora is not None]
    settings = policy.engine
    setup = EngineSetup(
        model=model_folder(policy.model),
        slots=settings.slots,
        threads=settings.threads,
        device=settings.device,
        dtype=policy.dtype,
        options=reveal(settings.options, "engine.options"),
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
    shared: SharedLimits,
) -> None:
    """Follows the weights and answers prompts. If one of the two fails, both end."""
    topics = context.log.topics
    # With one policy its newest version is at the end. With several it may be far from the end.
    # Among signed ones, only a reader of all records finds those that repeat an earlier one.
    start: Start = Tail() if len(topics.policies) == 1 and not topics.signers else "first"
    publications = follow_events(context.log, {topics.partition(POLICIES): start})
    follower = WeightsFollower(publications, context.blobs, served, scratch)
    try:
        await until_first(follower.run(), _answer(context, served, pinned, shared, follower.ready))
    finally:
        await publications.aclose()


async def _answer(
    context: ServiceContext,
    served: dict[str, ServedPolicy],
    pinned: dict[str, PinnedVersions],
    shared: SharedLimits,
    has_weights: asyncio.Event,
) -> None:
    """Answers prompts, as soon as all policies have weights. Ends if the worker has drained."""
    await until_first(has_weights.wait(), context.stopping.wait(), context.draining.wait())
    if not has_weights.is_set():
        return
    context.ready.set()
    topics = context.log.topics
    drain = Drain(context.log, context.worker_id, context.draining)
    leaving = asyncio.Event()

    def make_shard(shard: ShardContext) -> PromptShard:
        name = topics.by_name(shard.partition.topic).policy
        assert name is not None
        return PromptShard(shard, served[name], pinned.get(name), drain)

    worker = Worker(
        context.log,
        topics=[topics.name(PROMPTS, name) for name in served],
        consumer_group=context.consumer_group("inference"),
        make_shard=make_shard,
        stopping=leaving,
        changed=lambda: reports.soon(),
    )
    measure = partial(measure_load, context.recipe, topics, served.values(), worker)
    waiting = partial(count_waiting, topics, served.values(), worker)
    reports = LoadReports(context.log.send, context.worker_id, measure, shared, waiting)
    shared.report_soon = reports.soon

    def begin_drain() -> None:
        reports.soon()
        for one in served.values():
            one.slots.notify()

    async def leave() -> None:
        drained = drain.run(begin_drain, worker.open_records)
        await until_first(drained, context.stopping.wait())
        leaving.set()
        await asyncio.Event().wait()

    await until_first(worker.run(), reports.run(leaving, context.draining), leave())
