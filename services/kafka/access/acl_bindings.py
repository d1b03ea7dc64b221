"""Creates the ACLs of principals, finds those that are there, and deletes some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
)
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType

from headrace.services.kafka.broker import Permission
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.failures import answer_of, as_failure

A = TypeVar("A", bound=AclBinding)
ANSWER_S = 30.0
_ANY: Any = None
_KINDS: dict[str, Literal["TOPIC", "GROUP", "TRANSACTIONAL_ID"]] = {
    "TOPIC": "TOPIC",
    "GROUP": "GROUP",
    "TRANSACTIONAL_ID": "TRANSACTIONAL_ID",
}


def create_acls(settings: KafkaSettings, permissions: Sequence[Permission]) -> None:
    """Creates an ACL for each permission, with literal names. Those that exist stay. Blocks.

    Raises DependencyError if no broker answers within 30 s, if the brokers have no authorizer, or
    if this principal may not change ACLs.
    """
    with _administering(settings, "create") as admin:
        bindings = [_binding(one, AclBinding) for one in permissions]
        answers = admin.create_acls(bindings, request_timeout=ANSWER_S)
        for answer in answers.values():
            answer_of(answer, ANSWER_S)


def existing_acls(settings: KafkaSettings, principal: str) -> list[Permission]:
    """Returns what literal ACLs let a principal do, from any host. Blocks.

    ACLs that deny, those for one host and those with prefixes are left out: `create_acls` makes
    none. The errors are those of `create_acls`.
    """
    of_principal = AclBindingFilter(
        ResourceType.ANY,
        _ANY,
        ResourcePatternType.LITERAL,
        principal,
        "*",
        AclOperation.ANY,
        AclPermissionType.ALLOW,
    )
    with _administering(settings, "read") as admin:
        found = answer_of(admin.describe_acls(of_principal, request_timeout=ANSWER_S), ANSWER_S)
    return [
        Permission(one.principal, _KINDS[one.restype.name], one.name, one.operation.name)
        for one in found
        if one.restype.name in _KINDS
    ]


def delete_acls(settings: KafkaSettings, permissions: Sequence[Permission]) -> None:
    """Deletes the ACL of each permission. Blocks. The errors are those of `create_acls`."""
    with _administering(settings, "delete") as admin:
        filters = [_binding(one, AclBindingFilter) for one in permissions]
        answers = admin.delete_acls(filters, request_timeout=ANSWER_S)
        for answer in answers.values():
            answer_of(answer, ANSWER_S)


@contextmanager
def _administering(settings: KafkaSettings, doing: str) -> Iterator[AdminClient]:
    what = f"can't {doing} the ACLs at {settings.bootstrap_servers}; only a principal with `Alter` "
    with as_failure(f"{what}on the cluster may, and the brokers need an authorizer"):
        yield AdminClient(settings.admin())


def _binding(one: Permission, kind: type[A]) -> A:
    return kind(
        ResourceType[one.resource],
        one.name,
        ResourcePatternType.LITERAL,
        one.principal,
        "*",
        AclOperation[one.operation],
        AclPermissionType.ALLOW,
    )
