"""A local stack whose broker authenticates users, and denies what no ACL allows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.infra import local
from headrace.infra.local import kafka_server
from headrace.infra.local.detached import free_port

JAAS = "org.apache.kafka.common.security.plain.PlainLoginModule"


def properties_of(user: str) -> dict[str, str]:
    """Returns the properties with which a client authenticates as this user."""
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": user,
        "sasl.password": "secret",
    }


@contextmanager
def guarded_stack(
    state: Path, monkeypatch: pytest.MonkeyPatch, users: Iterable[str], administrator: str = "none"
) -> Iterator[tuple[local.LocalStack, str]]:
    """Yields the stack, and the broker's address for these users.

    At the stack's own address everybody may do everything.
    """
    render, port = kafka_server.render_properties, free_port()
    passwords = " ".join(f'user_{user}="secret"' for user in users)

    def with_authorizer(plain: int, controller: int, log_folder: str) -> str:
        team = f"TEAM://127.0.0.1:{port}"
        more = {
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": f"User:ANONYMOUS;User:{administrator}",
            "listeners": f"PLAINTEXT://127.0.0.1:{plain},CONTROLLER://127.0.0.1:{controller},{team}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{plain},{team}",
            "listener.security.protocol.map": (
                "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,TEAM:SASL_PLAINTEXT"
            ),
            "listener.name.team.sasl.enabled.mechanisms": "PLAIN",
            "listener.name.team.plain.sasl.jaas.config": f"{JAAS} required {passwords};",
        }
        text = render(plain, controller, log_folder)
        return text + "".join(f"{key}={value}\n" for key, value in more.items())

    monkeypatch.setattr(kafka_server, "render_properties", with_authorizer)
    stack = local.up(state, kafka_port=0, registry_port=0, owner_pid=os.getpid())
    try:
        yield stack, f"127.0.0.1:{port}"
    finally:
        local.down(state, wipe=True)
