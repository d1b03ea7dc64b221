"""Small disks that can be full: memory file systems, mounted where only this process's kin see.

A disk is made full by shrinking it to little more than it holds, and free by growing it again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MIB = 1024 * 1024
ENCLOSED = "HEADRACE_CHAOS_ENCLOSED"
_UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def enclose() -> None:
    """Runs this command again in namespaces of its own, where the machine allows that.

    Mounts are seen only inside, and whatever was started ends with this process, `kill -9` of it
    and stopped processes included. Returns inside, and where it isn't allowed.
    """
    if ENCLOSED in os.environ:
        return
    for command in (_UNSHARE, (*_UNSHARE, "--user", "--map-root-user")):
        if shutil.which("unshare") and _works([*command, "true"]):
            os.environ[ENCLOSED] = "1"
            module = [sys.executable, "-m", "tests.chaos", *sys.argv[1:]]
            os.execvp(command[0], [*command, *module])


def enclosed() -> bool:
    """Whether mounts can be made here that nobody else sees."""
    return ENCLOSED in os.environ


def _works(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0


@dataclass
class Disk:
    """A memory file system of `size` bytes."""

    folder: Path
    size: int

    def mount(self) -> None:
        """Makes it, empty. The folder must be there."""
        options = f"size={self.size}"
        assert _mounted("-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)), self.folder

    def fill(self, left: int) -> None:
        """Leaves `left` bytes."""
        found = os.statvfs(self.folder)
        used = (found.f_blocks - found.f_bfree) * found.f_frsize
        # Refused where more than that was written in the meantime: then more is left.
        while not _mounted("-o", f"remount,size={used + left}", str(self.folder)):
            used += left

    def free(self) -> None:
        """All of its size is there again."""
        assert _mounted("-o", f"remount,size={self.size}", str(self.folder)), self.folder

    def unmount(self) -> None:
        """Removes it and what it holds."""
        subprocess.run(["umount", "--lazy", str(self.folder)], capture_output=True, check=False)


def _mounted(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0
