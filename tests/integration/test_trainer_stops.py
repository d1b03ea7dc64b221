"""The trainer's last checkpoint: it is written if there is time, and leaves nothing behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from headrace.trainer import loop
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
