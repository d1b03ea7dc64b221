"""Following publications: the newest verified version is served, and nothing else ever is."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

import pytest

from headrace.errors import InfrastructureError
from headrace.schemas.events import Blob, Event, PolicyPublished, Ref
from headrace.services.base.clock import now_ms
from headrace.services.inference import weights_follower
from headrace.services.inference.engine import EngineSetup, Weights
from headrace.services.inference.engine_slots import Slots
from headrace.services.inference.engines.scripted import ScriptedEngine
from headrace.services.inference.serving import ServedPolicy
from headrace.services.inference.tokenizer import Tokenizer
from headrace.services.inference.weights_follower import WeightsFollower
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import Delivery
from headrace.services.log.log_reader import CaughtUp
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.models.weights import model_folder, weights_digest
from tests.unit.inference.test_serving import request

MODEL = model_folder("tiny-llama")


class Recorder(ScriptedEngine):
    """Notes what it is asked to load; each load takes until it is released."""

    def __init__(self) -> None:
        super().__init__(EngineSetup(MODEL, 4))
        self.loads: list[tuple[str, int]] = []
        self.go = asyncio.Event()
        self.go.set()
        self.broken = False

    async def load(self, weights: Weights) -> None:
        self.loads.append((weights.policy, weights.version))
        await self.go.wait()
        if self.broken:
            raise InfrastructureError("engine_failed")
        await super().load(weights)


class Scene:
    """A follower, the publications that it reads, and the blob store."""

    def __init__(self, folder: Path, policies: tuple[str, ...] = ("default",)) -> None:
        self.blobs = LocalBlobStore(folder)
        self.engine = Recorder()
        slots = Slots(self.engine)
        tokenizer = Tokenizer(MODEL)
        self.served = {
            name: ServedPolicy(name, self.engine, slots, tokenizer, "inference-1")
            for name in policies
        }
        self.queue: asyncio.Queue[Delivery[Event] | CaughtUp] = asyncio.Queue()
        self.follower = WeightsFollower(self._read(), self.blobs, self.served, folder / "scratch")

    async def _read(self) -> AsyncIterator[Delivery[Event] | CaughtUp]:
        while True:
            yield await self.queue.get()

    def publish(
        self, version: int, policy: str = "default", *, digest: bytes = b"", stored: bool = True
    ) -> Blob:
        header = b'{"__metadata__":{"version":"%d"}}' % version
        content = len(header).to_bytes(8, "little") + header
        blob = Blob(sha256=hashlib.sha256(content).digest(), size=len(content))
        if stored:
            self.blobs.put(content)
        published = PolicyPublished(
            policy=policy,
            version=version,
            status="trained",
            digest=digest or weights_digest(content),
            full=blob,
            full_version=version,
        )
        ref = Ref(topic="policies", partition=0, offset=0, digest=b"r" * 16)
        partition = Partition("policies", 0)
        self.queue.put_nowait(Delivery(published, ref, 0.0, partition, 0))
        return blob

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0.001)


def drive(
    scene_of: Callable[[], Scene], play: Callable[[Scene], Coroutine[None, None, None]]
) -> None:
    async def main() -> None:
        scene = scene_of()
        following = asyncio.create_task(scene.follower.run())
        await asyncio.wait_for(play(scene), 20)
        assert not following.done()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_follower, "FIRST_RETRY_S", 0.01)


def test_only_the_newest_is_loaded_once_caught_up(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        for version in range(3):
            scene.publish(version)
        await asyncio.sleep(0.02)
        assert scene.engine.loads == []
        scene.queue.put_nowait(CaughtUp())
        await scene.follower.ready.wait()
        assert scene.engine.loads == [("default", 2)]
        assert scene.served["default"].version == 2

    drive(lambda: Scene(tmp_path), play)


def test_versions_published_during_a_load_are_passed_over(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        scene.queue.put_nowait(CaughtUp())
        scene.engine.go.clear()
        scene.publish(0)
        await scene.until(lambda: bool(scene.engine.loads))
        for version in (1, 2, 3):
            scene.publish(version)
        await scene.until(scene.queue.empty)
        scene.engine.go.set()
        await scene.until(lambda: scene.served["default"].version == 3)
        assert [version for _, version in scene.engine.loads] == [0, 3]

    drive(lambda: Scene(tmp_path), play)


def test_an_older_version_that_comes_late_changes_nothing(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        scene.publish(5)
        scene.publish(4)
        scene.queue.put_nowait(CaughtUp())
        await scene.follower.ready.wait()
        scene.publish(3)
        scene.publish(6)
        await scene.until(lambda: scene.served["default"].version == 6)
        assert [version for _, version in scene.engine.loads] == [5, 6]

    drive(lambda: Scene(tmp_path), play)


def test_it_is_ready_when_every_policy_is_served(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        scene.queue.put_nowait(CaughtUp())
        scene.publish(0, "left")
        scene.publish(0, "stranger")
        await scene.until(lambda: scene.served["left"].version == 0)
        assert not scene.follower.ready.is_set()
        scene.publish(0, "right")
        await scene.follower.ready.wait()

    drive(lambda: Scene(tmp_path, ("left", "right")), play)


@pytest.mark.parametrize("kind", ["absent", "damaged", "another digest"])
def test_weights_that_are_not_as_published_are_never_served(tmp_path: Path, kind: str) -> None:
    async def play(scene: Scene) -> None:
        scene.queue.put_nowait(CaughtUp())
        scene.publish(0)
        await scene.follower.ready.wait()
        if kind == "another digest":
            scene.publish(1, digest=b"x" * 32)
        else:
            blob = scene.publish(1, stored=kind == "damaged")
        if kind == "damaged":
            name = blob.sha256.hex()
            (tmp_path / name[:2] / name[2:]).write_bytes(b"x" * blob.size)
        await asyncio.sleep(0.05)
        assert scene.engine.loads == [("default", 0)]
        assert scene.served["default"].version == 0
        hurried = request("0", minimum=1).model_copy(update={"expires_at": now_ms() + 40})
        await scene.served["default"].catch_up(hurried)
        assert not scene.served["default"].is_behind(hurried), "one prompt waited in vain for it"
        scene.publish(2)
        await scene.until(lambda: scene.served["default"].version == 2)

    drive(lambda: Scene(tmp_path), play)


def test_a_load_that_fails_is_tried_again(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        scene.engine.broken = True
        scene.publish(0)
        scene.queue.put_nowait(CaughtUp())
        await scene.until(lambda: len(scene.engine.loads) >= 2)
        assert not scene.follower.ready.is_set()
        scene.engine.broken = False
        await scene.follower.ready.wait()
        assert scene.served["default"].version == 0

    drive(lambda: Scene(tmp_path), play)
