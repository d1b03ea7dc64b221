"""How aiokafka's clients authenticate, from librdkafka's properties of TLS and SASL."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from aiokafka.abc import AbstractTokenProvider  # type: ignore[import-untyped]
from aiokafka.errors import KafkaConnectionError  # type: ignore[import-untyped]

from headrace.errors import DependencyError, UsageError
from headrace.services.kafka.security.access_tokens import AccessTokens
from headrace.services.kafka.security.client_security import OAUTHBEARER, ClientSecurity
from headrace.services.kafka.security.ssl_context import https_context, ssl_context

logger = logging.getLogger(__name__)

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", OAUTHBEARER)
"""The mechanisms that aiokafka has. It has GSSAPI only with another package."""


class TokenProvider(AbstractTokenProvider):  # type: ignore[misc]
    """Gives aiokafka a valid token for each connection."""

    def __init__(self, security: ClientSecurity) -> None:
        """Raises UsageError if something is missing, or if a file can't be used."""
        super().__init__()
        settings = security.oauth()
        self._tokens = AccessTokens(settings, https_context(security))
        self._extensions = dict(settings.extensions or {})

    async def token(self) -> str:
        """Raises the error after which aiokafka tries again; any other one would end its tasks."""
        try:
            return await self._tokens.token()
        except DependencyError as error:
            logger.warning("%s", error)
            raise KafkaConnectionError(str(error)) from error

    def extensions(self) -> dict[str, str]:
        """Returns what is sent to the broker beside each token."""
        return self._extensions


def require_mechanism(security: ClientSecurity, who: str) -> None:
    """Raises UsageError for a mechanism that aiokafka does not have. `who` needs it."""
    if security.mechanism not in (None, *MECHANISMS):
        raise UsageError(
            f"sasl.mechanism {security.mechanism}: {who} supports {', '.join(MECHANISMS)}. "
            "Use one of them"
        )


def aiokafka_options(properties: Mapping[str, str], who: str) -> dict[str, Any]:
    """Returns what a client of aiokafka is to be made with.

    Raises UsageError for a mechanism that it does not have, and for files that can't be used.
    """
    security = ClientSecurity.of(properties)
    require_mechanism(security, who)
    options: dict[str, Any] = {
        "security_protocol": security.protocol.upper(),
        "ssl_context": ssl_context(security),
    }
    if security.mechanism is None:
        return options
    options["sasl_mechanism"] = security.mechanism
    if security.mechanism == OAUTHBEARER:
        return options | {"sasl_oauth_token_provider": TokenProvider(security)}
    return options | {
        "sasl_plain_username": properties.get("sasl.username"),
        "sasl_plain_password": properties.get("sasl.password"),
    }
