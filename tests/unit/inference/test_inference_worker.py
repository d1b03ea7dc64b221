"""A whole inference worker on a log in memory: weights and prompts in, answers and commits out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import HeadraceError
from headrace.schemas import packed
from headrace.schemas.codec import Codec
from headrace.schemas.events import (
    EVENTS,
    GenerationCompleted,
    GenerationRequested,
    LoadReported,
    PolicyPublished,
    Sampling,
)
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.schemas.topics import GENERATIONS, LOADS, PROMPTS, Topics
from headrace.services.inference import service
from headrace.services.inference.engine import EngineSetup, Weights
from headrace.services.inference.engines.scripted import ScriptedEngine
from headrace.services.kafka.broker import Outgoing, Partition
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import follow_events
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.models.weights import weights_digest
from headrace.services.worker.service_context import ServiceContext
from tests.memory.memory_broker import MemoryBroker
from tests.memory.memory_registry import MemoryRegistry

POLICIES = ("left", "right")
PARTITIONS = 2
GROUP = "test.inference"


@dataclass(frozen=True)
class Running:
    """An inference worker that runs."""

    context: ServiceContext
    task: asyncio.Task[None]

    async def drain(self) -> None:
        """Asks it to drain, and waits until it has ended."""
        self.context.draining.set()
        await asyncio.wait_for(self.task, 15)


class Scene:
    """A namespace in memory."""

    def __init__(self, folder: Path) -> None:
        codec = Codec()
        for schema_id, event_type in enumerate(EVENTS, 1):
            codec.register(event_type, schema_id)
        self.folder = folder
        self.blobs = LocalBlobStore(folder / "blobs")
        self.broker = MemoryBroker()
        topics = Topics("test", POLICIES, PARTITIONS, pool_partitions=PARTITIONS)
        self.log = EventLog(self.broker, topics, codec, MemoryRegistry(), "test")

    async def apply(self) -> None:
        await self.broker.create_topics(
            {topic.name: (topic.partitions, {}) for topic in self.log.topics}
        )
        await self.broker.commit_first(GROUP, self.prompts())

    def prompts(self) -> list[Partition]:
        names = [self.log.topics.name(PROMPTS, policy) for policy in POLICIES]
        return [Partition(name, number) for name in names for number in range(PARTITIONS)]

    async def publish(self, policy: str, version: int) -> None:
        content = (2).to_bytes(8, "little") + b"{}"
        await self.log.send(
            PolicyPublished(
                policy=policy,
                version=version,
                status="trained",
                digest=weights_digest(content),
                full=self.blobs.put(content),
                full_version=version,
            )
        )

    async def ask(self, policy: str, task: int, **fields: Any) -> None:
        request = GenerationRequested(
            task=task,
            sample=0,
            call="0",
            policy=policy,
            text="go",
            sampling=Sampling(max_tokens=2),
            expires_at=int(time.time() * 1000) + 60_000,
            digest=b"d" * 16,
        )
        await self.log.send(request.model_copy(update=fields))

    async def answers(self, count: int) -> list[GenerationCompleted]:
        """The first so many answers, by task."""
        name = self.log.topics.name(GENERATIONS)
        reader = follow_events(self.log, {Partition(name, n): 0 for n in range(PARTITIONS)})
        found: list[GenerationCompleted] = []
        async for item in reader:
            if isinstance(item, Delivery) and isinstance(item.event, GenerationCompleted):
                found.append(item.event)
                if len(found) == count:
                    break
        await reader.aclose()
        return sorted(found, key=lambda answer: answer.task)

    async def answer_of(self, worker: str) -> None:
        """Waits until a worker has answered."""
        count = 1
        while all(one.worker != worker for one in await self.answers(count)):
            count += 1

    async def answered(self) -> int:
        """How many answers there are."""
        name = self.log.topics.name(GENERATIONS)
        ends = await self.broker.ends([Partition(name, n) for n in range(PARTITIONS)])
        return sum(end for _, end in ends.values())

    async def done(self) -> bool:
        """Whether the group has committed every prompt."""
        ends = await self.broker.ends(self.prompts())
        committed = await self.broker.committed(GROUP, self.prompts())
        return all(committed[at].offset == end for at, (_, end) in ends.items())

    @asynccontextmanager
    async def worker(
        self,
        name: str = "worker",
        policy: str | None = None,
        use: str = "scripted",
        **options: Any,
    ) -> AsyncIterator[Running]:
        """An inference worker, stopped at the end."""
        engine = {"use": use, "slots": 4, "options": {"text": "ab"} | options}
        recipe = parse_recipe(
            {
                "name": "test",
                "partitions": PARTITIONS,
                "tasks": {"roles": {"policy": "left"}},
                "policies": {name: {"model": "tiny-llama", "engine": engine} for name in POLICIES},
            },
            "the test",
        )
        stopping = asyncio.Event()
        context = ServiceContext(
            self.log, recipe, self.blobs, name, self.folder / name, stopping, asyncio.Event()
        )
        running = asyncio.create_task(service.run(context, policy))
        try:
            yield Running(context, running)
        finally:
            stopping.set()
            await asyncio.wait_for(running, 10)


def drive(folder: Path, play: Callable[[Scene], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        scene = Scene(folder)
        await scene.apply()
        await play(scene)
        await scene.broker.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_it_joins_with_every_policy_and_follows_the_newest(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        for task in range(4):
            await scene.ask("left", task)
        async with scene.worker():
            await scene.publish("left", 0)
            await asyncio.sleep(0.1)
            assert await scene.answered() == 0
            await scene.publish("right", 5)
            first = await scene.answers(4)
            assert [answer.task for answer in first] == [0, 1, 2, 3]
            assert {answer.text for answer in first} == {"ab"}
            assert {packed.oldest(answer.versions) for answer in first} == {0}
            await scene.publish("right", 6)
            task = 4
            while True:  # the next version is served soon, without a gap in the answers
                await scene.ask("right", task)
                last = (await scene.answers(task + 1))[-1]
                assert last.policy == "right"
                if packed.oldest(last.versions) == 6:
                    break
                task += 1
        assert await scene.done()

    drive(tmp_path, play)


def test_what_cannot_be_read_or_answered_does_not_stop_it(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        for policy in POLICIES:
            await scene.publish(policy, 0)
        name = scene.log.topics.name(PROMPTS, "left")
        await scene.broker.send(Outgoing(name, b"0", b"no event"))
        await scene.ask("left", 0, tokens=packed.pack_i32([10**6]))
        await scene.ask("left", 1, expires_at=1)
        await scene.ask("left", 2)
        async with scene.worker():
            answers = await scene.answers(3)
        codes = [answer.failure and answer.failure.code for answer in answers]
        assert codes == ["bad_tokens", "expired", None]
        assert await scene.done()

    drive(tmp_path, play)


def test_a_stopped_worker_abandons_and_the_next_one_answers(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        for policy in POLICIES:
            await scene.publish(policy, 0)
        await scene.ask("left", 0)
        async with scene.worker(delay_ms=60_000):
            await asyncio.sleep(0.3)
        assert await scene.answered() == 0
        assert not await scene.done()
        async with scene.worker():
            assert [answer.task for answer in await scene.answers(1)] == [0]
        assert await scene.done()

    drive(tmp_path, play)


class FailingSoon(ScriptedEngine):
    """An engine that can't go on a moment later."""

    async def failed(self) -> None:
        await asyncio.sleep(0.1)
        raise HeadraceError("rank 1 ended")


def test_a_worker_ends_if_its_engine_fails_although_no_prompt_is_there(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        with pytest.raises(HeadraceError, match="rank 1 ended"):
            async with scene.worker(use=f"{__name__}:FailingSoon") as worker:
                await asyncio.wait({worker.task})

    drive(tmp_path, play)


class FailingPinned(ScriptedEngine):
    """An engine that can't go on once it has served an older version than the newest, 1."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self._old = asyncio.Event()

    async def load(self, weights: Weights) -> None:
        await super().load(weights)
        if weights.version < 1:
            self._old.set()

    async def failed(self) -> None:
        await self._old.wait()
        raise HeadraceError("a rank of the pinned version ended")


def test_a_worker_ends_if_the_engine_of_its_pinned_versions_fails(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        for policy in POLICIES:
            for version in (0, 1):
                await scene.publish(policy, version)
        await scene.ask("left", 0)

        async def lose() -> None:
            async with scene.worker(use=f"{__name__}:FailingPinned") as worker:
                assert (await scene.answers(1))[0].failure is None
                assert not worker.task.done()
                await scene.ask("left", 1, pinned=0)
                await asyncio.wait({worker.task})

        with pytest.raises(HeadraceError, match="a rank of the pinned version ended"):
            await lose()

    drive(tmp_path, play)


async def both_report(scene: Scene) -> None:
    """Waits until two workers share the partitions."""
    held: dict[str, int] = {}
    reader = follow_events(scene.log, {scene.log.topics.partition(LOADS): "first"})
    async for item in reader:
        if isinstance(item, Delivery) and isinstance(item.event, LoadReported):
            pools = item.event.pools
            held[item.event.worker] = sum(len(packed.unpack_i32(one.partitions)) for one in pools)
            if sorted(held.values()) == [1, 1]:
                break
    await reader.aclose()


def test_a_draining_worker_finishes_what_has_begun_and_hands_over_the_rest(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        for policy in POLICIES:
            await scene.publish(policy, 0)
        slow, quick = (
            scene.worker("a", "left", delay_ms=500),
            scene.worker("b", "left", delay_ms=50),
        )
        async with slow as a, quick:
            await both_report(scene)
            for task in range(40):  # each of the two has slots for four
                await scene.ask("left", task)
            await scene.answer_of("a")
            await a.drain()
            assert not a.context.stopping.is_set()
            # Nobody is left without an answer, and no answer was made twice.
            answers = await scene.answers(40)
            assert [answer.task for answer in answers] == list(range(40))
            await asyncio.sleep(0.5)
            assert await scene.answered() == 40
            by_a = sum(answer.worker == "a" for answer in answers)
            assert 4 <= by_a < 20, "it held half of the prompts, and had begun some of them"
            for task in range(40, 44):
                await scene.ask("left", task)
            assert {answer.worker for answer in (await scene.answers(44))[40:]} == {"b"}
        assert await scene.done()

    drive(tmp_path, play)


def test_a_draining_worker_serves_what_nobody_else_can(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        for policy in POLICIES:
            await scene.publish(policy, 0)
        async with scene.worker("a", delay_ms=50) as a:
            for task in range(20):
                await scene.ask("left", task)
            while not await scene.answered():
                await asyncio.sleep(0.05)
            await a.drain()
        assert [answer.task for answer in await scene.answers(20)] == list(range(20))
        assert await scene.answered() == 20
        assert await scene.done()

    drive(tmp_path, play)


def test_a_stop_ends_a_drain(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        for policy in POLICIES:
            await scene.publish(policy, 0)
        async with scene.worker("a", delay_ms=60_000) as a:
            await scene.ask("left", 0)
            await asyncio.sleep(0.5)
            a.context.draining.set()
            await asyncio.sleep(0.5)
            assert not a.task.done()
        assert not await scene.done()

    drive(tmp_path, play)
