"""Finds out whether ACLs hide topics from this client.

A broker does not say which principal it takes a client for, and its list of topics leaves out those
that the client may not describe. But it answers a request about a hidden topic with an
authorization error, whether or not the topic exists. So we ask for every topic, and for one topic
of every prefix, that has an ACL, and for one that has none.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from uuid import uuid4

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBindingFilter, AclOperation, AclPermissionType
from confluent_kafka.admin._metadata import ClusterMetadata
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType

from headrace.services.kafka.failures import error_of

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
        acls = admin.describe_acls(TOPIC_ACLS, request_timeout=limit_s).result(limit_s)
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
            answer.result(limit_s)
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
