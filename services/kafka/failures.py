"""Converts librdkafka's error codes to Headrace's errors, with what to do."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException

from headrace.errors import DependencyError, Fenced, HeadraceError, UsageError

T = TypeVar("T")
HAND_OVER_S = 5.0
"""Longest time from librdkafka's answer to ours."""

FENCED = frozenset(
    {
        KafkaError._FENCED,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.PRODUCER_FENCED,
    }
)
"""Another process has this `transactional.id` now."""

LOST = frozenset(
    {
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError._ASSIGNMENT_LOST,
    }
)
"""The commit came too late: another member has the partitions now."""

TRANSIENT = frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
        KafkaError._WAIT_COORD,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.UNSTABLE_OFFSET_COMMIT,
    }
)
"""Temporary errors: worth a retry, for a bounded time."""

BEHIND = frozenset(
    {
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.NOT_COORDINATOR,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.UNKNOWN_LEADER_EPOCH,
    }
)
"""The temporary errors of a broker that does not lead a partition or a consumer group yet, but will
in a moment."""

UNKNOWN = frozenset(
    {
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
    }
)
"""A broker that has just started answers so for topics that it holds, for a moment."""

FINAL = UNKNOWN | {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    # A message's error never says that it is fatal, only its code does (confluent-kafka 2.16).
    KafkaError._FATAL,
    # librdkafka skips such records, or fetches them again and again.
    KafkaError._BAD_MSG,
    KafkaError._BAD_COMPRESSION,
    KafkaError._NOT_IMPLEMENTED,
    KafkaError.MSG_SIZE_TOO_LARGE,
}
"""Errors that a reader can't wait out."""
FINAL_FOR_MEMBERS = FINAL | {
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.GROUP_MAX_SIZE_REACHED,
    KafkaError.INCONSISTENT_GROUP_PROTOCOL,
    KafkaError.INVALID_GROUP_ID,
    KafkaError.INVALID_SESSION_TIMEOUT,
}
"""Errors that a member of a consumer group can't wait out. librdkafka also looks for the
coordinator of the group that a reader has and never joins: a reader needs no permission for it."""

_ADVICE = {
    KafkaError._ALL_BROKERS_DOWN: "is Kafka running there? See `headrace up`",
    KafkaError._TRANSPORT: "is Kafka running there? See `headrace up`",
    KafkaError._TIMED_OUT: "is Kafka running there, and not overloaded?",
    KafkaError._MSG_TIMED_OUT: "is Kafka running there, and not overloaded?",
    KafkaError._UNKNOWN_TOPIC: "the topic does not exist: apply the recipe first",
    KafkaError._UNKNOWN_PARTITION: "the partition does not exist: apply the recipe first",
    KafkaError.UNKNOWN_TOPIC_OR_PART: "the topic does not exist: apply the recipe first",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "grant this principal access to the topic",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "grant this principal access to the consumer group",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: (
        "grant this principal access to the cluster, or Write on a topic if it is to write"
    ),
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "grant this principal the transactional id",
    KafkaError.POLICY_VIOLATION: "the cluster's policy forbids this; see the brokers' log",
}
_USAGE = frozenset(
    {
        KafkaError._INVALID_ARG,
        KafkaError.INVALID_CONFIG,
        KafkaError.INVALID_PARTITIONS,
        KafkaError.INVALID_REPLICATION_FACTOR,
        KafkaError.POLICY_VIOLATION,
        KafkaError.TOPIC_EXCEPTION,
    }
)
_OURS = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.OFFSET_METADATA_TOO_LARGE})


def error_of(exception: KafkaException) -> KafkaError:
    """The error that a KafkaException wraps."""
    error = exception.args[0]
    assert isinstance(error, KafkaError)
    return error


def failure(what: str, error: KafkaError) -> HeadraceError:
    """The error to raise. `what` says what was tried, and on what."""
    code = error.code()
    advice = _ADVICE.get(code)
    message = f"{what}: {error.str()} ({error.name()}){f': {advice}' if advice else ''}"
    if code in FENCED:
        return Fenced(
            f"{what}: a newer process is this writer now, so this one must end ({error.name()})"
        )
    if code in _USAGE:
        return UsageError(message)
    return HeadraceError(message) if code in _OURS else DependencyError(message)


def answer_of(request: Future[T], limit_s: float) -> T:
    """Returns the answer to an admin request that has this time limit itself. Blocks.

    Raises KafkaException, also if librdkafka does not hand over its time-out in time.
    """
    try:
        return request.result(limit_s + HAND_OVER_S)
    except TimeoutError:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from None


@contextmanager
def as_failure(what: str) -> Iterator[None]:
    """Raises the `failure` of `what` in place of a KafkaException."""
    try:
        yield
    except KafkaException as exception:
        raise failure(what, error_of(exception)) from exception
