"""Describes the servers of a cluster, and how a client authenticates, without any secret."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from headrace.services.kafka.security.client_security import OAUTHBEARER, ClientSecurity
from headrace.services.namespace.cluster_config import ClusterConfig

APICURIO = "/apis/ccompat/"
"""Part of the path of Apicurio's registry, where it speaks the protocol of Confluent's."""
_MECHANISMS = {
    "PLAIN": {"type": "plain"},
    "SCRAM-SHA-256": {"type": "scramSha256"},
    "SCRAM-SHA-512": {"type": "scramSha512"},
    "GSSAPI": {"type": "gssapi"},
}


def security_schemes(properties: Mapping[str, str]) -> dict[str, Any]:
    """Returns the security schemes of AsyncAPI that librdkafka's properties mean, by name.

    Empty if clients don't authenticate. Raises UsageError for a protocol that does not exist.
    """
    security = ClientSecurity.of(properties)
    if security.mechanism is None:
        text = "A client certificate (mutual TLS)."
        authenticates = security.tls and security.has_certificate
        return {"mtls": {"type": "X509", "description": text}} if authenticates else {}
    name = security.mechanism.lower()
    if security.mechanism != OAUTHBEARER:
        return {name: _MECHANISMS[security.mechanism]} if security.mechanism in _MECHANISMS else {}
    token_url = properties.get("sasl.oauthbearer.token.endpoint.url", "")
    if not token_url:
        return {name: {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}}
    scopes = dict.fromkeys(properties.get("sasl.oauthbearer.scope", "").split(), "")
    flow = {"tokenUrl": without_secret(token_url), "availableScopes": scopes}
    return {name: {"type": "oauth2", "flows": {"clientCredentials": flow}}}


def servers(cluster: ClusterConfig, schemes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a server for each broker that `cluster` names; empty if it names none."""
    addresses = (cluster.bootstrap_servers or "").split(",")
    protocol = cluster.broker_properties().get("security.protocol", "plaintext").lower()
    registry = without_secret(cluster.registry_url or "")
    server = {
        "protocol": "kafka-secure" if protocol.endswith("ssl") else "kafka",
        "description": f"Kafka ({protocol.upper()}), and its schema registry.",
        "security": [{"$ref": f"#/components/securitySchemes/{name}"} for name in schemes],
        "bindings": {
            "kafka": {
                "schemaRegistryUrl": registry,
                "schemaRegistryVendor": "apicurio" if APICURIO in registry else "confluent",
                "bindingVersion": "0.5.0",
            }
        },
    }
    hosts = [address.strip() for address in addresses if address.strip()]
    return {f"broker-{number}": {"host": host, **server} for number, host in enumerate(hosts, 1)}


def without_secret(url: str) -> str:
    """Returns the first URL of a list, without user, password, query and fragment.

    A password may contain characters that end a host or a URL, such as `/`, `#` and `,`.
    """
    first = re.split(r",\s*(?=https?://)", url)[0].strip()
    public = re.sub("^(https?://)?.*@", r"\1", first)
    return urlsplit(public)._replace(query="", fragment="").geturl()
