"""An engine behind a real sshd: sandboxes in it, many outputs at once, and lost connections."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import InfrastructureError
from headrace.services.processes.docker import ssh_forward
from headrace.services.processes.docker.docker_engine import DockerEngine
from tests import debian
from tests.sandboxes.bench import bench
from tests.sandboxes.ssh_server import SshServer, ssh_server
from tests.sandboxes.test_engine import one_container, say
from tests.unit.processes.docker_fake import START, descriptors, fake, says, streams, until
from tests.unit.processes.test_docker_output import WRITTEN
from tests.unit.processes.test_ssh_forward import ASKS

BOUND_S = 120.0
INFO = {"GET /info": says({"Name": "x"})}


@pytest.fixture
def server(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SshServer]:
    if reason := debian.why_not():
        pytest.skip(reason)
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # all workers use one
        shared = shared.parent
    folder = tmp_path / "ssh"
    folder.mkdir()
    with ssh_server(folder, shared / "openssh") as made:
        monkeypatch.setenv("PATH", f"{made.path}:{os.environ['PATH']}")
        yield made
        asyncio.run(until(lambda: not made.clients()))


def path_of(engine: str) -> str:
    return engine.removeprefix("unix://")


def test_sandboxes_of_an_engine_behind_ssh(engine: str, server: SshServer) -> None:
    async def main() -> None:
        async with bench(server.url(path_of(engine))) as made:
            environment = await made.fresh()
            said = await environment.step("echo far; echo $((6 * 7)) >&2; exit 3")
            assert "far\n" in said.text
            assert "42\n" in said.text
            assert said.data["exit_code"] == 3
            assert len(server.clients()) == 1
            await environment.aclose()
            assert await made.left() == []

    asyncio.run(asyncio.wait_for(main(), BOUND_S))


def test_a_context_names_a_host_of_ssh(
    engine: str, server: SshServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As newer versions of the command `docker` write it: Debian's takes no path of a socket."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    meta = tmp_path / "docker/contexts/meta" / hashlib.sha256(b"far").hexdigest() / "meta.json"
    meta.parent.mkdir(parents=True)
    endpoint = {"Host": server.url(path_of(engine)), "SkipTLSVerify": False}
    meta.write_text(json.dumps({"Name": "far", "Metadata": {}, "Endpoints": {"docker": endpoint}}))
    (tmp_path / "docker/config.json").write_text(json.dumps({"currentContext": "far"}))

    async def main() -> None:
        far = DockerEngine()
        assert far.host == server.url(path_of(engine))
        async with one_container(far) as name:
            said = await asyncio.gather(
                *(say(far, name, f"head -c 200000 /dev/zero; exit {i}") for i in range(12))
            )
            assert said == [(bytes(200_000), code) for code in range(12)]

    asyncio.run(asyncio.wait_for(main(), BOUND_S))


@pytest.mark.parametrize("outputs", [50, pytest.param(800, marks=pytest.mark.long)])
def test_many_outputs_share_one_connection(server: SshServer, tmp_path: Path, outputs: int) -> None:
    """More than the ten sessions that OpenSSH's server allows; this one allows none at all."""

    async def main() -> None:
        async with fake(tmp_path, {**INFO, START: streams(WRITTEN, ends=False)}) as (made, near):
            before = descriptors()
            engine = DockerEngine(server.url(path_of(near.host)))
            begun = 0

            async def one() -> None:
                nonlocal begun
                async with engine.run("a", ("sleep",), "1", "/") as (_, output):
                    assert await output.read()
                    begun += 1
                    await output.drain()

            tasks = [asyncio.create_task(one()) for _ in range(outputs)]
            await until(lambda: begun == outputs, BOUND_S)
            assert made.open >= outputs
            assert len(server.clients()) == 1
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert (await engine.info())["Name"] == "x"
            await engine.aclose()
            await until(lambda: made.open == 0)
            assert descriptors() <= before

    asyncio.run(asyncio.wait_for(main(), 2 * BOUND_S))


def test_a_host_behind_a_jump_host(server: SshServer, tmp_path: Path) -> None:
    async def main() -> None:
        async with fake(tmp_path, INFO) as (_, near):
            engine = DockerEngine(server.url(path_of(near.host), "jumped"))
            assert (await engine.info())["Name"] == "x"
            assert len(server.clients()) == 2
            await engine.aclose()
            assert not server.clients()

    asyncio.run(asyncio.wait_for(main(), BOUND_S))


def test_nobody_is_asked_for_a_jump_host(
    server: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `ssh` would open a window to ask whether the key is right."""
    window, opened = tmp_path / "window", tmp_path / "opened"
    window.write_text(f"#!/bin/sh\ntouch {opened}\n")
    window.chmod(0o755)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setenv("SSH_ASKPASS", str(window))
    server.forget()

    async def main() -> None:
        engine = DockerEngine(server.url("/run/docker.sock", "jumped"))
        with pytest.raises(InfrastructureError, match=r"Host key verification failed"):
            await engine.info()
        await engine.aclose()

    asyncio.run(asyncio.wait_for(main(), BOUND_S))
    assert not opened.exists()


def test_a_lost_connection_fails_and_comes_back(
    server: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_forward, "PAUSE_S", 0)

    async def main() -> None:
        async with fake(tmp_path, {**INFO, START: streams(WRITTEN, ends=False)}) as (_, near):
            engine = DockerEngine(server.url(path_of(near.host)))
            async with engine.run("a", ("sleep",), "1", "/") as (_, output):
                assert await output.read()
                for session in server.sessions():
                    session.kill()
                with pytest.raises(InfrastructureError, match="engine_unreachable"):
                    await output.drain()
            server.stop()
            await until(lambda: not server.clients())
            with pytest.raises(InfrastructureError, match=r"Connection refused"):
                await engine.info()
            server.start()
            async with asyncio.timeout(30):
                while True:
                    try:
                        assert (await engine.info())["Name"] == "x"
                        break
                    except InfrastructureError:
                        await asyncio.sleep(0.2)
            await engine.aclose()

    asyncio.run(asyncio.wait_for(main(), BOUND_S))


@pytest.mark.long
def test_a_server_that_stands_still_is_noticed(server: SshServer, tmp_path: Path) -> None:
    async def main() -> None:
        async with fake(tmp_path, {**INFO, START: streams(WRITTEN, ends=False)}) as (_, near):
            engine = DockerEngine(server.url(path_of(near.host)))
            async with engine.run("a", ("sleep",), "1", "/") as (_, output):
                assert await output.read()
                began = asyncio.get_running_loop().time()
                for session in server.sessions():
                    session.suspend()
                with pytest.raises(InfrastructureError, match="engine_unreachable"):
                    await output.drain()
                assert 5 < asyncio.get_running_loop().time() - began < 40
            assert (await engine.info())["Name"] == "x"
            await engine.aclose()

    asyncio.run(asyncio.wait_for(main(), BOUND_S))


def test_what_the_server_refuses_is_told(server: SshServer, tmp_path: Path) -> None:
    async def main() -> None:
        missing = DockerEngine(server.url(str(tmp_path / "missing.sock")))
        with pytest.raises(InfrastructureError, match=r"ssh said meanwhile: .*open failed"):
            await missing.info()
        await missing.aclose()
        server.forget()
        unknown = DockerEngine(server.url("/run/docker.sock"))
        with pytest.raises(InfrastructureError, match=r"Host key verification failed"):
            await unknown.info()
        await unknown.aclose()

    asyncio.run(asyncio.wait_for(main(), BOUND_S))


def test_a_killed_worker_leaves_no_connection(server: SshServer, tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()

    async def main() -> None:
        async with fake(tmp_path, INFO) as (_, near):
            worker = subprocess.Popen(
                [sys.executable, "-c", ASKS, server.url(path_of(near.host)),
                 str(tmp_path / "temporary")],
                stdout=subprocess.PIPE,
            )  # fmt: skip
            assert worker.stdout is not None
            with worker.stdout:
                assert await asyncio.to_thread(worker.stdout.readline) == b"x\n"
            assert len(server.clients()) == 1
            worker.send_signal(signal.SIGKILL)
            worker.wait()
            await until(lambda: not server.clients() and not server.sessions())
            assert not list((tmp_path / "temporary").iterdir())

    asyncio.run(asyncio.wait_for(main(), BOUND_S))
