"""Finds out what ACLs let this client see and do.

A broker does not say which principal it takes a client for, and its list of topics leaves out those
that the client may not describe. But it answers a request about a hidden topic with an
authorization error, whether or not the topic exists. So we ask for every topic, and for one topic
of every prefix, that has an ACL, and for one that has none.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBindingFilter, AclOperation, AclPermissionType
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._metadata import ClusterMetadata
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType

from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.failures import answer_of, as_failure, error_of

_ANY: Any = None
TOPIC_ACLS = AclBindingFilter(
    restype=ResourceType.TOPIC,
    name=_ANY,
    resource_pattern_type=ResourcePatternType.ANY,
    principal=_ANY,
    host=_ANY,
    operation=AclOperation.ANY,
    permission_type=AclPermissionType.ANY,
)
NAME_LIMIT = 249
"""The longest name of a topic."""


def sees_all(admin: AdminClient, visible: Collection[str], limit_s: float) -> bool:
    """Returns whether the list of topics has all topics. `visible` is that list.

    Returns False if the client may not read the ACLs. Raises KafkaException. Blocks.
    """
    try:
        acls = answer_of(admin.describe_acls(TOPIC_ACLS, request_timeout=limit_s), limit_s)
    except KafkaException as exception:
        match error_of(exception).code():
            case KafkaError.SECURITY_DISABLED:  # The brokers have no authorizer.
                return True
            case KafkaError.CLUSTER_AUTHORIZATION_FAILED:
                return False
        raise
    asked = {_topic_of(acl.resource_pattern_type, acl.name) for acl in acls} | {uuid4().hex}
    topics = TopicCollection(sorted(asked - set(visible)))
    answers = admin.describe_topics(topics, request_timeout=limit_s)
    for answer in answers.values():
        try:
            answer_of(answer, limit_s)
        except KafkaException as exception:
            match error_of(exception).code():
                case KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    return False
                case KafkaError.UNKNOWN_TOPIC_OR_PART:
                    continue
            raise
    return True


def _topic_of(pattern: ResourcePatternType, name: str) -> str:
    """Returns the name of a topic to which an ACL applies."""
    if pattern == ResourcePatternType.PREFIXED:
        return f"{name}{uuid4().hex}"[:NAME_LIMIT]
    return uuid4().hex if name == "*" else name


def has_leaders(metadata: ClusterMetadata, name: str) -> bool:
    """Whether a topic exists and each of its partitions has a leader."""
    topic = metadata.topics.get(name)
    return (
        topic is not None
        and topic.error is None
        and bool(topic.partitions)
        and all(partition.leader >= 0 for partition in topic.partitions.values())
    )


LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})
"""Addresses of brokers that run on this machine."""


@dataclass(frozen=True)
class ClusterView:
    """What a client sees of the brokers, and what it may do."""

    topics: dict[str, frozenset[str]]
    """Topic to the operations that the client may do, such as `READ`. Empty if it may not see it.
    """
    groups: dict[str, frozenset[str]]
    """Consumer group to the same."""


def view_cluster(
    settings: KafkaSettings, topics: Collection[str], groups: Collection[str], limit_s: float
) -> ClusterView:
    """Asks what the principal of these settings sees and may do. Blocks for some seconds at most.

    Raises DependencyError if no broker answers.
    """
    with as_failure("can't ask the brokers what this client may do"):
        admin = AdminClient(settings.admin())
        answers = admin.describe_topics(
            TopicCollection(sorted(topics)),
            include_authorized_operations=True,
            request_timeout=limit_s,
        )
        described = admin.describe_consumer_groups(
            sorted(groups), include_authorized_operations=True, request_timeout=limit_s
        )
        return ClusterView(
            {name: _operations(answer, limit_s) for name, answer in answers.items()},
            {name: _operations(answer, limit_s) for name, answer in described.items()},
        )


def _operations(answer: Future[Any], limit_s: float) -> frozenset[str]:
    """Returns the names of the permitted operations. What may not be seen permits nothing."""
    try:
        return frozenset(one.name for one in answer_of(answer, limit_s).authorized_operations or ())
    except KafkaException as exception:
        if error_of(exception).code() in _REFUSED:
            return frozenset()
        raise


_REFUSED = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
    }
)


def log_folders_here(settings: KafkaSettings, limit_s: float) -> tuple[str, ...]:
    """Returns where the brokers keep their records, if all of them run on this machine.

    Empty also if the principal of these settings may not ask. Blocks for some seconds at most.
    Raises DependencyError if no broker answers.
    """
    folders = list[str]()
    with as_failure("can't ask the brokers where they keep their records"):
        admin = AdminClient(settings.admin())
        brokers = admin.list_topics(timeout=limit_s).brokers
        if not {one.host for one in brokers.values()} <= LOCAL:
            return ()
        asked = [ConfigResource(ConfigResource.Type.BROKER, str(one)) for one in brokers]
        for answer in admin.describe_configs(asked, request_timeout=limit_s).values():
            try:
                entry = answer_of(answer, limit_s).get("log.dirs")
            except KafkaException:
                return ()  # not every principal may read it
            folders += entry.value.split(",") if entry is not None and entry.value else ()
    return tuple(folders)
