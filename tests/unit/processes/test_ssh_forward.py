"""An engine behind SSH: one `ssh` carries all calls, starts again, and leaves nothing."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from headrace.errors import InfrastructureError, UsageError
from headrace.services.env.sandbox.sandbox import SandboxSettings
from headrace.services.processes.docker import ssh_forward
from headrace.services.processes.docker.docker_engine import DockerEngine
from headrace.services.processes.docker.hardened import read_limits
from headrace.services.processes.docker.ssh_forward import SshForward, SshHost, read_ssh_address
from tests.unit.processes import fake_ssh
from tests.unit.processes.docker_fake import (
    BOUND_S,
    START,
    FakeEngine,
    counts,
    descriptors,
    fake,
    says,
    streams,
    until,
)
from tests.unit.processes.test_docker_output import READ, WRITTEN, read_all

INFO = {"GET /info": says({"Name": "x"})}


class FakeSsh:
    """The program `ssh` of a test."""

    def __init__(self, folder: Path) -> None:
        self._does, self._log = folder / "does", folder / "log"
        self.temporary = folder
        self._log.touch()

    def does(self, what: str) -> None:
        self._does.write_text(what)

    @property
    def starts(self) -> list[list[str]]:
        """The pid and the arguments of each start."""
        return [line.split() for line in self._log.read_text().splitlines()]

    def left(self) -> list[Path]:
        """The folders of sockets."""
        return list(self.temporary.iterdir())

    def kill(self) -> None:
        os.kill(int(self.starts[-1][0]), signal.SIGKILL)

    def running(self) -> list[int]:
        return [pid for pid in (int(start[0]) for start in self.starts) if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSsh]:
    """The only `ssh` that is found. It forwards."""
    program = tmp_path / "bin/ssh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {fake_ssh.__file__} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SSH", str(tmp_path / "does"))
    monkeypatch.setenv("FAKE_SSH_LOG", str(tmp_path / "log"))
    made = FakeSsh(tmp_path)
    made.does("forwards")
    # The path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="headrace-") as temporary:
        made.temporary = Path(temporary)
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        yield made


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("ssh://far", SshHost("far", socket="/var/run/docker.sock")),
        ("ssh://far/", SshHost("far")),
        ("ssh://Me.1@Far-2.example.com:22", SshHost("Far-2.example.com", "Me.1", "22")),
        ("SSH://far:65535", SshHost("far", port="65535")),
        ("ssh://me@[::1]:2222", SshHost("::1", "me", "2222")),
        ("ssh://far/run/user/1000/d.sock", SshHost("far", socket="/run/user/1000/d.sock")),
    ],
)
def test_an_address_names_the_host_and_the_socket(url: str, host: SshHost) -> None:
    assert read_ssh_address(url) == host


@pytest.mark.parametrize(
    "url",
    [
        "ssh://", "ssh://me:secret@far", "ssh://-oProxyCommand=id", "ssh://-l@far", "ssh://far?a",
        "ssh://far/a:b", "ssh://far/%h", "ssh://far/${HOME}", "ssh://far:port", "ssh://a b",
        "ssh://far\n", "tcp://far",
    ],
)  # fmt: skip
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="the address is not ssh://USER@HOST:PORT/PATH"):
        read_ssh_address(url)


@pytest.mark.parametrize("port", ["0", "65536", "99999"])
def test_a_port_that_does_not_exist_is_refused(port: str) -> None:
    with pytest.raises(UsageError, match=f"DOCKER_HOST: .* has the port {port}, .* 1 to 65535"):
        DockerEngine(f"ssh://far:{port}")


@pytest.mark.parametrize(
    "url",
    [
        "ssh://me:secret@far", "SSH://me:secret@far", "ssh://me:se/cret@far", "ssh://me:se@cret@far",
        "ssh://me:se?cret@far", "ssh://me@far?password=secret", "ssh://me@far/secret:x",
        "ssh://me:secret/@far:1",
    ],
)  # fmt: skip
def test_no_error_shows_a_password(url: str) -> None:
    with pytest.raises(UsageError, match="can't have a password") as raised:
        DockerEngine(url)
    assert "cret" not in str(raised.value)
    with pytest.raises(UsageError, match="can't have a password") as raised:
        read_limits(SandboxSettings, {"image": "i", "hosts": [{"slots": 1, "url": url}]}, "o")
    assert "cret" not in str(raised.value)


def test_a_host_of_a_recipe_may_be_behind_ssh() -> None:
    def read(**host: object) -> SandboxSettings:
        return read_limits(SandboxSettings, {"image": "i", "hosts": [{"slots": 1, **host}]}, "o")

    assert read(url="ssh://me@far").hosts[0].url == "ssh://me@far"
    with pytest.raises(UsageError, match="can't have a password") as raised:
        read(url="ssh://me:secret@far")
    assert "secret" not in str(raised.value)
    with pytest.raises(UsageError, match="SSH protects the connection by itself"):
        read(url="ssh://me@far", tls="/x")


def test_one_ssh_carries_all_calls_and_outputs(ssh: FakeSsh, tmp_path: Path) -> None:
    async def main() -> None:
        async with fake(tmp_path, {**INFO, START: streams(WRITTEN)}) as (made, near):
            before = descriptors()
            engine = DockerEngine(f"ssh://me@far:2222{near.host.removeprefix('unix://')}")
            assert not engine.local
            told = await asyncio.gather(*(engine.info() for _ in range(8)))
            assert [each["Name"] for each in told] == ["x"] * 8
            async with engine.run("a", ("true",), "1", "/") as (run, output):
                assert await read_all(output) == READ
            assert await engine.exit_code(run) == 0
            made.answers[START] = counts(300_000)
            async with engine.run("a", ("wc",), "1", "/", io.BytesIO(bytes(300_000))) as (
                _,
                output,
            ):
                assert await read_all(output) == [(1, b"300000")]
            (start,) = ssh.starts
            assert {"BatchMode=yes", "ControlPath=none", "ServerAliveInterval=5"} < set(start)
            assert start[-6:] == ["-l", "me", "-p", "2222", "--", "far"]
            (folder,) = ssh.left()
            assert folder.stat().st_mode & 0o077 == 0
            await engine.aclose()
            assert not ssh.running()
            assert not ssh.left()
            await until(lambda: made.open == 0)
            await until(lambda: descriptors() <= before)

    asyncio.run(asyncio.wait_for(main(), BOUND_S))


def on_ssh(
    ssh: FakeSsh, tmp_path: Path, test: Callable[[FakeEngine, DockerEngine], object], path: str = ""
) -> None:
    async def main() -> None:
        async with fake(tmp_path, {**INFO, START: streams(WRITTEN, ends=False)}) as (made, near):
            engine = DockerEngine(f"ssh://far{path or near.host.removeprefix('unix://')}")
            try:
                await test(made, engine)  # type: ignore[misc]
            finally:
                await engine.aclose()
        assert not ssh.left()

    asyncio.run(asyncio.wait_for(main(), BOUND_S))


def test_a_command_whose_connection_is_lost_has_not_ended(
    ssh: FakeSsh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether ssh runs again by then or not: nobody takes the lost output for the command's end."""
    monkeypatch.setattr(ssh_forward, "PAUSE_S", 0)

    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        for reconnected in (False, True):
            async with engine.run("a", ("sleep",), "1", "/") as (_, output):
                assert await output.read()
                ssh.kill()
                if reconnected:
                    await until(lambda: not ssh.running() and not ssh.left())
                    await engine.info()
                with pytest.raises(InfrastructureError, match="engine_unreachable"):
                    await output.drain()
        assert (await engine.info())["Name"] == "x"
        assert len(ssh.starts) == 3
        assert len(ssh.left()) == 1

    on_ssh(ssh, tmp_path, test)


def test_an_engine_that_ssh_does_not_reach_says_why(ssh: FakeSsh, tmp_path: Path) -> None:
    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        with pytest.raises(
            InfrastructureError,
            match=r"engine_unreachable: .*\(ssh said meanwhile: .*connect failed: not there\)",
        ):
            await engine.info()

    on_ssh(ssh, tmp_path, test, "/run/not/there.sock")


def test_what_ssh_complains_of_is_told_and_it_is_not_started_again_at_once(
    ssh: FakeSsh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh.does("me@far: Permission denied (publickey).")
    now = 100.0
    monkeypatch.setattr(ssh_forward, "_time", lambda: now)

    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        nonlocal now
        refused = await asyncio.gather(*(engine.info() for _ in range(9)), return_exceptions=True)
        assert {str(each) for each in refused} == {
            "engine_unreachable: ssh ended with exit code 1 (banner; me@far: Permission denied "
            "(publickey).). Try this command as the user of the worker. It must stay silent; end "
            "it with Ctrl-C: ssh -N -o BatchMode=yes -o ControlPath=none -- far"
        }
        assert len(ssh.starts) == 1
        ssh.does("forwards")
        now += 2 * ssh_forward.PAUSE_S
        assert (await engine.info())["Name"] == "x"

    on_ssh(ssh, tmp_path, test)


def test_an_ssh_that_soon_ends_is_not_started_again_at_once(
    ssh: FakeSsh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh.does("warns")
    chances: list[tuple[float, float]] = []

    def chance(least: float, most: float) -> float:
        chances.append((least, most))
        return most

    monkeypatch.setattr("random.uniform", chance)
    now = 100.0
    monkeypatch.setattr(ssh_forward, "_time", lambda: now)

    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        nonlocal now
        assert (await engine.info())["Name"] == "x"
        ssh.kill()
        await until(lambda: not ssh.running() and not ssh.left())
        ended = r"ssh connected and soon ended \(this server is slow\). A call that comes 6 s"
        for later in (0.0, 3.0, 5.9):
            now = 100.0 + later
            with pytest.raises(InfrastructureError, match=ended):
                await engine.info()
        assert len(ssh.starts) == 1
        now = 106.0
        assert (await engine.info())["Name"] == "x"
        assert len(ssh.starts) == 2
        assert chances == [(1, 2)] * 2

    on_ssh(ssh, tmp_path, test)


def test_an_ssh_that_hangs_is_ended(
    ssh: FakeSsh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_forward, "START_S", 5.0)
    monkeypatch.setattr(ssh_forward, "PAUSE_S", 0)
    ssh.does("hangs")

    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        with pytest.raises(InfrastructureError, match="ssh has not connected in 5 s"):
            await engine.info()
        assert len(ssh.starts) == 1
        assert not ssh.running()
        monkeypatch.setattr(ssh_forward, "START_S", 60.0)
        asking = asyncio.create_task(engine.info())
        await until(lambda: len(ssh.starts) == 2)
        began = time.monotonic()
        await engine.aclose()
        with pytest.raises(InfrastructureError, match="engine_closed"):
            await asking
        assert time.monotonic() - began < 5
        assert not ssh.running()

    on_ssh(ssh, tmp_path, test)


def test_a_cancelled_caller_leaves_no_ssh(
    ssh: FakeSsh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it waits for, also if it is cancelled while it ends ssh."""
    monkeypatch.setattr(ssh_forward, "PAUSE_S", 0)

    async def cancel(turns: int) -> None:
        before = descriptors()
        forward = SshForward(SshHost("far", socket=str(tmp_path / "engine.sock")))
        Path(await forward.require()).unlink()
        asking = asyncio.create_task(forward.require())
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled()
        await forward.require()
        assert len(ssh.running()) == 1
        await forward.aclose()
        assert not ssh.running()
        assert not ssh.left()
        await until(lambda: descriptors() <= before)

    async def main() -> None:
        for turns in (1, 2, 3, 6):
            await cancel(turns)

    asyncio.run(asyncio.wait_for(main(), BOUND_S))


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5])
def test_a_caller_who_is_cancelled_twice_leaves_no_ssh(
    ssh: FakeSsh, tmp_path: Path, turns: int
) -> None:
    """The second time while it ends an ssh that hangs."""
    ssh.does("hangs")

    async def main() -> None:
        before = descriptors()
        forward = SshForward(SshHost("far"))
        asking = asyncio.create_task(forward.require())
        await until(lambda: len(ssh.starts) == 1)
        asking.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
        await forward.aclose()
        assert not ssh.running()
        assert not ssh.left()
        await until(lambda: descriptors() <= before)
        with pytest.raises(InfrastructureError, match="engine_closed"):
            await forward.require()
        assert len(ssh.starts) == 1

    asyncio.run(asyncio.wait_for(main(), BOUND_S))


def test_a_killed_guard_leaves_no_folder(ssh: FakeSsh, tmp_path: Path) -> None:
    async def main() -> None:
        forward = SshForward(SshHost("far"))
        await forward.require()
        guard = psutil.Process(int(ssh.starts[0][0])).parent()
        assert guard is not None
        guard.kill()
        await until(lambda: not ssh.running())
        assert ssh.left()
        await forward.aclose()
        assert not ssh.left()

    asyncio.run(asyncio.wait_for(main(), BOUND_S))


def test_no_ssh_is_an_error_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ssh: FakeSsh
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        with pytest.raises(InfrastructureError, match="can't run ssh: No such file"):
            await engine.info()

    on_ssh(ssh, tmp_path, test)


ASKS = """
import asyncio, sys, tempfile
from headrace.services.processes.docker.docker_engine import DockerEngine

async def main():
    tempfile.tempdir = sys.argv[2]
    print((await DockerEngine(sys.argv[1]).info())["Name"], flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_killed_worker_leaves_no_ssh(ssh: FakeSsh, tmp_path: Path) -> None:
    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ASKS, engine.host, str(ssh.temporary)),
            stdout=subprocess.PIPE,
        )
        assert worker.stdout is not None
        assert await worker.stdout.readline() == b"x\n"
        assert ssh.running()
        assert ssh.left()
        worker.kill()
        await worker.wait()
        await until(lambda: not ssh.running() and not ssh.left())

    on_ssh(ssh, tmp_path, test)
