"""What a secure stack's servers are told, beside the settings that all stacks have.

The broker has one listener for all others, and one for its controller. Both need TLS with a
certificate of the client. Who has none is no principal, and what no ACL allows is refused. The
registry needs TLS and a password. Not every principal may delete its schemas.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headrace.infra.local.security.stack_secrets import (
    ADMINISTRATOR,
    FOLDER,
    SERVERS,
    principal,
    registry_users,
)
from headrace.services.base.files import private

READERS = frozenset(map(principal, ("reader", "guest", "external-env")))
"""Principals that delete no schemas, and do not change which ones are compatible."""
_LISTENER = "SECURE"
_API = "/apis/ccompat/v7/subjects"


def broker_settings(port: int, controller_port: int) -> dict[str, str]:
    """Returns the broker's settings. Paths are relative to the state folder."""
    files = f"{FOLDER}/{SERVERS}"
    settings = {
        "listeners": (f"{_LISTENER}://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}"),
        "advertised.listeners": f"{_LISTENER}://127.0.0.1:{port}",
        "listener.security.protocol.map": f"{_LISTENER}:SSL,CONTROLLER:SSL",
        "inter.broker.listener.name": _LISTENER,
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "false",
        "super.users": ";".join(
            f"User:{principal(name)}" for name in ("broker", "controller", ADMINISTRATOR)
        ),
        # The principal is the certificate's common name. Another subject is no principal.
        "ssl.principal.mapping.rules": "RULE:^CN=([a-z-]+)$/$1/",
    }
    for listener, own, trusted in (
        (_LISTENER, "broker.pem", f"{FOLDER}/ca.pem"),
        ("CONTROLLER", "controller.pem", f"{files}/controller-ca.pem"),
    ):
        prefix = f"listener.name.{listener.lower()}.ssl."
        settings |= {
            f"{prefix}client.auth": "required",
            f"{prefix}keystore.type": "PEM",
            f"{prefix}keystore.location": f"{files}/{own}",
            f"{prefix}truststore.type": "PEM",
            f"{prefix}truststore.location": trusted,
        }
    return settings


def write_registry_settings(state: Path, port: int) -> str:
    """Writes the registry's settings, which have its passwords. Returns their file's name."""
    users = registry_users(state)
    file = f"{FOLDER}/{SERVERS}/registry.properties"
    key = f"{FOLDER}/{SERVERS}/registry.pem"
    settings = {
        "quarkus.http.ssl-port": str(port),
        "quarkus.http.insecure-requests": "disabled",
        "quarkus.http.ssl.certificate.files": key,
        "quarkus.http.ssl.certificate.key-files": key,
        "quarkus.http.auth.basic": "true",
        "quarkus.security.users.embedded.plain-text": "true",
        "quarkus.http.auth.policy.writers.roles-allowed": "writer",
        **_permissions(),
    }
    for name, password in users.items():
        role = "reader" if name in READERS else "writer"
        settings[f"quarkus.security.users.embedded.users.{name}"] = password
        settings[f"quarkus.security.users.embedded.roles.{name}"] = role
    with open(state / file, "w", encoding="utf-8", opener=private) as opened:
        opened.write(_lines(settings))
    return file


def _permissions() -> Mapping[str, str]:
    """Everybody with a password may read, look a schema up by its text, and register one.

    The last two are both a POST below `/subjects`, and no rule of paths tells them apart surely:
    the registry also takes `/subjects/NAME/versions;x=1` for `/subjects/NAME/versions`. So readers
    may register, but not delete, and not change which schemas are compatible.
    """
    rules = {
        "read": ("/*", "GET,HEAD", "authenticated"),
        "write": ("/*", "POST,PUT,PATCH,DELETE", "writers"),
        "read-subjects": (f"{_API}/*", "GET,HEAD", "authenticated"),
        "look-up": (f"{_API}/*", "POST", "authenticated"),
        "write-subjects": (f"{_API}/*", "PUT,PATCH,DELETE", "writers"),
    }
    return {
        f"quarkus.http.auth.permission.{name}.{key}": value
        for name, rule in rules.items()
        for key, value in zip(("paths", "methods", "policy"), rule, strict=True)
    }


def _lines(settings: Mapping[str, str]) -> str:
    return "".join(f"{key}={value}\n" for key, value in settings.items())
