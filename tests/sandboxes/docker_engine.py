"""A private Docker engine and an image for it, of Debian's packages alone.

Nothing is installed: the packages are unpacked into the test's folder. The engine has a socket and
data of its own, no bridge and no firewall rules, and ends with the tests, killed or not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headrace.infra.local.detached import locked
from tests.debian import download, unpack

ENGINE = ("docker.io", "containerd", "runc", "tini")
PYTHON = (
    "busybox-static", "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib",
    "libc6", "zlib1g", "libexpat1", "libffi8", "libssl3", "libbz2-1.0", "liblzma5", "libuuid1",
    "libgcc-s1", "libcrypt1", "libsqlite3-0", "libtinfo6",
)  # fmt: skip
APPLETS = (
    "sh", "cat", "sleep", "ls", "timeout", "id", "ps", "mkdir", "rm", "grep", "head", "tail", "dd",
    "mount", "umount", "wget", "nc", "ping", "chmod", "chown", "mknod", "ln", "find", "env", "yes",
    "su", "unshare", "nsenter", "chroot", "date", "hostname", "kill", "touch", "cp", "wc", "tr",
    "tar", "mkfifo", "tee",
)  # fmt: skip
IMAGE = "headrace-python"
WRAPPED = "wrapped"
"""A runtime of the engine that is runc, in a program of which Headrace knows nothing."""
REMAPPED = "daemon", 300_000
"""The user of an engine with user namespaces, and the host's id of root in its containers."""
START_S = 90.0
UNPACK_S = 300.0


def why_not() -> str:
    """Why no engine can be had here; empty where it can."""
    if os.geteuid() != 0:
        return "a private Docker engine needs root"
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return "a private Docker engine is unpacked from Debian's packages, and this is no Debian"
    return ""


@contextmanager
def docker_engine(folder: Path, shared: Path) -> Iterator[str]:
    """A running engine that has IMAGE; its DOCKER_HOST.

    What it is unpacked from is in the folder `shared`, and made if that does not exist.
    """
    # One at a time: apt-get refuses to update its lists twice at once.
    with locked(shared.with_suffix(".lock"), UNPACK_S):
        if not shared.exists():
            make_unpacked(shared.with_suffix(".unfinished")).rename(shared)
    for name in ("engine", "root.tar"):
        (folder / name).symlink_to(shared / name)
    with _running(folder, folder) as host:
        yield host


def make_unpacked(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    packages = folder / "packages"
    packages.mkdir(parents=True)
    download(packages, [*ENGINE, *PYTHON])
    unpack(packages, ENGINE, folder / "engine")
    unpack(packages, PYTHON, folder / "root")
    _pack(folder / "root", folder / "root.tar")
    shutil.rmtree(packages)
    return folder


@contextmanager
def remapped_engine(unpacked: Path) -> Iterator[str]:
    """As `docker_engine`, with user namespaces. `unpacked` is the folder of another engine."""
    user, first = REMAPPED
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o711)  # the user of its containers must reach the data
        ids = folder / "ids"
        ids.write_text(f"{user}:{first}:65536\n")
        # In a mount namespace of its own, so that the machine's files stay as they are.
        mounts = ""
        for path in (Path("/etc/subuid"), Path("/etc/subgid")):
            path.touch()
            mounts += f"mount --bind {ids} {path}\n"
        own = ("unshare", "--mount", "sh", "-ec", f'{mounts}exec "$@"', "sh")
        with _running(folder, unpacked, own, (f"--userns-remap={user}",)) as host:
            yield host


@contextmanager
def second_engine(unpacked: Path) -> Iterator[str]:
    """As `docker_engine`. `unpacked` is the folder of another engine."""
    with tempfile.TemporaryDirectory() as name, _running(Path(name), unpacked) as host:
        yield host


@contextmanager
def btrfs_engine(unpacked: Path) -> Iterator[str]:
    """As `docker_engine`, with its data on btrfs, whose driver limits root file systems."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        packages = folder / "packages"
        packages.mkdir()
        download(packages, ["btrfs-progs"])
        unpack(packages, ("btrfs-progs",), folder / "btrfs-progs")
        (folder / "data").mkdir()
        disk = folder / "disk"
        with disk.open("wb") as file:
            file.truncate(2 << 30)
        make = str(folder / "btrfs-progs/sbin/mkfs.btrfs")
        subprocess.run([make, "-q", str(disk)], check=True, capture_output=True)
        # The mount ends with the engine, because it is in a mount namespace of its own.
        mount = f'mount -o loop {disk} {folder}/data\nexec "$@"'
        own = ("unshare", "--mount", "sh", "-ec", mount, "sh")
        with _running(folder, unpacked, own, ("--storage-driver=btrfs",)) as host:
            yield host


@contextmanager
def _running(
    folder: Path, unpacked: Path, before: Sequence[str] = (), options: Sequence[str] = ()
) -> Iterator[str]:
    host, log = f"unix://{folder}/docker.sock", folder / "dockerd.log"
    client = (str(unpacked / "engine/usr/bin/docker"), "--host", host)
    environment = {
        **os.environ,
        "PATH": f"{unpacked}/engine/usr/sbin:{unpacked}/engine/usr/bin:"
        "/usr/sbin:/usr/bin:/sbin:/bin",
    }
    wrapped = folder / "wrapped"
    wrapped.write_text('#!/bin/sh\nexec runc "$@"\n')
    wrapped.chmod(0o755)
    arguments = [
        # Ended with the process that runs the tests, however that ends.
        *("setpriv", "--pdeathsig", "TERM", *before, str(unpacked / "engine/usr/sbin/dockerd")),
        *("--host", host, "--data-root", str(folder / "data")),
        *("--exec-root", str(folder / "exec"), "--pidfile", str(folder / "pid")),
        *("--bridge=none", "--iptables=false", "--ip6tables=false", "--log-level=warn"),
        *("--add-runtime", f"{WRAPPED}={wrapped}", *options),
    ]
    with log.open("wb") as out:
        daemon = subprocess.Popen(arguments, env=environment, stdout=out, stderr=out)
    try:
        _wait(daemon, client, log)
        subprocess.run(
            [*client, "import", str(unpacked / "root.tar"), f"{IMAGE}:latest"],
            check=True, capture_output=True, timeout=300,
        )  # fmt: skip
        yield host
    finally:
        daemon.terminate()
        try:
            daemon.wait(60)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _wait(daemon: subprocess.Popen[bytes], client: Sequence[str], log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and daemon.poll() is None:
        if subprocess.run([*client, "version"], capture_output=True, check=False).returncode == 0:
            return
        time.sleep(0.2)
    raise AssertionError(f"dockerd did not start: {log.read_text(errors='replace')[-3000:]}")


def _pack(root: Path, tar: Path) -> None:
    """Makes the image's archive: a Python and a busybox, and nothing that is setuid."""
    for folder in ("workspace", "tmp", "proc", "sys", "dev", "etc", "run", "usr/bin"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "usr/bin/python3").symlink_to("python3.11")
    for applet in APPLETS:
        if not (root / "bin" / applet).exists():
            (root / "bin" / applet).symlink_to("busybox")
    (root / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\n")
    # A setuid copy, for a probe: no-new-privileges must make it useless.
    shutil.copy(root / "bin/busybox", root / "bin/setuid-busybox")
    (root / "bin/setuid-busybox").chmod(0o4755)
    for unneeded in ("usr/share/doc", "usr/share/man", "usr/share/locale"):
        shutil.rmtree(root / unneeded, ignore_errors=True)
    with tarfile.open(tar, "w") as archive:
        archive.add(root, arcname=".")
