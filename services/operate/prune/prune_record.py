"""Records in `audit` what prune is about to remove, before it removes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from headrace.schemas.topics import AUDIT
from headrace.services.models.blob_owners import owner_name
from headrace.services.namespace.connect import Connection
from headrace.services.namespace.lookup import find_namespace, namespaces_in, topics_in
from headrace.services.operate.audit.audit_trail import operation
from headrace.services.operate.prune.needs import Prunable


def recorded_in(
    items: Sequence[Prunable], cluster: str, existing: Mapping[str, int], newest: str
) -> list[str]:
    """Returns the namespaces that record a prune: all that stay and lose something.

    If there is none, it is `newest`, which stays and may be empty. So a namespace that is removed
    is recorded in another one. Namespaces of earlier versions have no topic for it. Pure.
    """
    forgotten = _forgotten(items)
    staying = [
        name
        for name in namespaces_in(existing)
        if name not in forgotten and AUDIT.real_name(name) in existing
    ]
    owners = {one.owner for item in items if item.removal for one in item.removal.markers}
    paths = [item.path for item in items if item.kind == "checkpoints" and item.path is not None]
    folders = {path.parent.parent.name for path in paths}  # <namespace>/cluster-<id>/checkpoints
    losing = [name for name in staying if name in folders or owner_name(cluster, name) in owners]
    return losing or [name for name in staying if name == newest]


def _forgotten(items: Sequence[Prunable]) -> set[str]:
    return {item.what.removesuffix(".*") for item in items if item.topics}


async def record_prune(connection: Connection, items: Sequence[Prunable]) -> list[str]:
    """Records a prune of these items. Returns the namespaces in which it is recorded.

    Raises DependencyError or another error of the broker if one of them can't be written: then
    nothing may be removed.
    """
    if not items:
        return []
    existing, forgotten = await connection.broker.list_topics(), _forgotten(items)
    staying = set(namespaces_in(existing)) - forgotten
    newest = ""
    if staying:
        topics, _ = await find_namespace(
            connection,
            None,
            lambda life: life.started is not None and life.started.namespace in staying,
        )
        newest = topics.namespace
    cluster = await connection.broker.cluster_id()
    names = recorded_in(items, cluster, existing, newest)
    counts = Counter(item.kind for item in items)
    details = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    if forgotten:
        details += f"; forgotten: {', '.join(sorted(forgotten))}"
    details += f"; {sum(item.size for item in items):,} bytes"
    for name in names:
        log = await connection.writing_log(topics_in(existing, name))
        await log.send(operation("prune", name, details))
    return names
