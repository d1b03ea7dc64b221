"""Makes the ACLs of a namespace from the table of who may do what."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from headrace.errors import UsageError
from headrace.schemas.topics import TRAJECTORIES, Topics
from headrace.services.kafka.broker import Permission
from headrace.services.namespace.access_table import ACCESS, Access

_PRINCIPAL = re.compile(r"[A-Za-z]+:[^\s*]+")


def principals_of(pattern: str, roles: Collection[str]) -> dict[str, str]:
    """Returns the principal of each role. No roles means all.

    Raises UsageError if the pattern is no principal, or has no `{role}` and all roles are meant.
    """
    if not _PRINCIPAL.fullmatch(pattern.replace("{role}", "role")):
        raise UsageError(
            f"{pattern!r} can't be a principal: write it as User:NAME, without spaces and *"
        )
    if not roles and "{role}" not in pattern:
        raise UsageError(
            f"{pattern} would be the principal of every role: add {{role}} to it, or name the "
            "roles that it has with --role"
        )
    return {role: pattern.replace("{role}", role) for role in roles or ACCESS}


def permissions(topics: Topics, role: str, principal: str) -> list[Permission]:
    """Returns what the principal of a role needs in a namespace, and nothing more.

    Each permission names one topic, group or transactional id in full. Raises KeyError if there is
    no such role.
    """
    access = ACCESS[role]
    found = [
        Permission(principal, "TOPIC", topic.name, operation)
        for topic in topics
        for operation in _operations(access, topic.topic.name)
    ]
    if TRAJECTORIES in access.reads:
        found += [
            Permission(principal, "TOPIC", TRAJECTORIES.real_name(other), "READ")
            for other in sorted(topics.reads_from - {topics.namespace})
        ]
    for names, operation in ((access.joins, "READ"), (access.sees, "DESCRIBE")):
        found += [
            Permission(principal, "GROUP", f"{topics.namespace}.{name}", operation)
            for name in names
        ]
    found += [
        Permission(principal, "TRANSACTIONAL_ID", name, "WRITE")
        for name in transactional_ids(access, topics)
    ]
    return found


def transactional_ids(access: Access, topics: Topics) -> list[str]:
    """Returns the full names of the transactional ids that a role may use."""
    return [
        f"{topics.namespace}.{name.format(policy=policy)}"
        for name in access.transactions
        for policy in (topics.policies if "{policy}" in name else ("",))
    ]


def _operations(access: Access, topic: str) -> Iterator[str]:
    reads = topic in {one.name for one in access.reads}
    writes = topic in {one.name for one in access.writes}
    if reads:
        yield "READ"
    if writes:
        yield "WRITE"
    if not reads and not writes:  # Kafka derives it from either.
        yield "DESCRIBE"
    yield from access.manages
