"""Says why a client can't reach its brokers, within seconds."""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Iterable

from confluent_kafka import Consumer, KafkaError, KafkaException

from headrace.errors import DependencyError, UsageError
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.convert import make_consumer
from headrace.services.kafka.failures import error_of
from headrace.services.kafka.security.client_security import ClientSecurity
from headrace.services.kafka.security.ssl_context import ssl_context

CHECK_S, EXPLAIN_S = 3.5, 1.0
ERRORS_KEPT = 16
_TLS = "ssl routines"
_NO_AUTHORITY = "name the authority of the broker's certificate with ssl.ca.location"
_TLS_ADVICE = {
    "not valid for": "the broker's certificate has another name: write that in --bootstrap-servers",
    "has expired": "the broker needs a new certificate",
    "alert certificate expired": "this client needs a new certificate",
    "verify failed": _NO_AUTHORITY,
    "issuer certificate": _NO_AUTHORITY,
    "self-signed certificate": _NO_AUTHORITY,
    "certificate required": "the broker wants a certificate of a client that an authority signed "
    "which it knows: check ssl.certificate.location, and whether the certificate has ended",
    "alert": "the broker refuses this client's certificate: check ssl.certificate.location",
    "wrong version number": "the broker does not speak TLS at this port: check security.protocol",
}
"""What OpenSSL says, in lower-case letters, to what to do. The first one that fits counts."""
_TOKENS = ("oauthbearer", "invalid_token")
"""What errors about tokens contain, in lower-case letters."""
_DENIED = (KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED)


def check_login(consumer: Consumer, settings: KafkaSettings) -> None:
    """Raises DependencyError within 5 s if no broker answers, or 7 s if one refuses it. Blocks."""
    try:
        consumer.list_topics(timeout=CHECK_S)
    except KafkaException as exception:
        servers, error = settings.bootstrap_servers, error_of(exception)
        raise denial(servers, _errors(settings), verdict(settings)) or DependencyError(
            f"no Kafka broker answers at {servers} ({error.str()}). Start one with `headrace up`, "
            f"or give your own with --bootstrap-servers"
        ) from exception


def _errors(settings: KafkaSettings) -> Iterable[KafkaError]:
    """Connects once more, and returns what is wrong with the connections.

    A consumer of its own does that, because a consumer that nobody polls would keep all errors of
    its life in memory.
    """
    errors = deque[KafkaError](maxlen=ERRORS_KEPT)
    with make_consumer(settings.reader(), errors.append) as consumer:
        try:
            consumer.list_topics(timeout=EXPLAIN_S)
        except KafkaException:
            consumer.poll(0.0)  # It hands the errors over.
    return errors


def verdict(settings: KafkaSettings) -> str:
    """Returns what Python's TLS says against the certificate of the first broker; empty if nothing.

    librdkafka does not say whether the authority, the name or the date is wrong.
    """
    host, _, port = settings.bootstrap_servers.split(",")[0].strip().rpartition(":")
    try:
        context = ssl_context(ClientSecurity.of(settings.properties))
        if context is None:
            return ""
        host = host.strip("[]")
        with (
            socket.create_connection((host, int(port)), EXPLAIN_S) as connection,
            context.wrap_socket(connection, server_hostname=host),
        ):
            return ""
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except (OSError, ValueError, UsageError):
        return ""


def denial(servers: str, errors: Iterable[KafkaError], against: str = "") -> DependencyError | None:
    """Returns why brokers and client refuse each other, if one of the errors says so.

    `against` is the `verdict`.
    """
    for error in errors:
        said = f"{against} {error.str()}".lower()
        if error.code() in _DENIED and any(word in said for word in _TOKENS):
            advice = (
                "check sasl.oauthbearer.token.endpoint.url, sasl.oauthbearer.client.id and "
                "sasl.oauthbearer.client.secret, and whether the broker trusts the endpoint"
            )
        elif error.code() in _DENIED:
            advice = "check sasl.mechanism, sasl.username and sasl.password"
        elif error.code() == KafkaError._SSL or _TLS in said or against:
            fitting = (advice for words, advice in _TLS_ADVICE.items() if words in said)
            advice = next(fitting, "check the properties ssl.* and security.protocol")
        else:
            continue
        found = against.rstrip(".") or error.str()
        return DependencyError(f"can't log in to Kafka at {servers}: {found}: {advice}")
    return None
