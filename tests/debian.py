"""Programs of Debian's packages, unpacked into a test's folder. Nothing is installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from headrace.infra.local.detached import locked

UNPACK_S = 300.0


def why_not() -> str:
    """Why packages can't be unpacked here; empty where they can."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return "the program is unpacked from Debian's packages, and this is no Debian"
    return ""


def unpacked(names: Sequence[str], shared: Path) -> Path:
    """The folder `shared`, with these packages unpacked into it by the first test that asks."""
    # One at a time: apt-get refuses to update its lists twice at once.
    with locked(shared.with_suffix(".lock"), UNPACK_S):
        if not shared.exists():
            unfinished = shared.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            packages = unfinished / "packages"
            packages.mkdir(parents=True)
            download(packages, list(names))
            unpack(packages, names, unfinished)
            shutil.rmtree(packages)
            unfinished.rename(shared)
    return shared


def download(folder: Path, packages: list[str]) -> None:
    command = ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", *packages]
    first = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if first.returncode:  # a new machine may have no lists, or old ones
        subprocess.run(["apt-get", "update", "-q"], check=True, capture_output=True)
        again = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert again.returncode == 0, f"apt-get download failed: {again.stderr[-2000:]}"


def unpack(packages: Path, names: Sequence[str], folder: Path) -> None:
    for name in names:
        (package,) = packages.glob(f"{name}_*.deb")
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)
