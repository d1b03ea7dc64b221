"""The client of the Docker engine, on a real one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import subprocess
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import headrace.services.processes.docker.docker_engine
from headrace.errors import InfrastructureError
from headrace.services.processes.docker.docker_engine import CALLS, DockerEngine
from headrace.services.processes.docker.hardened import USER, WORK, Limits, container
from tests.sandboxes import registry
from tests.sandboxes.docker_engine import IMAGE
from tests.unit.processes.docker_fake import descriptors, engine_threads, until
from tests.unit.processes.test_docker_client import certificates, serving

__all__ = ["certificates"]

BOUND_S = 120.0


@asynccontextmanager
async def one_container(engine: DockerEngine, **limits: int) -> AsyncIterator[str]:
    """Its name. In the end it is gone, and the engine closed."""
    name = f"test-engine-{uuid.uuid4().hex[:8]}"
    try:
        async with asyncio.timeout(BOUND_S):
            await engine.create(name, container(Limits.model_validate(limits), IMAGE, {}, 600))
            yield name
    finally:
        await engine.remove(name)
        await engine.aclose()


async def say(engine: DockerEngine, name: str, command: str) -> tuple[bytes, int | None]:
    """What a command of `sh` wrote, and its exit code."""
    said = b""
    async with engine.run(name, ("sh", "-c", command), USER, WORK) as (run, output):
        while chunk := await output.read():
            said += chunk
    return said, await engine.exit_code(run)


def test_memory_ended_a_container_only_if_nobody_killed_it(engine: str) -> None:
    """A command runs out of memory. Then somebody kills the container, or it ends of that."""
    flood = "held = []\nwhile True:\n    held.append(bytearray(2**22))"

    async def killed(spoken_to: DockerEngine, number: int) -> bool:
        async with one_container(spoken_to, memory_mb=64, disk_mb=16) as name:
            assert await say(spoken_to, name, f"exec python3 -c '{flood}'") == (b"", 137)
            await asyncio.sleep(1)  # the engine hears of it by an event
            await spoken_to._call("kill", lambda client: client.kill(name, number))
            await spoken_to.ended(name)
            assert (await spoken_to.inspect(name))["State"]["OOMKilled"], "it was earlier"
            return await spoken_to.out_of_memory(name)

    async def ended_itself(spoken_to: DockerEngine) -> bool:
        name = f"test-engine-{uuid.uuid4().hex[:8]}"
        limits = Limits(memory_mb=64, disk_mb=16)
        body = container(limits, IMAGE, {}, 600) | {"Entrypoint": ["python3", "-c", flood]}
        try:
            await spoken_to.create(name, body)
            await spoken_to.ended(name)
            return await spoken_to.out_of_memory(name)
        finally:
            await spoken_to.remove(name)
            await spoken_to.aclose()

    async def main() -> None:
        assert not await killed(DockerEngine(engine), signal.SIGKILL)
        assert not await killed(DockerEngine(engine), signal.SIGTERM)
        assert await ended_itself(DockerEngine(engine))

    asyncio.run(asyncio.wait_for(main(), BOUND_S))


@pytest.mark.parametrize("commands", [50, pytest.param(200, marks=pytest.mark.long)])
def test_many_commands_are_open_at_once_and_leave_nothing(engine: str, commands: int) -> None:
    async def main() -> None:
        await until(lambda: engine_threads() == 0)
        before = descriptors()
        spoken_to = DockerEngine(engine)
        async with one_container(spoken_to, pids=1000, memory_mb=1024) as name:
            begun = 0

            async def one() -> None:
                nonlocal begun
                command = ("sh", "-c", "echo begun; exec sleep 600")
                async with spoken_to.run(name, command, USER, WORK) as (_, output):
                    assert await output.read() == b"begun\n"
                    begun += 1
                    await output.drain()

            tasks = [asyncio.create_task(one()) for _ in range(commands)]
            await until(lambda: begun == commands, BOUND_S)
            assert descriptors() >= before + commands
            await until(lambda: engine_threads() <= CALLS)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert descriptors() <= before + 2 * CALLS
            assert await say(spoken_to, name, "echo still") == (b"still\n", 0)
        await until(lambda: engine_threads() == 0)
        assert descriptors() <= before

    asyncio.run(main())


def test_output_is_whole_once_its_command_has_ended(engine: str) -> None:
    async def main() -> None:
        spoken_to = DockerEngine(engine)
        async with one_container(spoken_to) as name:
            command = ("sh", "-c", "head -c 90000 /dev/zero; exit 3")
            async with spoken_to.run(name, command, USER, WORK) as (run, output):
                while await spoken_to.exit_code(run) is None:
                    await asyncio.sleep(0.05)
                read = 0
                while chunk := await output.read():
                    read += len(chunk)
            assert (read, await spoken_to.exit_code(run)) == (90_000, 3)

    asyncio.run(main())


def test_an_engine_that_stands_still_is_silent(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headrace.services.processes.docker.docker_engine, "CALL_S", 2)
    daemon = int(Path(engine.removeprefix("unix://")).with_name("pid").read_text())

    async def main() -> None:
        spoken_to = DockerEngine(engine)
        await spoken_to.info()
        os.kill(daemon, signal.SIGSTOP)
        try:
            with pytest.raises(InfrastructureError, match="engine_silent"):
                await spoken_to.info()
        finally:
            os.kill(daemon, signal.SIGCONT)
        assert (await spoken_to.info())["Driver"]
        await spoken_to.aclose()

    asyncio.run(main())


@asynccontextmanager
async def by_tls(path: str, certificates: Path) -> AsyncIterator[str]:
    """TLS in front of an engine's socket: the port."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(65536):
                writer.write(chunk)
                await writer.drain()
        except (ConnectionError, ssl.SSLError):
            pass
        finally:
            writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inside, to_inside = await asyncio.open_unix_connection(path)
        await asyncio.gather(pump(reader, to_inside), pump(inside, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=serving(certificates))
    try:
        yield str(server.sockets[0].getsockname()[1])
    finally:
        server.close()


def test_it_is_found_by_a_context_and_by_tls(
    engine: str, certificates: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = engine.removeprefix("unix://")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.delenv("DOCKER_HOST", raising=False)

    def docker(*arguments: str) -> None:
        command = [str(Path(path).parent / "engine/usr/bin/docker"), "context", *arguments]
        subprocess.run(command, check=True, capture_output=True)

    async def main() -> None:
        docker("create", "near", "--docker", f"host={engine}")
        docker("use", "near")
        near = DockerEngine()
        assert near.host == engine
        async with one_container(near) as name:
            assert await say(near, name, "echo near") == (b"near\n", 0)
        async with by_tls(path, certificates) as port:
            files = [f"{key}={certificates}/{key}.pem" for key in ("ca", "cert", "key")]
            host = f"host=tcp://127.0.0.1:{port}"
            docker("create", "far", "--docker", ",".join([host, *files]))
            docker("use", "far")
            far = DockerEngine()
            async with one_container(far) as name:
                said = await asyncio.gather(
                    *(say(far, name, f"head -c 200000 /dev/zero; exit {i}") for i in range(12))
                )
                assert said == [(bytes(200_000), code) for code in range(12)]

    asyncio.run(main())


HELPER = """#!/bin/sh
cat > /dev/null
echo '{"Username": "%s", "Secret": "%s"}'
"""


@pytest.mark.filterwarnings("ignore:docker-credential-none")
def test_an_image_is_pulled_with_the_credentials_of_a_helper(
    engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    helper = tmp_path / "docker-credential-test"
    helper.write_text(HELPER % (registry.USER, registry.PASSWORD))
    helper.chmod(0o755)

    async def pull(image: str, helpers: dict[str, str]) -> int:
        (tmp_path / "config.json").write_text(json.dumps({"credHelpers": helpers}))
        puller = DockerEngine(engine)
        try:
            await puller.pull(image)
            return len((await puller.image(image))["RootFS"]["Layers"])
        finally:
            await puller.aclose()

    async def main() -> None:
        async with asyncio.timeout(BOUND_S), registry.registry() as place:
            image, helpers = f"{place}/{registry.IMAGE}:1", {place: "test"}
            with pytest.raises(InfrastructureError, match=r"no basic auth credentials"):
                await pull(image, {})
            with pytest.raises(InfrastructureError, match=r"docker-credential-none not installed"):
                await pull(image, {place: "none"})
            with pytest.raises(InfrastructureError, match=r"pull_failed: .*manifest unknown"):
                await pull(f"{place}/{registry.IMAGE}:2", helpers)
            assert await pull(image, helpers) == 1

    asyncio.run(main())
