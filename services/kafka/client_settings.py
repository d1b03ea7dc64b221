"""Every librdkafka property that Headrace sets, and why. No other module sets any.

The names and meanings are librdkafka's (its CONFIGURATION.md). A user's own `properties`, for
example for security, override these, except for those that the broker contract depends on.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.errors import UsageError
from headrace.services.kafka.broker import MAX_MESSAGE_BYTES

MEANINGS = {
    "CONNWARN": "a connection to a broker looks wrong",
    "ERROR": "the Kafka client found an error",
    "FAIL": "a connection to a broker failed, and the client connects again",
    "GETPID": "the broker is not ready for transactions yet, and the client asks again",
    "REQTMOUT": "a broker did not answer in time, and the client asks again",
}
"""What librdkafka's kinds of messages mean."""


class _ClientLogFilter(logging.Filter):
    """Says what messages mean, and drops repeated ones: each attempt logs the same line."""

    EVERY_S = 30.0
    KEPT = 256

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a message. It becomes information, if its level is higher."""
        record.levelno = min(record.levelno, logging.INFO)
        record.levelname = logging.getLevelName(record.levelno)
        if not logger.isEnabledFor(record.levelno):
            return False
        text = record.getMessage()
        if record.created - self._said.get(text, 0.0) < self.EVERY_S:
            return False
        if len(self._said) >= self.KEPT:
            self._said.clear()
        self._said[text] = record.created
        kind = str(record.args[0]) if isinstance(record.args, tuple) and record.args else ""
        meaning = MEANINGS.get(kind, "a message of the Kafka client")
        record.msg, record.args = "%s (librdkafka: %s)", (meaning, text)
        return True


logger = logging.getLogger("headrace.services.kafka.librdkafka")
"""librdkafka's own log: lost connections and the like, from which it recovers by itself. Other
failures raise exceptions, so its messages are information, whatever level it gives them."""
logger.addFilter(_ClientLogFilter())

Properties = dict[str, str | int | float | bool]

PINNED = frozenset(
    {
        "acks",
        "auto.offset.reset",
        "bootstrap.servers",
        "client.id",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.idempotence",
        "enable.partition.eof",
        "group.id",
        "group.instance.id",
        "isolation.level",
        "partitioner",
        "request.required.acks",
        "transactional.id",
    }
)
"""Durability, order and recovery depend on these properties, so users can't set them."""

DELIVERY_S = 30.0
"""A send is durable or has failed within this time."""
HEARTBEAT_MS = 500
"""A member learns at its next heartbeat that another one joins, twice for each join."""
GATHER_MS = 2
"""How long a record that may be gathered waits for others. Each request costs the broker and the
client much more than a record in it does."""
CROWDED_MS, CROWDED_GATHER_MS = 3, 20
"""How long other records, and those that may be gathered, wait while the process sends many and
waits for processors."""
FETCH_WAIT_MS = 100
"""How long the broker may delay an empty fetch. A new record is sent at once, but a newly assigned
partition waits for the running fetch, and an `End` is an empty fetch. A shorter delay costs the
broker much CPU: at 25 ms, services that are idle cost 1.6 times as much."""
PREFETCH_KB = 16 * 1024
"""Records that one consumer reads ahead, over all its partitions."""
NEAR = re.compile(r"(localhost|127\.[0-9.]+|\[::1\])(:|$)")
"""An address of this machine."""


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """The brokers' addresses, and the few numbers worth setting."""

    bootstrap_servers: str
    """`host:port`; several are separated by commas."""
    client_id: str
    """Names this process in the brokers' logs and quotas."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """More librdkafka properties, mostly for security."""
    session_timeout_s: float = 6.0
    """A member of a consumer group that is silent for this long loses its partitions."""

    def __post_init__(self) -> None:
        if pinned := sorted(PINNED & self.properties.keys()):
            raise UsageError(
                f"Kafka property {pinned[0]} can't be set, because Headrace depends on its own "
                f"value. Remove it from the properties"
            )

    def producer(self, linger_ms: int = 0) -> Properties:
        """For plain sends: idempotent, ordered. A record waits `linger_ms` for others.

        A broker of this machine has one request at a time: while it works on that, further records
        come together in the next one, which saves more than it delays. A broker that is farther
        away has as many as librdkafka allows, because a request has records of one partition only.
        """
        own: Properties = {"linger.ms": linger_ms}
        if all(NEAR.match(one.strip()) for one in self.bootstrap_servers.split(",")):
            own["max.in.flight.requests.per.connection"] = 1
        return self._common() | self._writing() | own | dict(self.properties)

    def transactional(self, writer: str) -> Properties:
        """For a sole writer. Its transactions are short, because an open one stalls readers."""
        fencing: Properties = {"transactional.id": writer, "transaction.timeout.ms": 10_000}
        writing = self._writing() | {"message.timeout.ms": 10_000}
        return self._common() | writing | fencing | dict(self.properties)

    def reader(self) -> Properties:
        """For a consumer of given partitions. librdkafka requires a group; it is never joined."""
        return self._common() | self._reading(f"{self.client_id}.reader") | dict(self.properties)

    def fetcher(self) -> Properties:
        """For single records by position: does not wait for records that do not exist."""
        own: Properties = {
            "fetch.wait.max.ms": 5,
            # All partitions are read ahead, and none so far that its records fill the cache.
            "queued.min.messages": 256,
            "queued.max.messages.kbytes": PREFETCH_KB // 2,
        }
        return (
            self._common()
            | self._reading(f"{self.client_id}.fetcher")
            | own
            | dict(self.properties)
        )

    def member(self, consumer_group: str) -> Properties:
        """For a member of a consumer group. Uses the classic protocol, which every cluster has."""
        session_ms = round(self.session_timeout_s * 1_000)
        membership: Properties = {
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": session_ms,
            "heartbeat.interval.ms": min(HEARTBEAT_MS, session_ms // 3),
            # The poll thread pauses only for the assignment callback, which has a lower limit.
            "max.poll.interval.ms": max(60_000, session_ms),
            # After this a dead coordinator is looked up again, and a commit to it fails.
            "coordinator.query.interval.ms": 1_000,
        }
        return self._common() | self._reading(consumer_group) | membership | dict(self.properties)

    def admin(self) -> Properties:
        """For topics and groups. Nobody reads its log, so it logs only emergencies."""
        return self._common() | {"log_level": 0} | dict(self.properties)

    def _common(self) -> Properties:
        return {
            "bootstrap.servers": self.bootstrap_servers,
            "client.id": self.client_id,
            # Reconnects to a restarted broker within a second, not ten.
            "reconnect.backoff.ms": 50,
            "reconnect.backoff.max.ms": 1_000,
            "socket.connection.setup.timeout.ms": 5_000,
            "socket.nagle.disable": True,
            "log.connection.close": False,
            "message.max.bytes": MAX_MESSAGE_BYTES,
            "topic.metadata.refresh.interval.ms": 30_000,
            "topic.metadata.propagation.max.ms": 5_000,
            "allow.auto.create.topics": False,
            "statistics.interval.ms": 0,
        }

    def _writing(self) -> Properties:
        return {
            "linger.ms": 0,
            "enable.idempotence": True,
            "acks": "all",
            # The partitioner of Java and aiokafka. librdkafka's default is another.
            "partitioner": "murmur2_random",
            "message.timeout.ms": round(DELIVERY_S * 1_000),
            "queue.buffering.max.messages": 100_000,
            "queue.buffering.max.kbytes": 128 * 1024,
        }

    def _reading(self, consumer_group: str) -> Properties:
        return {
            "group.id": consumer_group,
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "check.crcs": True,
            "fetch.wait.max.ms": FETCH_WAIT_MS,
            "fetch.queue.backoff.ms": 20,
            "fetch.error.backoff.ms": 100,
            "queued.min.messages": 10_000,
            "queued.max.messages.kbytes": PREFETCH_KB,
        }
