"""Reads librdkafka's properties of TLS and SASL. Names and meanings are those of its
CONFIGURATION.md; properties that say nothing about security are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headrace.errors import UsageError

PROTOCOLS = ("plaintext", "ssl", "sasl_plaintext", "sasl_ssl")
OAUTHBEARER = "OAUTHBEARER"
CLIENT_CERTIFICATES = ("ssl.certificate.location", "ssl.certificate.pem", "ssl.keystore.location")
"""Properties, one of which names the client's certificate."""
_PREFIX = "sasl.oauthbearer."


@dataclass(frozen=True)
class OAuthSettings:
    """Where a client's tokens come from."""

    method: Literal["oidc", "unsecured"]
    token_url: str = ""
    client_id: str = ""
    client_secret: str = ""
    scope: str = ""
    extensions: Mapping[str, str] | None = None
    """Sent to the broker beside each token."""
    claims: str = ""
    """For unsecured tokens: `principal=NAME scope=…`, as in `sasl.oauthbearer.config`."""


@dataclass(frozen=True)
class ClientSecurity:
    """How a client connects: with TLS or not, and by which SASL mechanism."""

    protocol: str
    """One of `PROTOCOLS`."""
    mechanism: str | None
    """For example `SCRAM-SHA-512`; None without SASL."""
    properties: Mapping[str, str]

    @classmethod
    def of(cls, properties: Mapping[str, str]) -> ClientSecurity:
        """Raises UsageError if the protocol is none that Kafka has."""
        protocol = properties.get("security.protocol", "plaintext").lower()
        if protocol not in PROTOCOLS:
            raise UsageError(
                f"security.protocol {protocol!r} does not exist: choose from {', '.join(PROTOCOLS)}"
            )
        if not protocol.startswith("sasl"):
            return cls(protocol, None, properties)
        mechanism = properties.get("sasl.mechanism", properties.get("sasl.mechanisms", "GSSAPI"))
        return cls(protocol, mechanism, properties)

    @property
    def tls(self) -> bool:
        """Whether the connection is encrypted, and the broker has a certificate."""
        return self.protocol.endswith("ssl")

    @property
    def has_certificate(self) -> bool:
        """Whether the client has a certificate of its own."""
        return any(name in self.properties for name in CLIENT_CERTIFICATES)

    def oauth(self) -> OAuthSettings:
        """Returns where tokens come from. Raises UsageError if something for that is missing."""
        get = self.properties.get
        if get("enable.sasl.oauthbearer.unsecure.jwt", "false").lower() == "true":
            return OAuthSettings("unsecured", claims=get(f"{_PREFIX}config", ""))
        if get(f"{_PREFIX}method", "default").lower() != "oidc":
            raise UsageError(
                f"OAUTHBEARER needs {_PREFIX}method=oidc, {_PREFIX}token.endpoint.url, "
                f"{_PREFIX}client.id and {_PREFIX}client.secret"
            )
        for name in ("token.endpoint.url", "client.id", "client.secret"):
            if not get(f"{_PREFIX}{name}"):
                raise UsageError(f"OAUTHBEARER with the method oidc needs {_PREFIX}{name}")
        pairs = (pair.partition("=") for pair in get(f"{_PREFIX}extensions", "").split(",") if pair)
        return OAuthSettings(
            "oidc",
            self.properties[f"{_PREFIX}token.endpoint.url"],
            self.properties[f"{_PREFIX}client.id"],
            self.properties[f"{_PREFIX}client.secret"],
            get(f"{_PREFIX}scope", ""),
            {name.strip(): value.strip() for name, _, value in pairs},
        )
