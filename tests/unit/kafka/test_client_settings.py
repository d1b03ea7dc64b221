"""librdkafka's properties, and its messages, which go into the log as information, in words."""

from __future__ import annotations

import logging

import pytest

from headrace.services.kafka.client_settings import KafkaSettings, logger

FORM = "%s [%s] %s"
"""How confluent_kafka passes a message on: its kind, the client, the text."""
RETRYING = "[thrd:main]: Failed to acquire transactional PID from broker: retrying"
IN_FLIGHT = "max.in.flight.requests.per.connection"


@pytest.mark.parametrize("servers", ["127.0.0.1:9092", "localhost:1, [::1]:2", "127.0.1.1"])
def test_a_broker_of_this_machine_has_one_request_at_a_time(servers: str) -> None:
    assert KafkaSettings(servers, "test").producer()[IN_FLIGHT] == 1
    chosen = KafkaSettings(servers, "test", {IN_FLIGHT: "3"})
    assert chosen.producer()[IN_FLIGHT] == "3"


@pytest.mark.parametrize("servers", ["kafka:9092", "127.0.0.1:1,far:2", "localhost.example.org:1"])
def test_a_broker_elsewhere_has_as_many_as_librdkafka_allows(servers: str) -> None:
    assert IN_FLIGHT not in KafkaSettings(servers, "test").producer()


def test_what_the_client_repairs_itself_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        logger.log(logging.WARNING, FORM, "GETPID", "c#producer-1", RETRYING)
        logger.log(logging.WARNING, FORM, "GETPID", "c#producer-1", RETRYING)  # a repetition
        logger.log(logging.ERROR, FORM, "NEW", "c#producer-1", "something")
        logger.warning("%s: %s", "a.topic", "Timed out")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "INFO",
            "the broker is not ready for transactions yet, and the client asks again (librdkafka: "
            f"GETPID [c#producer-1] {RETRYING})",
        ),
        ("INFO", "a message of the Kafka client (librdkafka: NEW [c#producer-1] something)"),
        ("INFO", "a message of the Kafka client (librdkafka: a.topic: Timed out)"),
    ]


def test_a_program_that_logs_warnings_does_not_see_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        logger.log(logging.ERROR, FORM, "FAIL", "c#consumer-2", "Connection refused")
    assert not caplog.records
