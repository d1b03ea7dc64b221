"""The curves of a run in TensorBoard: each version exactly once, after kill -9."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from headrace.infra import local
from headrace.schemas.events import PolicyPublished
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


def in_tensorboard(folder: Path) -> list[int]:
    """The versions in an output, as TensorBoard's own reader has them, in their order."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    events = (
        event
        for path in sorted(folder.rglob("*tfevents*"))
        for event in EventFileLoader(str(path)).Load()
    )
    return [event.step for event in events if event.HasField("summary")]


async def publish(log: object, versions: range) -> None:
    for version in versions:
        event = PolicyPublished(
            policy="default",
            version=version,
            status="trained" if version else "initial",
            digest=bytes(32),
            full_version=0,
            metrics={"loss": 1.0 / (1 + version), "reward_mean": version / 100},
        )
        await log.send(event)  # type: ignore[attr-defined]
        await asyncio.sleep(BETWEEN_S)


def test_each_version_is_there_once_after_kills(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    recipe = read_recipe("quickstart", ())
    cluster = ClusterConfig(tmp_path, local_stack.bootstrap_servers, local_stack.registry_url)
    out = tmp_path / "out"
    out.mkdir()
    command = (
        sys.executable,
        "-m",
        "headrace",
        "track",
        "tensorboard",
        namespace,
        "--to",
        str(out),
    )
    environment = {**os.environ, **cluster_variables(local_stack, namespace)}

    started: list[subprocess.Popen[bytes]] = []

    async def begin() -> subprocess.Popen[bytes]:
        """Starts a process, and waits until it has written something."""
        before = shape(out)
        process = subprocess.Popen(command, env=environment)
        started.append(process)
        while shape(out) <= before:
            assert process.poll() is None
            await asyncio.sleep(0.05)
        return process

    async def main() -> None:
        async with connect(cluster, "test") as connection:
            log = await connection.writing_log(topics_of(recipe, namespace))
            await apply(log, recipe)
            newest = 0
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
            assert await asyncio.to_thread(subprocess.call, command, env=environment) == 0
            assert await asyncio.to_thread(in_tensorboard, out) == list(range(newest))
            # The run has ended and all is written.
            assert await asyncio.to_thread(subprocess.call, command, env=environment) == 0
            assert await asyncio.to_thread(in_tensorboard, out) == list(range(newest))

    try:
        asyncio.run(asyncio.wait_for(main(), BOUND_S))
    finally:
        for process in started:
            process.kill()
            process.wait()


def shape(folder: Path) -> set[str]:
    """The files of an output with their sizes."""
    found = set()
    for path in folder.rglob("*"):
        try:
            found.add(f"{path} {path.stat().st_size}")
        except FileNotFoundError:
            continue
    return found
