"""What is said if brokers and client refuse each other."""

from __future__ import annotations

import time

import pytest
from confluent_kafka import KafkaError

from headrace.errors import DependencyError
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.convert import make_consumer
from headrace.services.kafka.security.login import check_login, denial

DOWN = KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down")


@pytest.mark.parametrize(
    ("code", "text", "advice"),
    [
        (KafkaError._SSL, "SSL handshake failed: certificate verify failed", "ssl.ca.location"),
        (KafkaError._SSL, "sslv3 alert certificate expired", "client needs a new certificate"),
        (KafkaError._SSL, "something else", "check the properties ssl."),
        (
            KafkaError._TRANSPORT,
            "Receive failed: error:0A00045C:SSL routines::tlsv13 alert certificate required",
            "check ssl.certificate.location",
        ),
        (KafkaError._AUTHENTICATION, "SASL authentication error", "sasl.password"),
        (
            KafkaError._AUTHENTICATION,
            "Failed to acquire SASL OAUTHBEARER token: invalid_client",
            "sasl.oauthbearer.client.secret",
        ),
        (
            KafkaError._AUTHENTICATION,
            'SASL authentication error: {"status":"invalid_token"}',
            "whether the broker trusts the endpoint",
        ),
    ],
)
def test_an_error_of_a_login_says_what_to_do(code: int, text: str, advice: str) -> None:
    found = denial("b:1", [DOWN, KafkaError(code, text)])
    assert found is not None
    assert str(found).startswith(f"can't log in to Kafka at b:1: {text}: ")
    assert advice in str(found)


@pytest.mark.parametrize(
    ("against", "advice"),
    [
        ("IP address mismatch, certificate is not valid for '127.0.0.2'.", "has another name"),
        ("certificate has expired", "the broker needs a new certificate"),
        ("self-signed certificate in certificate chain", "ssl.ca.location"),
        ("unable to get local issuer certificate", "ssl.ca.location"),
    ],
)
def test_the_verdict_on_a_certificate_is_said(against: str, advice: str) -> None:
    failed = KafkaError(KafkaError._SSL, "SSL handshake failed: certificate verify failed")
    for first in (failed, DOWN):  # librdkafka may say only that no broker is there.
        found = denial("b:1", [first], against)
        assert found is not None
        assert against.rstrip(".") in str(found)
        assert advice in str(found)


def test_a_broker_that_is_down_denies_nobody() -> None:
    assert denial("b:1", [DOWN, KafkaError(KafkaError._TRANSPORT, "Connection refused")]) is None
    settings = KafkaSettings("127.0.0.1:1", "test")
    began = time.monotonic()
    with (
        make_consumer(settings.reader()) as consumer,
        pytest.raises(DependencyError, match="no Kafka broker answers at 127"),
    ):
        check_login(consumer, settings)
    assert time.monotonic() - began < 20  # 5 s on a machine that is not busy
