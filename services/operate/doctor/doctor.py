"""Runs all checks, and then reads what the run waits for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from headrace.errors import HeadraceError, UsageError
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.base.clock import now
from headrace.services.kafka.access.visibility import view_cluster
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.log.event_log import EventLog
from headrace.services.namespace.apply import CONSUMERS
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import connect, locate
from headrace.services.namespace.lookup import find_namespace
from headrace.services.namespace.run_life import RunLife
from headrace.services.operate.doctor import cluster_checks, machine_checks
from headrace.services.operate.doctor.finding import Finding
from headrace.services.operate.waits.side_watch import SideWatch
from headrace.services.operate.waits.wait_graph import Wait, likely_cause, spell_s, wait_lines
from headrace.services.operate.waits.waits_reader import reading_waits

ASK_S = 5.0
"""Longest time of a request to the brokers."""
REPORTS_S = 1.5
"""Each worker reports its load in this time."""
LONG_S, STALLED_S = 10.0, 60.0
"""Something that keeps others waiting for so long is a warning, and then a problem."""


@dataclass
class Diagnosis:
    """What the doctor has found."""

    findings: list[Finding] = field(default_factory=list)
    at: float = 0.0
    waits: list[Wait] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """The wait graph as text. Empty: no run goes on."""

    @property
    def has_problem(self) -> bool:
        """Whether anything keeps a run from working."""
        return any(one.state == "problem" for one in self.findings)

    def to_tree(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {
            "findings": [asdict(one) for one in self.findings],
            "at": self.at,
            "waits": [asdict(one) for one in self.waits],
        }


async def diagnose(cluster: ClusterConfig, recipe: Recipe | None) -> Diagnosis:
    """Looks at this machine, the cluster and the run of `cluster.namespace`, or else the newest.

    `recipe` is that of a run that has not begun yet. Takes some seconds, or a minute if a log can't
    be read, and writes nothing.
    """
    found = Diagnosis(at=time.time())
    try:
        cluster = locate(cluster)
        name = cluster.namespace or (recipe.name if recipe is not None else None)
        await _of_cluster(cluster, name, recipe, found)
    except HeadraceError as error:
        found.findings.append(Finding("kafka", "problem", str(error)))
        # No broker is asked a second time.
        await _of_machine(
            replace(cluster, bootstrap_servers=None, registry_url=None), recipe, {}, found
        )
    return found


async def _of_cluster(
    cluster: ClusterConfig, name: str | None, recipe: Recipe | None, found: Diagnosis
) -> None:
    async with connect(cluster, "doctor") as connection:
        found.findings.append(Finding("kafka", "ok", f"{cluster.bootstrap_servers} answers"))
        assert cluster.registry_url is not None
        found.findings.append(
            await asyncio.to_thread(
                cluster_checks.registry, cluster.registry_url, cluster.registry_properties()
            )
        )
        store = await asyncio.to_thread(cluster.open_blobs, None)
        found.findings.append(
            await asyncio.to_thread(cluster_checks.blobs, store, cluster.blob_url)
        )
        try:
            topics, life = await find_namespace(connection, name)
        except UsageError as error:
            found.findings.append(Finding("run", "ok", str(error)))
            await _of_machine(cluster, recipe, {}, found)
            return
        log = connection.log(topics)
        await _permissions(cluster, log, found)
        recorded = {} if life.started is None else life.started.versions
        recipe = life.recipe()
        await _of_machine(cluster, recipe, recorded, found)
        for check in (
            cluster_checks.clocks(log),
            cluster_checks.retention(log, recipe),
            cluster_checks.dead_letters(log),
        ):
            found.findings.append(await _checked(check))
        if life.state != "ended":
            side = SideWatch(cluster, topics.namespace, store)
            await _waits(log, life, recipe, side, found)


async def _checked(check: Awaitable[Finding]) -> Finding:
    try:
        return await check
    except HeadraceError as error:
        return Finding("kafka", "problem", str(error))


async def _permissions(cluster: ClusterConfig, log: EventLog, found: Diagnosis) -> None:
    settings = KafkaSettings(
        str(cluster.bootstrap_servers), "headrace-doctor", cluster.broker_properties()
    )
    existing = await log.broker.list_topics()
    hidden = [topic.name for topic in log.topics if topic.name not in existing]
    groups = [f"{log.topics.namespace}.{service}" for service in CONSUMERS]
    names = [topic.name for topic in log.topics]
    try:
        view = await asyncio.to_thread(view_cluster, settings, names, groups, ASK_S)
    except HeadraceError as error:
        found.findings.append(Finding("permissions", "warning", str(error)))
        return
    for name in hidden:
        view.topics.setdefault(name, frozenset())
    found.findings += cluster_checks.permissions(view, log.topics)


async def _of_machine(
    cluster: ClusterConfig,
    recipe: Recipe | None,
    recorded: Mapping[str, str],
    found: Diagnosis,
) -> None:
    folders = await asyncio.to_thread(SideWatch(cluster, "", None).folders)
    found.findings.append(await asyncio.to_thread(machine_checks.packages, recorded))
    found.findings += machine_checks.disks(folders)
    if (memory := machine_checks.memory()) is not None:
        found.findings.append(memory)
    found.findings.append(await asyncio.to_thread(machine_checks.gpu, recipe))


async def _waits(
    log: EventLog, life: RunLife, recipe: Recipe, side: SideWatch, found: Diagnosis
) -> None:
    async with reading_waits(log, recipe, side) as reader:
        if reader.obstacle:
            found.findings.append(
                Finding("waits", "warning", f"they are not known: {reader.obstacle}")
            )
            return
        await asyncio.sleep(REPORTS_S)
        found.waits = await reader.waits()
    found.at = now()
    found.lines = wait_lines(found.waits, found.at)
    cause = likely_cause(found.waits)
    age_s = 0.0 if cause is None else found.at - cause.since
    if cause is not None and cause.busy:
        found.findings.append(
            Finding("waits", "ok", f"{cause.name} works, for {spell_s(age_s)}: {cause.cause}")
        )
    elif cause is not None and (age_s > LONG_S or cause.kind == "run"):
        found.findings.append(
            Finding(
                "waits",
                "problem" if age_s > STALLED_S else "warning",
                f"{cause.name}, for {spell_s(age_s)}: {cause.cause}",
                cause.help[:1].upper() + cause.help[1:],
            )
        )
    else:
        found.findings.append(Finding("waits", "ok", "nothing has waited for long"))
