"""How Headrace talks to Kafka: every librdkafka property that it sets, and why. Nothing else does.

The names and meanings are librdkafka's (its CONFIGURATION.md). What a user passes as
`properties` (security, say) comes on top, but can't undo what the contract rests on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.errors import UsageError


class _Sparing(logging.Filter):
    """librdkafka says the same of a dead broker at every attempt: once in a while is enough."""

    EVERY_S = 30.0
    KEPT = 256

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to say it. What librdkafka mends by itself is no error."""
        record.levelno = min(record.levelno, logging.WARNING)
        record.levelname = logging.getLevelName(record.levelno)
        text = record.getMessage()
        if record.created - self._said.get(text, 0.0) < self.EVERY_S:
            return False
        if len(self._said) >= self.KEPT:
            self._said.clear()
        self._said[text] = record.created
        return True


logger = logging.getLogger("headrace.services.kafka.librdkafka")
"""librdkafka's own words: lost connections and the like, which it mends by itself."""
logger.addFilter(_Sparing())

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
        "isolation.level",
        "partitioner",
        "request.required.acks",
        "transactional.id",
    }
)
"""What durability, order and the recovery rules rest on: not for a user to change."""

DELIVERY_S = 30.0
"""A send is durable or has failed by then."""
MESSAGE_LIMIT = 8 * 1024 * 1024
"""Bytes of the largest record that a client lets through; a topic's own limit comes first."""
PREFETCH_KB = 16 * 1024
"""Records that librdkafka holds ready, for all partitions of one consumer."""


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """Where the brokers are, and the few numbers worth turning."""

    bootstrap_servers: str
    """`host:port`, several with commas between."""
    client_id: str
    """Names this process in the brokers' logs and quotas."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """More librdkafka properties: security, mostly."""
    session_timeout_s: float = 6.0
    """A member of a consumer group that is silent for so long loses its partitions."""
    fetch_wait_s: float = 0.1
    """The longest that the broker holds an empty fetch back: a new record is sent at once, but a
    newly assigned partition waits for the running fetch, and an `End` is an empty one. Shorter,
    and the polling of idle consumers costs the broker dearly: at 25 ms, 1.6 times the CPU of idle
    services."""
    bulk: bool = False
    """Throughput before latency: lingers for larger batches, compressed."""
    replication: int | None = None
    """Copies of each new topic; None: three, or as many as there are brokers."""

    def __post_init__(self) -> None:
        if pinned := sorted(PINNED & self.properties.keys()):
            raise UsageError(
                f"Kafka property {pinned[0]} can't be set: Headrace depends on its own value"
            )

    def producer(self) -> Properties:
        """For plain sends: idempotent, in order, at once."""
        return self._common() | self._writing() | self._user()

    def transactional(self, writer: str) -> Properties:
        """For a sole writer. Its open transaction stalls readers, so it can't be open for long."""
        fencing: Properties = {"transactional.id": writer, "transaction.timeout.ms": 10_000}
        writing = self._writing() | {"linger.ms": 0, "message.timeout.ms": 10_000}
        return self._common() | writing | fencing | self._user()

    def reader(self) -> Properties:
        """For a consumer that is told its partitions. librdkafka wants a group, never joined."""
        return self._common() | self._reading(f"{self.client_id}.reader") | self._user()

    def fetcher(self) -> Properties:
        """For single records by position: never waits for what isn't there."""
        wait: Properties = {"fetch.wait.max.ms": 5}
        return self._common() | self._reading(f"{self.client_id}.fetcher") | wait | self._user()

    def member(self, consumer_group: str) -> Properties:
        """For a member of a consumer group. Classic protocol: it works on any cluster."""
        session_ms = round(self.session_timeout_s * 1_000)
        membership: Properties = {
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": session_ms,
            "heartbeat.interval.ms": session_ms // 3,
            # The poll thread polls for ever; only a take-over keeps it, and that is bounded below.
            "max.poll.interval.ms": max(60_000, session_ms),
            # A dead coordinator is asked after again, and a commit to it given up, within this.
            "coordinator.query.interval.ms": 1_000,
        }
        return self._common() | self._reading(consumer_group) | membership | self._user()

    def admin(self) -> Properties:
        """For topics and groups. Its log has no reader, so it keeps to emergencies."""
        return self._common() | {"log_level": 0} | self._user()

    def _common(self) -> Properties:
        return {
            "bootstrap.servers": self.bootstrap_servers,
            "client.id": self.client_id,
            # A broker that was restarted is found again in a second, not in ten.
            "reconnect.backoff.ms": 50,
            "reconnect.backoff.max.ms": 1_000,
            "socket.connection.setup.timeout.ms": 5_000,
            "socket.nagle.disable": True,
            "log.connection.close": False,
            "message.max.bytes": MESSAGE_LIMIT,
            "topic.metadata.refresh.interval.ms": 30_000,
            "topic.metadata.propagation.max.ms": 5_000,
            "allow.auto.create.topics": False,
            "statistics.interval.ms": 0,
        }

    def _writing(self) -> Properties:
        batching: Properties = {"linger.ms": 0}
        if self.bulk:
            batching = {"linger.ms": 15, "compression.type": "lz4", "batch.size": 1024 * 1024}
        return batching | {
            "enable.idempotence": True,
            "acks": "all",
            # Where Java and aiokafka put a key. librdkafka's default puts it elsewhere.
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
            "fetch.wait.max.ms": round(self.fetch_wait_s * 1_000),
            "fetch.queue.backoff.ms": 20,
            "fetch.error.backoff.ms": 100,
            "queued.min.messages": 10_000,
            "queued.max.messages.kbytes": PREFETCH_KB,
        }

    def _user(self) -> Properties:
        return dict(self.properties)
