"""Turns librdkafka's properties of TLS and SASL into Faust's credentials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import faust
from faust.auth import OAuthCredentials

from headrace.services.kafka.security.aiokafka_login import TokenProvider, require_mechanism
from headrace.services.kafka.security.client_security import OAUTHBEARER, ClientSecurity
from headrace.services.kafka.security.ssl_context import ssl_context


def faust_credentials(properties: Mapping[str, str], service: str) -> Any:
    """Returns the credentials of a service; None for plain text.

    Raises UsageError for a mechanism that Faust does not have, and for files that can't be used.
    """
    security = ClientSecurity.of(properties)
    context = ssl_context(security)
    if security.mechanism is None:
        return None if context is None else faust.SSLCredentials(context)
    require_mechanism(security, service)
    if security.mechanism == OAUTHBEARER:
        return OAuthCredentials(oauth_cb=TokenProvider(security), ssl_context=context)
    return faust.SASLCredentials(
        username=properties.get("sasl.username"),
        password=properties.get("sasl.password"),
        ssl_context=context,
        mechanism=security.mechanism,
    )
