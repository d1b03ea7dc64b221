"""Turns librdkafka's properties of TLS and SASL into Faust's credentials."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import faust
from aiokafka.abc import AbstractTokenProvider  # type: ignore[import-untyped]
from aiokafka.errors import KafkaConnectionError  # type: ignore[import-untyped]
from faust.auth import OAuthCredentials

from headrace.errors import DependencyError, UsageError
from headrace.services.kafka.security.access_tokens import AccessTokens
from headrace.services.kafka.security.client_security import OAUTHBEARER, ClientSecurity
from headrace.services.kafka.security.ssl_context import https_context, ssl_context

logger = logging.getLogger(__name__)

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", OAUTHBEARER)
"""The mechanisms that Faust's clients have. They have GSSAPI only with another package."""


class _TokenProvider(AbstractTokenProvider):  # type: ignore[misc]
    """Gives aiokafka a valid token for each connection."""

    def __init__(self, tokens: AccessTokens, extensions: Mapping[str, str]) -> None:
        super().__init__()
        self._tokens, self._extensions = tokens, dict(extensions)

    async def token(self) -> str:
        """Raises the error after which aiokafka tries again; any other one would end its tasks."""
        try:
            return await self._tokens.token()
        except DependencyError as error:
            logger.warning("%s", error)
            raise KafkaConnectionError(str(error)) from error

    def extensions(self) -> dict[str, str]:
        return self._extensions


def faust_credentials(properties: Mapping[str, str], service: str) -> Any:
    """Returns the credentials of a service; None for plain text.

    Raises UsageError for a mechanism that Faust does not have, and for files that can't be used.
    """
    security = ClientSecurity.of(properties)
    context = ssl_context(security)
    if security.mechanism is None:
        return None if context is None else faust.SSLCredentials(context)
    if security.mechanism not in MECHANISMS:
        raise UsageError(
            f"sasl.mechanism {security.mechanism}: {service} supports {', '.join(MECHANISMS)}. "
            "Use one of them"
        )
    if security.mechanism == OAUTHBEARER:
        settings = security.oauth()
        tokens = AccessTokens(settings, https_context(security))
        return OAuthCredentials(
            oauth_cb=_TokenProvider(tokens, settings.extensions or {}), ssl_context=context
        )
    return faust.SASLCredentials(
        username=properties.get("sasl.username"),
        password=properties.get("sasl.password"),
        ssl_context=context,
        mechanism=security.mechanism,
    )
