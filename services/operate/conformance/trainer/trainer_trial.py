"""Runs a trainer's command against known batches, with and without kills, and judges it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.recipe.recipe import Recipe
from headrace.services.models.blob_owners import owner_name
from headrace.services.models.weights import read_entries
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import Connection
from headrace.services.operate.acls.grant import grant_access
from headrace.services.operate.conformance.conformance_report import (
    ConformanceReport,
    check_rules,
    rules_of,
)
from headrace.services.operate.conformance.trainer.fed_namespace import (
    TICK_S,
    FedNamespace,
    fed_namespace,
)
from headrace.services.operate.conformance.trainer.observed_run import ObservedRun
from headrace.services.operate.conformance.trainer.stranger_process import StrangerProcess
from headrace.services.operate.conformance.trainer.trainer_rules import TrainerRules

POISON, LAST = 4, 7
"""The version whose batch can't be trained on, and the last version."""
IDLE_S = 1.0
"""Seconds of idleness after which a trainer is killed once."""
FENCED_S = 10.0
"""Seconds in which a fenced trainer must not publish."""


class GaveUp(Exception):
    """A run can't go on. The reason is among its failures."""


@dataclass
class TrainerTrial:
    """The trial of one command."""

    connection: Connection
    cluster: ClusterConfig
    """Has the addresses of broker and registry."""
    recipe: Recipe
    policy: str
    command: Sequence[str]
    folder: Path
    """For the trainer's files and output."""
    limit_s: float
    """Seconds that a version may take, the start of the process included."""
    say: Callable[[str], None]

    async def run(self) -> ConformanceReport:
        """Runs the command in two or three namespaces, and judges what it did."""
        self.say("one run without kills")
        straight, first, step_s = await self._straight("straight")
        killed, distance, spread = None, 0.0, 0.0
        if not straight.failures:
            self.say("one run with kills")
            killed, second = await self._killed(step_s)
            if not killed.failures and not _alike(straight, killed):
                self.say("one more run without kills, because the weights differ")
                _, third, _ = await self._straight("again")
                distance, spread = weights_distance(first, second), weights_distance(first, third)
        rules = rules_of(TrainerRules(straight, killed, POISON, LAST, spread, distance))
        return await asyncio.to_thread(check_rules, "trainer", " ".join(self.command), rules)

    async def _straight(self, name: str) -> tuple[ObservedRun, bytes, float]:
        """Returns the run, its last weights, and the seconds that a version took."""
        loop = asyncio.get_running_loop()
        seconds: list[float] = []

        async def act(fed: FedNamespace, process: StrangerProcess) -> None:
            await self._until(fed, process, 0)
            for version in range(1, LAST + 1):
                began = loop.time()
                await fed.feed(version, poison=version == POISON)
                try:
                    await self._until(fed, process, version)
                except GaveUp:
                    await self._look_further(fed, process, version)
                    raise
                seconds.append(loop.time() - began)

        run, weights = await self._trial(name, act)
        return run, weights, min(seconds, default=0.0)

    async def _killed(self, step_s: float) -> tuple[ObservedRun, bytes]:
        async def act(fed: FedNamespace, process: StrangerProcess) -> None:
            await self._until(fed, process, 0)
            await _again(process)  # as soon as version 0 is there
            await fed.feed(1)
            await asyncio.sleep(step_s / 2)
            await _again(process)  # in the middle of version 1
            await self._until(fed, process, 1)
            await fed.feed(2)
            await self._until(fed, process, 2)
            await _again(process)  # as soon as version 2 is there: perhaps before its checkpoint
            await fed.feed(3)
            await self._until(fed, process, 3)
            await asyncio.sleep(IDLE_S)
            await _again(process)  # while it waits for a batch
            await fed.feed(POISON, poison=True)
            await self._until(fed, process, POISON)
            await _again(process)  # as soon as it skipped a batch
            await fed.feed(5)
            await self._until(fed, process, 5)
            await self._fence(fed, process)
            await self._until(fed, process, 6)
            await fed.feed(LAST)
            await self._until(fed, process, LAST)

        return await self._trial("killed", act)

    async def _look_further(
        self, fed: FedNamespace, process: StrangerProcess, version: int
    ) -> None:
        """Writes the batch after a version that did not come, in case the trainer skipped that."""
        if process.code is None and version < LAST:
            await fed.feed(version + 1, poison=version + 1 == POISON)
            await self._until(fed, process, version + 1)

    async def _fence(self, fed: FedNamespace, process: StrangerProcess) -> None:
        """Fences the trainer, writes the next batch, and starts the trainer again."""
        await fed.fence()
        await fed.feed(6)
        with suppress(TimeoutError):  # It may live on, as long as it publishes nothing.
            await asyncio.wait_for(process.ended(), FENCED_S)
        fed.run.fenced = ""
        if fed.newest >= 6:
            fed.run.fenced = "it published version 6 after another trainer had taken over"
        await _again(process)

    async def _until(self, fed: FedNamespace, process: StrangerProcess, version: int) -> None:
        """Waits for a version. Raises GaveUp if it does not come."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self.limit_s
        while fed.newest < version:
            if process.code is not None:
                fed.run.failures.append(
                    f"it ended with exit code {process.code} before version {version}: its output "
                    f"is in {process.output}"
                )
                raise GaveUp
            if loop.time() > ends_at:
                fed.run.failures.append(
                    f"version {version} did not come within {self.limit_s:g} s: its output is in "
                    f"{process.output}"
                )
                raise GaveUp
            await asyncio.sleep(TICK_S)

    async def _trial(
        self, name: str, act: Callable[[FedNamespace, StrangerProcess], Awaitable[None]]
    ) -> tuple[ObservedRun, bytes]:
        prefix = self.cluster.namespace or "conformance"
        namespace = f"{prefix}-{uuid.uuid4().hex[:8]}-{name}"
        folder = self.folder / name
        (folder / "work").mkdir(parents=True)
        async with fed_namespace(self.connection, self.recipe, self.policy, namespace) as fed:
            await grant_access(self.cluster, fed.log.topics)
            process = StrangerProcess(
                self.command, folder / "work", self._variables(namespace), folder / "output"
            )
            try:
                await process.start()
                with suppress(GaveUp):
                    await act(fed, process)
                fed.run.stopped_after_s, fed.run.left_behind = await process.terminate()
            finally:
                await process.kill()
            await asyncio.sleep(IDLE_S)  # So what it published at last is seen.
            owner = owner_name(await self.connection.broker.cluster_id(), namespace)
            blobs = self.cluster.open_blobs(owner)
            weights = await asyncio.to_thread(fed.collect, blobs, folder)
        return fed.run, weights

    def _variables(self, namespace: str) -> dict[str, str]:
        """Returns the variables that say where to connect."""
        cluster = self.cluster
        properties = (f"{name}={value}" for name, value in cluster.kafka_properties.items())
        return {
            "HEADRACE_BOOTSTRAP_SERVERS": cluster.bootstrap_servers or "",
            "HEADRACE_REGISTRY_URL": cluster.registry_url or "",
            "HEADRACE_NAMESPACE": namespace,
            "HEADRACE_STATE": str(cluster.state.absolute()),
            "HEADRACE_BLOBS": cluster.blobs or str((cluster.state / "blobs").absolute()),
            "HEADRACE_KAFKA_PROPERTIES": " ".join(properties),
            "HEADRACE_CREDENTIALS": str(cluster.credentials or ""),
        }


async def _again(process: StrangerProcess) -> None:
    """Kills the process with SIGKILL and starts it again."""
    await process.kill()
    await process.start()


def _alike(run: ObservedRun, other: ObservedRun) -> bool:
    """Whether both runs have the same versions with the same weights."""
    one, two = (
        {version: each.event.digest for version, each in each_run.effective().items()}
        for each_run in (run, other)
    )
    return one == two


def weights_distance(weights: bytes, other: bytes) -> float:
    """Returns |a - b| / |a| over all floats of two safetensors files; 1 if they don't match."""
    a, b = _floats(weights), _floats(other)
    if a.shape != b.shape or not len(a):
        return 1.0
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(a)), 1e-30))


def _floats(weights: bytes) -> NDArray[np.float64]:
    parts = []
    for entry in read_entries(weights).values() if weights else ():
        data = weights[entry.start : entry.end]
        if entry.dtype == "BF16":  # the upper half of a float32
            wide = np.frombuffer(data, "<u2").astype("<u4") << 16
            parts.append(wide.view("<f4").astype(np.float64))
        elif entry.dtype in ("F16", "F32", "F64"):
            parts.append(np.frombuffer(data, f"<f{int(entry.dtype[1:]) // 8}").astype(np.float64))
    return np.concatenate(parts) if parts else np.zeros(0)
