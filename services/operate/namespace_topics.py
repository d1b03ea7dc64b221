"""Finds topics of a namespace by the names that people use, and lists their partitions."""

from __future__ import annotations

from headrace.errors import UsageError
from headrace.schemas.topics import NamespaceTopic, Topics


def find_topic(topics: Topics, name: str) -> NamespaceTopic:
    """Returns the topic that `name` means: `results`, `batches.default`, or the full name.

    Raises UsageError if the namespace has no such topic. The message lists all its topics.
    """
    for topic in topics:
        if name in (topic.name, short_name(topic)):
            return topic
    of_policies = [topic for topic in topics if topic.topic.name == name]
    if len(of_policies) == 1:
        return of_policies[0]
    raise UsageError(
        f"namespace {topics.namespace} has no topic {name!r}; it has: "
        + ", ".join(map(short_name, topics))
    )


def short_name(topic: NamespaceTopic) -> str:
    """Returns a topic's name without namespace and version: `results`, `batches.default`."""
    return topic.topic.name if topic.policy is None else f"{topic.topic.name}.{topic.policy}"
