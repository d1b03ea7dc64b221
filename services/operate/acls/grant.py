"""Creates the ACLs of a run before it starts, with the administrator's credentials."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import replace

from headrace.schemas.topics import Topics
from headrace.services.kafka.broker import Permission
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.visibility import create_acls
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.credentials import ADMINISTRATOR
from headrace.services.operate.acls.acl_permissions import permissions, principals_of

PRINCIPAL = "User:headrace-{role}"
"""The principal of each role, unless a command names others."""


def permissions_of(
    topics: Topics, pattern: str = PRINCIPAL, roles: Collection[str] = ()
) -> dict[str, list[Permission]]:
    """Returns what each principal needs in a namespace. Roles of one principal may overlap.

    `pattern` and `roles` are those of `principals_of`, and so are the errors.
    """
    found: dict[str, dict[Permission, None]] = {}
    for role, name in principals_of(pattern, roles).items():
        found.setdefault(name, {}).update(dict.fromkeys(permissions(topics, role, name)))
    return {name: list(of_one) for name, of_one in found.items()}


def administrator_of(cluster: ClusterConfig) -> ClusterConfig | None:
    """Returns the cluster as its administrator sees it; None without the credentials for that."""
    folder = cluster.credentials
    if folder is None or not (folder / f"{ADMINISTRATOR}.properties").exists():
        return None
    return replace(cluster, role=ADMINISTRATOR)


async def grant_access(
    cluster: ClusterConfig, topics: Topics, services: Iterable[str] = ()
) -> None:
    """Creates the ACLs of all roles in a namespace, as the administrator.

    Does nothing without the administrator's credentials. Raises UsageError if one of the services
    that this machine is to run has no credentials, and DependencyError if the brokers refuse.
    """
    for service in services:
        replace(cluster, role=service).properties()
    if (administrator := administrator_of(cluster)) is None:
        return
    settings = KafkaSettings(
        str(cluster.bootstrap_servers), "headrace-acls", administrator.broker_properties()
    )
    wanted = [one for of_one in permissions_of(topics).values() for one in of_one]
    await asyncio.to_thread(create_acls, settings, wanted)
