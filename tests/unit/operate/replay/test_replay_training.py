"""A replay trains up to its last version, and Ctrl-C stops its trainer cleanly."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Collection
from types import SimpleNamespace

import pytest

from headrace.errors import Interrupted
from headrace.services.operate.replay import replay_training
from headrace.services.operate.replay.replay_training import train
from headrace.services.worker.service_context import ServiceContext
from tests.unit.operate.replay.test_gone import RECIPE, TOPICS, Bench


class Trainer:
    """Trains nothing until it is stopped."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.drained = False

    async def run(self, context: ServiceContext, policy: str, skipped: Collection[int]) -> None:
        self.started.set()
        await context.stopping.wait()
        self.drained = True


async def on_bench(monkeypatch: pytest.MonkeyPatch, *versions: int) -> list[int]:
    """Publishes these versions while version 2 is awaited; without any, presses Ctrl-C."""
    bench, trainer = Bench(), Trainer()
    await bench.broker.create_topics({t.name: (t.partitions, {}) for t in TOPICS})
    module = SimpleNamespace(run=trainer.run)
    monkeypatch.setattr(replay_training, "import_module", lambda name: module)
    monkeypatch.setattr(replay_training, "limit_threads", lambda *names: None)
    before = signal.getsignal(signal.SIGINT)
    training = asyncio.create_task(train(bench.recording, bench.log, RECIPE, "default", until=2))
    await trainer.started.wait()
    for version in versions:
        await bench.publish(version)
    if not versions:
        os.kill(os.getpid(), signal.SIGINT)
    try:
        return [one.version for one in await training]
    finally:
        assert trainer.drained
        assert signal.getsignal(signal.SIGINT) == before
        await bench.broker.close()


def test_training_ends_after_the_last_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asyncio.run(asyncio.wait_for(on_bench(monkeypatch, 0, 1, 2), 20)) == [0, 1, 2]


def test_ctrl_c_stops_the_trainer_cleanly(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Interrupted, match="namespace old keeps what was replayed so far"):
        asyncio.run(asyncio.wait_for(on_bench(monkeypatch), 20))
