"""Gives the principals of a run their ACLs and quotas, with the administrator's credentials."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from headrace.errors import UsageError
from headrace.schemas.topics import TRAJECTORIES, Topics
from headrace.services.kafka.access.acl_bindings import create_acls, delete_acls, existing_acls
from headrace.services.kafka.broker import Permission
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.credentials import ADMINISTRATOR
from headrace.services.operate.acls.acl_permissions import permissions, principals_of
from headrace.services.operate.acls.principal_quotas import (
    Quotas,
    quota_changes,
    wanted_quotas,
)

PRINCIPAL = "User:headrace-{role}"
"""The principal of each role, unless a command names others."""


@dataclass(frozen=True)
class Grants:
    """What the principals of a namespace get."""

    namespace: str
    permissions: Mapping[str, list[Permission]]
    """Principal to what it may do."""
    quotas: Mapping[str, Quotas]
    """Principal to its quotas. Principals without quotas are absent."""
    given: Mapping[str, int | None] = field(default_factory=dict)
    """The quotas that do not come from the table. None: no quota."""

    @classmethod
    def of(
        cls,
        topics: Topics,
        pattern: str = PRINCIPAL,
        roles: Collection[str] = (),
        given: Mapping[str, int | None] | None = None,
    ) -> Grants:
        """Returns what roles need in a namespace. Roles of one principal may overlap.

        `pattern` and `roles` are those of `principals_of`, and so are the errors.
        """
        principals = principals_of(pattern, roles)
        found: dict[str, dict[Permission, None]] = {}
        for role, name in principals.items():
            found.setdefault(name, {}).update(dict.fromkeys(permissions(topics, role, name)))
        return cls(
            topics.namespace,
            {name: list(of_one) for name, of_one in found.items()},
            wanted_quotas(principals, given or {}),
            given or {},
        )

    @property
    def every(self) -> list[Permission]:
        """All permissions of all principals."""
        return [one for of_one in self.permissions.values() for one in of_one]


def give_access(settings: KafkaSettings, grants: Grants) -> dict[str, dict[str, float | None]]:
    """Creates the ACLs and sets the quotas. Returns the quotas that changed, by user. Blocks.

    Raises DependencyError if the brokers refuse, and UsageError if there are quotas to set and the
    package aiokafka is missing.
    """
    create_acls(settings, grants.every)
    if not grants.quotas and not grants.given:
        return {}
    try:
        from headrace.services.kafka.access.client_quotas import change_quotas, read_quotas
    except ImportError as error:
        raise UsageError(
            "the ACLs are there, but quotas need the package aiokafka: "
            "pip install 'headrace[stream]', and do it again"
        ) from error

    async def change() -> dict[str, dict[str, float | None]]:
        current = await read_quotas(settings)
        changes = quota_changes(grants.quotas, grants.given, grants.permissions, current)
        if changes:
            await change_quotas(settings, changes)
        return changes

    return asyncio.run(change())


def surplus_acls(settings: KafkaSettings, grants: Grants) -> list[Permission]:
    """Returns what the principals may do in the namespace beyond what they need. Blocks.

    The errors are those of `create_acls`.
    """
    existing = [one for name in grants.permissions for one in existing_acls(settings, name)]
    return surplus_of(existing, grants)


def surplus_of(existing: Iterable[Permission], grants: Grants) -> list[Permission]:
    """Returns those of the existing permissions in the namespace that are not needed."""
    mine, needed = f"{grants.namespace}.", set(grants.every)
    return sorted(one for one in existing if one.name.startswith(mine) and one not in needed)


def for_other_runs(one: Permission) -> bool:
    """Whether a run that reads this one (`reads_from`) may need a permission. It is never pruned.

    `headrace acls` gives it to the principals of that run, which may be the same as those here.
    """
    return (
        one.operation in ("READ", "DESCRIBE")
        and one.resource == "TOPIC"
        and one.name.endswith(TRAJECTORIES.real_name(""))
    )


def prune_acls(settings: KafkaSettings, grants: Grants) -> list[Permission]:
    """Deletes the `surplus_acls` that are not `for_other_runs`, and returns all of them.

    Blocks. Deletes no quotas.
    """
    surplus = surplus_acls(settings, grants)
    if deleted := [one for one in surplus if not for_other_runs(one)]:
        delete_acls(settings, deleted)
    return surplus


def administrator_of(cluster: ClusterConfig) -> ClusterConfig | None:
    """Returns the cluster as its administrator sees it; None without the credentials for that."""
    folder = cluster.credentials
    if folder is None or not (folder / f"{ADMINISTRATOR}.properties").exists():
        return None
    return replace(cluster, role=ADMINISTRATOR)


async def grant_access(
    cluster: ClusterConfig, topics: Topics, services: Iterable[str] = ()
) -> None:
    """Gives all roles of a namespace their ACLs and quotas, as the administrator.

    Does nothing without the administrator's credentials. Raises UsageError if one of the services
    that this machine is to run has no credentials, and the errors of `give_access`.
    """
    for service in services:
        replace(cluster, role=service).properties()
    if (administrator := administrator_of(cluster)) is None:
        return
    settings = KafkaSettings(
        str(cluster.bootstrap_servers), "headrace-acls", administrator.broker_properties()
    )
    await asyncio.to_thread(give_access, settings, Grants.of(topics))
