"""What both servers' Java processes have in common: flags, and start-up archives.

A start-up archive (Java's AOT cache, JEP 483 and 514) holds the classes of a server loaded and
linked. It takes a start from 2.5 to 0.9 s (measured, 2 cores) and is written by a Java process as
it ends, which takes 6 to 8 s, once for a cache folder. Java ignores an archive that doesn't fit.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ARCHIVES_KEPT = 4  # a server; one for each Java runtime, which a virtual environment has its own
_FLAGS = (
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:ActiveProcessorCount=2",
    # Half dead of an exhausted heap is worse than dead: dead is noticed.
    "-XX:+ExitOnOutOfMemoryError",
    "-XX:-UsePerfData",
    "-Xlog:aot*=off",
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
)


@dataclass(frozen=True, slots=True)
class JavaRuntime:
    """How to run one server: everything of its command line that doesn't vary by stack."""

    java: Path
    class_path: tuple[Path, ...]
    heap: tuple[str, ...]
    archive: Path  # may not exist yet
    recording: Path | None  # where this run writes an archive as it ends

    def command(self, folder: Path, name: str, arguments: Sequence[str]) -> list[str]:
        """A command line whose temporary files and crash reports stay below `folder`."""
        flags = [f"-Djava.io.tmpdir={folder / 'tmp' / name}"]
        flags.append(f"-XX:ErrorFile={folder / 'logs' / f'{name}-crash-%p.log'}")
        if self.recording:
            flags.append(f"-XX:AOTCacheOutput={self.recording}")
        elif self.archive.exists():
            flags.append(f"-XX:AOTCache={self.archive}")
        class_path = ":".join(map(str, self.class_path))
        return [str(self.java), *self.heap, *_FLAGS, *flags, "-cp", class_path, *arguments]


def prepare(
    name: str,
    java: Path,
    class_path: tuple[Path, ...],
    heap: tuple[str, ...],
    cache: Path,
    *,
    may_record: bool,
) -> JavaRuntime:
    """The runtime of the server `name`, recording a start-up archive if there is none yet."""
    # Java takes an archive only under the very command line and runtime that wrote it.
    fit = "\n".join([str(java), *map(str, class_path), *heap, *_FLAGS])
    archives = cache / "archives"
    archives.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(fit.encode()).hexdigest()[:16]
    archive = archives / f"{name}-{digest}.aot"
    recording = None
    if may_record and not archive.exists():
        recording = archives / f"{name}-{digest}.{uuid.uuid4().hex[:8]}.recording"
    return JavaRuntime(java, class_path, heap, archive, recording)


def keep_recording(recording: Path, *, whole: bool) -> None:
    """Keep a recorded archive if its Java process ended by itself, or else delete it."""
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
