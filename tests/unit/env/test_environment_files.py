"""Files that go into environments and come out of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import InfrastructureError
from headrace.schemas.events import Blob, EnvironmentUse, ObservationRecorded
from headrace.schemas.recipe.task_settings import Artifacts
from headrace.schemas.untrusted.artifact_names import matches
from headrace.services.base.shown import shown
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.setup import EnvironmentSetup
from headrace.services.env.slots import EnvironmentSlots
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.tasks import artifact_store
from headrace.services.tasks.artifact_store import ArtifactStore, store_task_files
from tests.unit.env.test_shard import Bench, action, run

COLLECTING = EnvironmentUse(use="default", collect=("out/*",))


class Files:
    """Changes the files that it gets, and gives them out."""

    takes_files = True
    replayable = True

    def __init__(self, large: int = 0) -> None:
        self._files: dict[str, bytes] = {}
        self._large = large

    async def reset(self, task: TaskView) -> Observation:
        for name, file in task.artifacts.items():
            self._files[name.replace("in/", "out/")] = await file.read()
        return Observation(text=",".join(task.artifacts), artifacts={"log": b"begun"})

    async def step(self, action: str) -> Observation:
        if action == "lose":
            raise InfrastructureError("host_gone")
        self._files["out/a"] = self._files.get("out/a", b"") + action.encode()
        if action == "wrong":
            return Observation(artifacts={"../x": b""})
        if action == "odd":
            return Observation(artifacts={"x": "text"})  # type: ignore[dict-item]
        return Observation(text="done", artifacts={"large": bytes(self._large)})

    async def collect(self, patterns: Sequence[str]) -> Observation:
        found = {name: data for name, data in self._files.items() if matches(name, patterns)}
        return Observation(artifacts=found)

    async def score(self, payload: Any) -> Observation:
        return Observation(reward=1.0, artifacts={"report": b"good"})

    async def aclose(self) -> None:
        pass


def with_files(
    test: Any, folder: Path, make: Any = Files, blobs: LocalBlobStore | None = None
) -> None:
    async def main(bench: Bench) -> None:
        store = ArtifactStore(
            blobs or LocalBlobStore(folder / "blobs", "cluster.run"), Artifacts(file_mb=1)
        )
        setup = EnvironmentSetup(make, {}, EnvironmentSlots(8), store=store)
        bench.shard._setups = {"default": setup}
        await bench.live()
        await test(bench)

    run(main)


def stored(folder: Path, content: bytes = b"1") -> tuple[Blob, ...]:
    blobs = LocalBlobStore(folder / "blobs", "cluster.run")
    return store_task_files(blobs, Artifacts(), {"in/a": content})


def named(answer: ObservationRecorded) -> list[tuple[str, int]]:
    return [(one.name, one.size) for one in answer.artifacts]


def test_a_file_goes_in_and_comes_back_changed(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        artifacts = stored(tmp_path)
        await bench.feed(
            action(0, "reset", environment=COLLECTING, artifacts=artifacts),
            action(1, environment=COLLECTING),
            action(2, "collect", environment=COLLECTING),
        )
        reset, _, collected = await bench.context.answers(3)
        assert (reset.text, named(reset)) == ("in/a", [("log", 5)])
        assert named(collected) == [("out/a", 3)]
        path = LocalBlobStore(tmp_path / "blobs").get(collected.artifacts[0])
        assert path.read_bytes() == b"1go"

    with_files(test, tmp_path)


def test_the_next_worker_collects_again_and_gives_the_same(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        artifacts = stored(tmp_path)
        events = [
            action(0, "reset", environment=COLLECTING, artifacts=artifacts),
            action(1, environment=COLLECTING),
            action(2, "collect", environment=COLLECTING),
        ]
        await bench.feed(*events)
        answers = list(await bench.context.answers(3))
        seen = [None, *(shown(answer) for answer in answers)]
        events = [one.model_copy(update={"after": seen[one.index]}) for one in events]

        async def heir(other: Bench) -> None:
            other.shard._setups = bench.shard._setups
            other.context.caught_up = False
            await other.feed(*events)
            await other.live()
            (again,) = await other.context.answers(1)
            assert again.failure is None
            assert named(again) == [("out/a", 3)]
            assert again.artifacts == answers[2].artifacts

        await heir(Bench())

    with_files(test, tmp_path)


def test_a_judge_gives_files_out(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.feed(action(0, "score"))
        (answer,) = await bench.context.answers(1)
        assert (answer.reward, named(answer)) == (1.0, [("report", 4)])

    with_files(test, tmp_path)


def test_a_file_beyond_the_limit_is_left_out_and_the_observation_says_so(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.feed(action(0, "reset"), action(1))
        _, step = await bench.context.answers(2)
        assert step.failure is None
        assert step.artifacts == ()
        assert "large: it has 1,048,577 bytes" in step.data

    with_files(test, tmp_path, lambda: Files(large=(1 << 20) + 1))


@pytest.mark.parametrize("what", ["wrong", "odd"])
def test_wrong_files_are_a_failure_of_the_environment(tmp_path: Path, what: str) -> None:
    async def test(bench: Bench) -> None:
        await bench.feed(action(0, "reset"), action(1, payload=f'{{"action": "{what}"}}'))
        _, step = await bench.context.answers(2)
        assert step.failure is not None
        assert (step.failure.origin, step.failure.code) == ("environment", "bad_observation")

    with_files(test, tmp_path)


class NoFiles:
    """Neither takes files nor gives them out."""

    replayable = True

    async def reset(self, task: TaskView) -> Observation:
        return Observation()

    async def step(self, action: str) -> Observation:
        return Observation()

    async def aclose(self) -> None:
        pass


def test_files_are_never_ignored(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.feed(
            action(0, "reset", artifacts=stored(tmp_path)),
            action(0, "reset", sample=1, environment=COLLECTING),
        )
        for answer in await bench.context.answers(2):
            assert answer.failure is not None
            assert (answer.failure.origin, answer.failure.code) == ("operator", "unusable")
            assert not answer.failure.retryable

    with_files(test, tmp_path, NoFiles)


def test_a_pruned_file_is_a_failure_of_the_infrastructure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact_store, "LATE_S", 0.2)

    async def test(bench: Bench) -> None:
        gone = (Blob(sha256=bytes(32), size=1, name="in/a"),)
        await bench.feed(action(0, "reset", artifacts=gone))
        (answer,) = await bench.context.answers(1)
        assert answer.failure is not None
        assert (answer.failure.origin, answer.failure.code) == (
            "infrastructure",
            "artifacts_unavailable",
        )
        assert answer.failure.retryable

    with_files(test, tmp_path)


def test_a_full_disk_is_a_failure_of_the_infrastructure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact_store, "LATE_S", 0.2)
    (tmp_path / "file").write_text("no folder")

    async def test(bench: Bench) -> None:
        await bench.feed(action(0, "reset"))
        (answer,) = await bench.context.answers(1)
        assert answer.failure is not None
        assert answer.failure.origin == "infrastructure"
        assert answer.reward is None

    with_files(test, tmp_path, blobs=LocalBlobStore(tmp_path / "file", "cluster.run"))
