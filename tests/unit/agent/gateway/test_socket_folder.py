"""The folder that an attempt shares with its containers: no other user of the host enters it."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.services.agent.gateway.container import (
    EPISODE,
    FOLDER,
    LIFELINE,
    socket_folder,
    sweep_folders,
)

OTHER = 54321
"""A user of the host that is not the worker's."""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files that everybody may use. A socket's path is at most 108 long."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def leave(path: Path) -> Path:
    """Makes what a worker leaves that is killed: a socket on which nobody listens."""
    (path / "shared").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path / "shared" / LIFELINE))
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_the_workers_user_enters_it(temporary: Path, umask: int) -> None:
    async def main() -> None:
        async with socket_folder(b"secret") as folder:
            server = await asyncio.start_unix_server(lambda _, __: None, folder.gateway)
            await folder.open()
            (private,) = temporary.iterdir()
            assert (private, mode(private)) == (folder.path.parent, 0o700)
            # The containers' users come by the engine's mount, not through the private folder.
            assert mode(folder.path) == 0o755
            assert mode(folder.path / EPISODE) == 0o644
            assert [mode(folder.path / name) for name in ("gateway", LIFELINE)] == [0o666] * 2
            if os.geteuid() == 0:
                read = ["cat", str(folder.path / EPISODE)]
                said = subprocess.run(read, user=OTHER, capture_output=True, check=False)
                assert (said.returncode, said.stdout) == (1, b"")
            server.close()

    before = os.umask(umask)
    try:
        asyncio.run(main())
    finally:
        os.umask(before)
    assert names(temporary) == []


def test_only_folders_of_the_workers_user_are_swept(temporary: Path) -> None:
    leave(temporary / f"{FOLDER}ours")
    target = leave(temporary / "target")
    (temporary / f"{FOLDER}link").symlink_to(target)
    expected = ["target", f"{FOLDER}link"]
    if os.geteuid() == 0:
        os.chown(leave(temporary / f"{FOLDER}theirs"), OTHER, OTHER)
        expected.append(f"{FOLDER}theirs")
    sweep_folders()
    assert names(temporary) == sorted(expected)
    assert names(target) == ["shared"]


def test_only_the_relay_is_held(temporary: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(10), socket_folder(b"") as folder:
            server = await asyncio.start_unix_server(lambda _, __: None, folder.gateway)
            await folder.open()
            path = folder.path / LIFELINE
            relay, said = await asyncio.open_unix_connection(path)
            said.write(b"ready\n")
            await folder.wait("image")
            for words in (b"", b"ready\n"):
                other, writer = await asyncio.open_unix_connection(path)
                writer.write(words)
                writer.write_eof()
                assert await other.read() == b""
                writer.close()
            await asyncio.to_thread(sweep_folders)
            await asyncio.sleep(0.1)
            assert not relay.at_eof()
            folder.close()
            assert await relay.read() == b""
            said.close()
            server.close()

    asyncio.run(main())
