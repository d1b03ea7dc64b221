"""A Chromium: the machine's own, or one that is unpacked from Debian's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.infra.local.detached import locked

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
# The headless shell has the pages' engine without the browser around it, which costs CPU time.
PACKAGES = ("chromium-headless-shell", "fonts-dejavu-core")
UNPACK_S = 300.0
# Without the flags about the network it looks for updates, which a closed network refuses.
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip

FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
<dir>/usr/share/fonts</dir>
<dir>{folder}/usr/share/fonts</dir>
<cachedir>{folder}/fonts-cache</cachedir>
</fontconfig>
"""
"""The machine's fonts and the unpacked ones. Text without a font has no size."""


@dataclass(frozen=True)
class Chromium:
    """A program, and what its environment needs."""

    path: Path
    environment: Mapping[str, str] = field(default_factory=dict)


def why_not() -> str:
    """Why no Chromium can be had here; empty if it can."""
    if any(shutil.which(name) for name in NAMES):
        return ""
    if os.geteuid() != 0 or shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return (
            "the tests of the dashboard's page need Chromium. Install it (`apt install chromium`); "
            "as root on Debian the tests unpack one themselves"
        )
    return ""


def find_chromium(shared: Path) -> Chromium:
    """The machine's Chromium, or one that is unpacked once into the folder `shared`."""
    for name in NAMES:
        if found := shutil.which(name):
            return Chromium(Path(found))
    with locked(shared.with_suffix(".lock"), UNPACK_S):
        if not shared.exists():
            _unpack(shared.with_suffix(".unfinished")).rename(shared)
    libraries = [path for path in shared.glob("usr/lib/*-linux-gnu") if path.is_dir()]
    folders = [
        *libraries,
        *(each for path in libraries for each in path.iterdir() if each.is_dir()),
    ]
    return Chromium(
        shared / "usr/lib/chromium/chromium-headless-shell",
        {
            "LD_LIBRARY_PATH": os.pathsep.join(map(str, folders)),
            "FONTCONFIG_FILE": str(shared / "fonts.conf"),
        },
    )


def _unpack(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    archives = folder / "archives"
    (archives / "partial").mkdir(parents=True)
    # Downloads what the machine lacks, and no more.
    command = [
        "apt-get", "install", "-q", "-y", "--download-only", "--no-install-recommends",
        "-o", f"Dir::Cache::archives={archives}", "-o", "APT::Sandbox::User=root",
        "-o", "Debug::NoLocking=true", *PACKAGES,
    ]  # fmt: skip
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    if first.returncode:  # a new machine may have no lists, or old ones
        subprocess.run(["apt-get", "update", "-q"], check=True, capture_output=True)
        again = subprocess.run(command, capture_output=True, text=True, check=False)
        assert again.returncode == 0, f"apt-get could not get Chromium: {again.stderr[-2000:]}"
    for package in archives.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)
    shutil.rmtree(archives)
    (folder / "fonts.conf").write_text(FONTS.format(folder=folder.with_suffix("")))
    return folder
