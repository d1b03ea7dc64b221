"""Containers of agents, at an engine that says only what a test has it say."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import headrace.services.processes.docker.docker_engine
from headrace.services.agent.gateway import container as container_module
from headrace.services.agent.gateway.container import (
    AgentContainers,
    SocketFolder,
    contained,
    socket_folder,
    sweep_containers,
)
from headrace.services.base.clock import now
from headrace.services.processes.docker.docker_engine import DockerEngine
from headrace.services.processes.docker.pinned_images import PinnedImage
from tests.unit.processes.docker_fake import Answer, FakeEngine, fake, says

CREATE = "POST /containers/create"
Steps = list[str]


def slowly(steps: Steps, step: str, value: Any, status: int) -> Answer:
    """Notes a step when it is done, which takes the engine a while."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        steps.append(step)
        await says(value, status)(reader, writer)

    return answer


def on_engine(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    test: Callable[[FakeEngine, AgentContainers, Steps], Awaitable[None]],
) -> None:
    steps: Steps = []

    async def main() -> None:
        answers = {
            CREATE: slowly(steps, "created", {"Id": "a"}, 201),
            "POST /containers/[^/]+/start": slowly(steps, "started", {}, 204),
            "DELETE /containers/.+": slowly(steps, "removed", {}, 204),
        }
        async with asyncio.timeout(30), fake(folder, answers) as (made, engine):
            monkeypatch.setenv("DOCKER_HOST", engine.host)
            containers = AgentContainers({"image": "i"})
            containers._ready = True
            for image in ("i", containers.settings.relay_image):
                containers.images._pinned[image] = PinnedImage(image, f"sha256:{image}")
            await test(made, containers, steps)
            await containers.aclose()

    asyncio.run(main())


async def attempt(containers: AgentContainers) -> None:
    async with socket_folder(b"") as folder:
        folder.gateway.touch()
        async with contained(containers, ("true",), {}, None, folder, 60):
            raise AssertionError("no relay listens")


def test_a_container_that_was_being_made_is_removed_if_the_episode_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(made: FakeEngine, containers: AgentContainers, steps: Steps) -> None:
        running = asyncio.create_task(attempt(containers))
        while CREATE not in made.asked:
            await asyncio.sleep(0.005)
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()
        assert sorted(steps[:2]) == ["created", "started"]
        assert steps[2:] == ["removed", "removed"]  # the relay, and the program if there is one

    on_engine(tmp_path, monkeypatch, test)


def test_all_attempts_of_a_worker_share_the_engine_s_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headrace.services.processes.docker.docker_engine, "CALLS", 2)
    monkeypatch.setattr(container_module, "READY_S", 0.05)

    async def test(made: FakeEngine, containers: AgentContainers, steps: Steps) -> None:
        running = [asyncio.create_task(attempt(containers)) for _ in range(8)]
        most = 0
        while not all(task.done() for task in running):
            most = max(most, made.open)
            await asyncio.sleep(0.005)
        assert {str(task.exception()).partition(":")[0] for task in running} == {"relay_silent"}
        assert most <= 3  # one connection asked for the engine's version
        assert steps.count("created") == 8

    on_engine(tmp_path, monkeypatch, test)


def test_a_worker_removes_containers_that_killed_workers_never_started(tmp_path: Path) -> None:
    def listed(name: str, left_s: float) -> dict[str, Any]:
        labels = {"headrace.deadline": f"{now() + left_s:.0f}", "headrace.agent": "command"}
        return {"Id": name, "Names": [f"/{name}"], "Labels": labels}

    async def main() -> None:
        there = [listed("old", -120.0), listed("new", 60.0), listed("just-ended", -5.0)]
        answers = {
            "GET /containers/json": says(there),
            "DELETE /containers/.+": says({}, 204),
        }
        async with asyncio.timeout(30), fake(tmp_path, answers) as (made, engine):
            assert isinstance(engine, DockerEngine)
            await sweep_containers(engine)
            assert made.asked[-1] == "DELETE /containers/old"
            assert sum(asked.startswith("DELETE") for asked in made.asked) == 1

    asyncio.run(main())


def test_a_new_attempt_does_not_connect_to_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thousand attempts at once, these connections would take the worker minutes."""
    held = 0

    async def hold(self: Any, reader: Any, writer: asyncio.StreamWriter) -> None:
        nonlocal held
        held += 1
        writer.close()

    monkeypatch.setattr(SocketFolder, "_hold", hold)

    async def main() -> None:
        async with socket_folder(b"") as first:
            first.gateway.touch()
            await first.open()
            for _ in range(3):
                async with socket_folder(b""):
                    await asyncio.sleep(0.01)
            assert held == 0

    asyncio.run(main())
