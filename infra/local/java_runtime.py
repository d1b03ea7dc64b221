"""What the Java processes of both servers have in common: flags and start-up archives.

A start-up archive (Java's AOT cache, JEP 483 and 514) contains the loaded and linked classes of a
server. It shortens a start from 2.5 to 0.9 s (measured on 2 cores). A Java process writes it when
it ends, which takes 6 to 8 s, once for a cache folder. Java ignores an archive that does not fit.
Virtual environments with the same Java share it.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ARCHIVES_KEPT = 4  # of each server: checkouts may have several versions of Java or of the jars
_QUICK = "-XX:TieredStopAtLevel=1"
"""Switches Java's optimizing compiler off. With it Kafka needs about half as much CPU, once what
runs often is compiled. That takes 5 s of CPU, which the stack of a test doesn't get back."""
_FLAGS = (
    "-XX:+UseSerialGC",
    "-XX:ActiveProcessorCount=2",
    # A server that ends is noticed. One that goes on with an exhausted heap is not.
    "-XX:+ExitOnOutOfMemoryError",
    "-XX:-UsePerfData",
    "-Xlog:aot*=off",
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
)


@dataclass(frozen=True, slots=True)
class JavaRuntime:
    """How to run one server: all of its command line that is the same for every stack."""

    java: Path
    class_path: tuple[Path, ...]
    flags: tuple[str, ...]
    archive: Path  # may not exist yet
    recording: Path | None  # where this run writes an archive when it ends

    def command(self, folder: Path, name: str, arguments: Sequence[str]) -> list[str]:
        """Returns a command line. Temporary files and crash reports go to `folder`."""
        flags = [f"-Djava.io.tmpdir={folder / 'tmp' / name}"]
        flags.append(f"-XX:ErrorFile={folder / 'logs' / f'{name}-crash-%p.log'}")
        if self.recording:
            flags.append(f"-XX:AOTCacheOutput={self.recording}")
        elif self.archive.exists():
            flags.append(f"-XX:AOTCache={self.archive}")
        class_path = ":".join(map(str, self.class_path))
        return [str(self.java), *self.flags, *flags, "-cp", class_path, *arguments]


def prepare(
    name: str,
    java: Path,
    class_path: tuple[Path, ...],
    heap: tuple[str, ...],
    cache: Path,
    *,
    may_record: bool,
    lasting: bool = False,
) -> JavaRuntime:
    """Returns the runtime of the server `name`.

    With `may_record`, it records a start-up archive if there is none yet. A `lasting` server
    optimizes its code while it runs.
    """
    # Java uses an archive only with the command line and the build of Java that wrote it, but for
    # its compiler. One that was recorded with the optimizing compiler costs 1.5 s CPU more a start.
    fit = "\n".join([_build(java), *map(str, class_path), *heap, *_FLAGS, _QUICK])
    archives = archives_folder(cache)
    archives.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(fit.encode()).hexdigest()[:16]
    archive = archives / f"{name}-{digest}.aot"
    recording = None
    if may_record and not archive.exists():
        recording = archives / f"{name}-{digest}.{uuid.uuid4().hex[:8]}.recording"
    flags = (*heap, *_FLAGS) if lasting else (*heap, *_FLAGS, _QUICK)
    return JavaRuntime(java, class_path, flags, archive, recording)


def archives_folder(cache: Path) -> Path:
    """Returns the folder of the start-up archives."""
    return cache / "archives"


def _build(java: Path) -> str:
    """Returns what tells a build of Java from others, or its path if that can't be found out."""
    home = java.parent.parent
    try:
        sizes = [(home / "lib" / name).stat().st_size for name in ("modules", "server/libjvm.so")]
        return f"{(home / 'release').read_text()}{sizes}"
    except OSError:
        return str(java)


def keep_recording(recording: Path, *, whole: bool) -> None:
    """Keeps a recorded archive if it is `whole`, and otherwise deletes it."""
    name = recording.name.split(".")[0]
    if whole and recording.exists():
        recording.replace(recording.with_name(f"{name}.aot"))
        server = name.rpartition("-")[0]
        archives = sorted(
            recording.parent.glob(f"{server}-*.aot"),
            key=lambda archive: archive.stat().st_mtime,
            reverse=True,
        )
        for surplus in archives[_ARCHIVES_KEPT:]:
            surplus.unlink(missing_ok=True)
    for left in recording.parent.glob(f"{recording.name}*"):
        left.unlink(missing_ok=True)
