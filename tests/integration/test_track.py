"""The curves of a run in other tools: each version exactly once, after kill -9."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from headrace.infra import local
from headrace.infra.local.detached import free_port
from headrace.schemas.events import PolicyPublished
from headrace.services.log.event_log import EventLog
from headrace.services.namespace.apply import apply
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.connect import connect
from headrace.services.namespace.lookup import topics_of
from headrace.services.namespace.run_life import enter
from tests.commands import cluster_variables

BOUND_S = 200.0
KILLS = 3
BETWEEN_S = 0.02
VERSIONS_AFTER = 10
MLFLOW = "mlflow==3.17.2"
"""The server, which has packages that don't go with Headrace's."""


def in_tensorboard(folder: Path) -> list[int]:
    """The versions in an output, as TensorBoard's own reader has them, in their order."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    events = (
        event
        for path in sorted(folder.rglob("*tfevents*"))
        for event in EventFileLoader(str(path)).Load()
    )
    return [event.step for event in events if event.HasField("summary")]


def in_wandb(folder: Path) -> list[int]:
    """The versions in offline runs, in the order in which `wandb sync` sends them."""
    paths = sorted(folder.glob("*/default/versions-*/offline-run-*/run-*.wandb"))
    assert paths == sorted(paths, key=lambda path: path.parent.name), "sent in order of their times"
    assert len({path.name for path in paths}) == 1, "one run of W&B"
    return [step for path in paths for step in _steps(path.read_bytes())]


def _steps(data: bytes) -> Iterator[int]:
    """The steps in a file of W&B: after 7 bytes it is a log as LevelDB has it."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, whole, block, last = 7, b"", 32_768, (1, 4)
    while at + 7 <= len(data):
        if (room := block - at % block) < 7:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in last:
            record = Record.FromString(whole)
            whole = b""
            if record.HasField("history"):
                yield record.history.step.num


async def publish(log: EventLog, versions: range) -> None:
    for version in versions:
        event = PolicyPublished(
            policy="default",
            version=version,
            status="trained" if version else "initial",
            digest=bytes(32),
            full_version=0,
            metrics={"loss": 1.0 / (1 + version), "reward_mean": version / 100},
        )
        await log.send(event)
        await asyncio.sleep(BETWEEN_S)


class Story:
    """A run that is written by commands which are killed."""

    def __init__(
        self, to: list[str], versions: Callable[[], list[int]], progress: Callable[[], object]
    ) -> None:
        """`to` are the command's arguments. `progress` differs once it has written something."""
        self._to, self._versions, self._progress = to, versions, progress
        self._started: list[subprocess.Popen[bytes]] = []

    def play(self, tmp_path: Path, stack: local.LocalStack, namespace: str) -> None:
        recipe = read_recipe("quickstart", ())
        cluster = ClusterConfig(tmp_path, stack.bootstrap_servers, stack.registry_url)
        command = (sys.executable, "-m", "headrace", "track", *self._to, namespace)
        environment = {**os.environ, **cluster_variables(stack, namespace)}

        async def begin() -> subprocess.Popen[bytes]:
            """Starts a process, and waits until it writes something."""
            before = self._progress()
            process = subprocess.Popen(command, env=environment)
            self._started.append(process)
            while await asyncio.to_thread(self._progress) == before:
                assert process.poll() is None
                await asyncio.sleep(0.05)
            return process

        async def whole() -> None:
            assert await asyncio.to_thread(subprocess.call, command, env=environment) == 0
            assert await asyncio.to_thread(self._versions) == list(range(newest))

        newest = 0

        async def main() -> None:
            nonlocal newest
            async with connect(cluster, "test") as connection:
                log = await connection.writing_log(topics_of(recipe, namespace))
                await apply(log, recipe)
                for number in range(KILLS + 1):
                    await publish(log, range(newest, newest + 10))
                    process = await begin()
                    await publish(log, range(newest + 10, newest + 30))
                    newest += 30
                    process.send_signal(signal.SIGTERM if number == 1 else signal.SIGKILL)
                    began = time.monotonic()
                    code = await asyncio.to_thread(process.wait)
                    assert code == (130 if number == 1 else -signal.SIGKILL)
                    assert time.monotonic() - began < 10
                await publish(log, range(newest, newest + VERSIONS_AFTER))
                newest += VERSIONS_AFTER
                # Published again, as after a restart of the trainer.
                await publish(log, range(newest - 1, newest))
                await enter(log, "ending", recipe)
                await enter(log, "ended", recipe)
                await whole()
                await whole()  # the run has ended and all is written

        try:
            asyncio.run(asyncio.wait_for(main(), BOUND_S))
        finally:
            for process in self._started:
                process.kill()
                process.wait()


def shape(folder: Path) -> set[str]:
    """The files of an output with their sizes."""
    found = set()
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            found.add(f"{path} {path.stat().st_size}")
    return found


def test_tensorboard_has_each_version_once_after_kills(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    to = ["tensorboard", "--to", str(out)]
    story = Story(to, lambda: in_tensorboard(out), lambda: shape(out))
    story.play(tmp_path, local_stack, namespace)


@pytest.mark.long
@pytest.mark.heavy
def test_wandb_has_each_version_once_after_kills(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    to = ["wandb", "--to", str(out), "--every", "0.1"]
    story = Story(to, lambda: in_wandb(out), lambda: set(out.rglob("unfinished-*/wandb")))
    story.play(tmp_path, local_stack, namespace)
    assert sorted(path.name for path in (out / namespace / "default").iterdir())[0] == "lock"
    assert not list(out.rglob("unfinished-*")), "what a killed command left is removed"


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of MLflow's own server."""
    folder = tmp_path_factory.mktemp("mlflow")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    quietly = ("--quiet", "--disable-pip-version-check")
    subprocess.run([python, "-m", "pip", "install", *quietly, MLFLOW], check=True)
    url = f"http://127.0.0.1:{(port := free_port())}"
    options = ("--port", str(port), "--workers", "1", "--backend-store-uri", "sqlite:///runs.db")
    process = subprocess.Popen(
        [python, "-m", "mlflow", "server", *options], cwd=folder, start_new_session=True
    )
    try:
        until = time.monotonic() + BOUND_S
        while True:
            with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                break
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.long
@pytest.mark.heavy
def test_mlflow_has_each_version_once_after_kills(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str, mlflow_server: str
) -> None:
    def versions() -> list[int]:
        from mlflow import MlflowClient

        client = MlflowClient(mlflow_server, mlflow_server)
        experiment = client.get_experiment_by_name(namespace)
        if experiment is None:
            return []
        runs = client.search_runs([experiment.experiment_id])
        assert len(runs) <= 1
        steps = [
            sorted(one.step for one in client.get_metric_history(run.info.run_id, name))
            for run in runs
            for name in ("loss", "skipped")
        ]
        return steps[0] if len(steps) == 2 and steps[0] == steps[1] else []

    story = Story(["mlflow", "--to", mlflow_server], versions, versions)
    story.play(tmp_path, local_stack, namespace)
