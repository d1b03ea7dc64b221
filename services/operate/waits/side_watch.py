"""What the log of a run does not show: full disks, missing weights, and errors in local logs."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.infra.local.detached import ProcessId
from headrace.schemas.events import PolicyPublished
from headrace.services.kafka.access.visibility import log_folders_here
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.models.blobs import BlobStore
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.operate.waits.heard_workers import LifeRecord
from headrace.services.operate.waits.run_facts import SideProblem

FULL_BYTES = 64 * 1024 * 1024
"""A disk with less free space is called full: the next weights may not fit."""
TAIL_BYTES = 65_536
"""The end of each log that is read."""
CHARACTERS = 300
ASK_S = 5.0
"""Longest time of a request to the brokers."""
STATE = "state folder"
BROKER = "broker's folder"
_ERROR = re.compile(
    r"\S+Z (?:ERROR|CRITICAL) +\S+ (?P<logged>.*)|(?:error: |\w+(?:Error|Exception): )(?P<last>.*)"
)


class SideWatch:
    """Looks at this machine and at the blob store. All methods block."""

    def __init__(self, cluster: ClusterConfig, namespace: str, blobs: BlobStore | None) -> None:
        """Without `blobs`, no weights are looked for."""
        self._cluster = cluster
        self._namespace = namespace
        self._blobs = blobs
        self._since: dict[tuple[str, str], float] = {}
        self._ended: dict[str, float] = {}
        self._of_broker: dict[str, Path] | None = None
        """Folders of the broker. None: it was not asked yet, or did not answer."""

    def problems(self, versions: Iterable[PolicyPublished], now: float) -> list[SideProblem]:
        """Returns what is wrong now, since it was first seen. `versions`: the newest ones."""
        found = [*self._disks(now), *self._weights(versions, now)]
        known = {(one.kind, one.name) for one in found}
        self._since = {key: at for key, at in self._since.items() if key in known}
        return found

    def _first(self, kind: str, name: str, now: float) -> float:
        return self._since.setdefault((kind, name), now)

    def folders(self) -> dict[str, Path]:
        """Returns the folders on this machine in which a run or its broker writes, by what they
        hold."""
        folders = {STATE: self._cluster.state.absolute()}
        if "://" not in self._cluster.blob_url:
            folders["blob store"] = Path(self._cluster.blob_url).absolute()
        return folders | self._broker_folders()

    def _broker_folders(self) -> dict[str, Path]:
        if self._of_broker is None and self._cluster.bootstrap_servers:
            settings = KafkaSettings(
                self._cluster.bootstrap_servers, "headrace-disks", self._cluster.broker_properties()
            )
            try:
                found = log_folders_here(settings, ASK_S)
            except HeadraceError:
                return {}  # that it does not answer is seen elsewhere
            # Only the broker of a local stack has a relative folder: below the state folder.
            folders = [self._cluster.state.absolute() / folder for folder in found]
            self._of_broker = {
                BROKER + (f" {number + 1}" if number else ""): folder
                for number, folder in enumerate(one for one in folders if one.exists())
            }
        return self._of_broker or {}

    def _disks(self, now: float) -> Iterator[SideProblem]:
        for what, folder in self.folders().items():
            free = free_bytes(folder)
            if free is not None and free < FULL_BYTES:
                name, of_broker = f"disk of the {what}", what.startswith(BROKER)
                kind = "broker" if of_broker else "disk"
                yield SideProblem(
                    kind, name, self._first(kind, name, now),
                    f"the disk of the {what} {folder} is full: {free / 2**20:,.1f} MiB are free, "
                    f"so {'records' if of_broker else 'weights and checkpoints'} "
                    "can't be written",
                    "free space there. `headrace prune` removes what no run needs",
                )  # fmt: skip

    def _weights(self, versions: Iterable[PolicyPublished], now: float) -> Iterator[SideProblem]:
        if self._blobs is None:
            return
        for one in versions:
            name = f"weights of {one.policy} version {one.version}"
            try:
                gone = [blob for blob in one.weight_blobs() if not self._blobs.holds(blob)]
            except (HeadraceError, OSError) as error:
                yield SideProblem(
                    "blobs", "blob store", self._first("blobs", "blob store", now),
                    f"the blob store does not answer: {error}",
                    "see whether it runs, and whether its address and its keys are right",
                )  # fmt: skip
                return
            if gone:
                yield SideProblem(
                    "weights", name, self._first("weights", name, now),
                    f"the blob store {self._cluster.blob_url} lacks {len(gone)} blobs of version "
                    f"{one.version} of {one.policy}, the first one {gone[0].sha256.hex()}",
                    "put the blobs back, or restart the trainer: from its checkpoint it stores "
                    "its newest weights again",
                    one.policy,
                )  # fmt: skip

    def ended(self, lives: Iterable[LifeRecord], now: float) -> dict[str, float]:
        """Returns the workers whose processes have gone from this machine, since it was first seen.

        A container may have the name of this machine and other numbers of processes. So nothing is
        said unless the process of another worker of the run is found here.
        """
        host, ended = socket.gethostname(), list[str]()
        processes = {one.worker: _process_of(one) for one in lives if one.host == host}
        if any(_is_ours(number) for number in processes.values()):
            ended = [
                name
                for name, number in processes.items()
                if number and ProcessId.of(number) is None
            ]
        self._ended = {name: self._ended.get(name, now) for name in ended}
        return dict(self._ended)

    def errors(self) -> dict[str, str]:
        """Returns the newest error in the log of each service of the run on this machine."""
        found = {}
        for log in sorted((self._cluster.folder(self._namespace) / "logs").glob("*.log")):
            if (error := last_error(log)) is not None:
                found[re.sub(r"-\d+$", "", log.stem)] = error
        return found


def _process_of(life: LifeRecord) -> int:
    """Returns the number of a worker's process. 0: its id has none."""
    number = life.worker.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def _is_ours(process: int) -> bool:
    """Whether a process of this machine is Headrace's."""
    try:
        return b"headrace" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def free_bytes(folder: Path) -> int | None:
    """Returns the free space of a folder's disk. None if neither it nor a parent is there."""
    for one in (folder, *folder.parents):
        if one.exists():
            return shutil.disk_usage(one).free
    return None


def last_error(log: Path) -> str | None:
    """Returns the newest error in the end of a log, or None."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        if (found := _ERROR.match(line)) is not None:
            return (found["logged"] or found["last"])[:CHARACTERS]
    return None
