"""The trainer's last checkpoint: it is written if there is time, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from headrace.errors import DependencyError
from headrace.services.base.files import file_digest
from headrace.trainer import checkpoint, loop
from headrace.trainer.checkpoint import Checkpoints
from headrace.trainer.learner import Learner
from tests.integration.test_trainer import Bench, on_memory


@pytest.mark.parametrize(("stop_s", "saved"), [(60.0, [3, 2]), (0.2, [2])])
def test_no_last_checkpoint_is_begun_that_would_be_interrupted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stop_s: float,
    saved: list[int],
) -> None:
    plain = Learner.save

    def slow(learner: Learner, path: Path) -> None:
        time.sleep(0.3)
        plain(learner, path)

    monkeypatch.setattr(Learner, "save", slow)
    monkeypatch.setattr(loop, "STOP_S", stop_s)

    async def scenario(bench: Bench) -> None:
        for version in range(1, 4):
            await bench.submit(version)
        folder = bench.state / "checkpoints" / "learner"
        first = await bench.train(3)
        assert Checkpoints(folder, 2).versions() == saved
        skipped = "no checkpoint of version 3 is written" in caplog.text
        assert skipped == (saved == [2])
        await bench.submit(4)
        assert [one.digest for one in await bench.train(4)][:-1] == [one.digest for one in first]

    on_memory(scenario, tmp_path)


def test_a_trainer_removes_interrupted_checkpoints_when_it_starts(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        left = bench.state / "checkpoints" / "learner" / "partial-left"
        left.mkdir(parents=True)
        (left / "state.safetensors").write_bytes(bytes(1000))
        async with bench.training(killed=True):
            await bench.published(until=0)
            assert not left.exists()

    on_memory(scenario, tmp_path)


def test_training_goes_on_while_a_checkpoint_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def slow(path: Path) -> bytes:
        assert go.wait(60)
        return file_digest(path)

    monkeypatch.setattr(checkpoint, "file_digest", slow)

    async def scenario(bench: Bench) -> None:
        folder = bench.state / "checkpoints" / "learner"
        for version in range(1, 4):
            await bench.submit(version)
        async with bench.training():
            async with asyncio.timeout(50):
                first = await bench.published(until=3)  # There is a checkpoint every 2 versions.
            assert Checkpoints(folder, 2).versions() == []
            go.set()
        assert Checkpoints(folder, 2).versions() == [3, 2]
        await bench.submit(4)
        assert [one.digest for one in await bench.train(4)][:-1] == [one.digest for one in first]

    on_memory(scenario, tmp_path)


def test_a_checkpoint_that_can_not_be_completed_ends_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "file_digest", fail)

    async def scenario(bench: Bench) -> None:
        for version in range(1, 4):
            await bench.submit(version)

        async def to_its_end() -> None:
            async with bench.training() as trainer, asyncio.timeout(60):
                await trainer

        with pytest.raises(DependencyError, match="can't write a checkpoint"):
            await to_its_end()
        assert list((bench.state / "checkpoints" / "learner").iterdir()) == []

    on_memory(scenario, tmp_path)
