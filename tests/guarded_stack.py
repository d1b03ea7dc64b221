"""A local stack whose broker authenticates users, and denies what no ACL allows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace.infra import local
from headrace.infra.local import kafka_server
from headrace.infra.local.detached import free_port

JAAS = "org.apache.kafka.common.security.plain.PlainLoginModule"


@dataclass(frozen=True)
class Listener:
    """One more address of the broker, at which clients authenticate."""

    protocol: str
    """For example `SASL_SSL`."""
    settings: Mapping[str, str]
    """The broker's settings of this listener, without their prefix."""
    port: int = field(default_factory=free_port)

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"


def properties_of(user: str) -> dict[str, str]:
    """Returns the properties with which a client authenticates as this user."""
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": user,
        "sasl.password": "secret",
    }


@contextmanager
def listening_stack(
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
    listeners: Mapping[str, Listener],
    administrators: Iterable[str] = (),
    settings: Mapping[str, str] | None = None,
) -> Iterator[local.LocalStack]:
    """Yields a stack with these listeners and settings of the broker.

    At the stack's own address everybody may do everything. The names of listeners are in capital
    letters.
    """
    render = kafka_server.render_properties
    every = {name: f"{name}://{one.address}" for name, one in listeners.items()}
    own = [
        (f"listener.name.{name.lower()}.{key}", value)
        for name, one in listeners.items()
        for key, value in one.settings.items()
    ]
    protocols = [f"{name}:{one.protocol}" for name, one in listeners.items()]

    def with_authorizer(plain: int, controller: int, log_folder: str) -> str:
        stack = f"PLAINTEXT://127.0.0.1:{plain}"
        controllers = f"CONTROLLER://127.0.0.1:{controller}"
        more = {
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": ";".join(f"User:{one}" for one in ("ANONYMOUS", *administrators)),
            "listeners": ",".join((stack, controllers, *every.values())),
            "advertised.listeners": ",".join((stack, *every.values())),
            "listener.security.protocol.map": ",".join(
                ("PLAINTEXT:PLAINTEXT", "CONTROLLER:PLAINTEXT", *protocols)
            ),
            **dict(own),
            **(settings or {}),
        }
        text = render(plain, controller, log_folder)
        return text + "".join(f"{key}={value}\n" for key, value in more.items())

    monkeypatch.setattr(kafka_server, "render_properties", with_authorizer)
    stack = local.up(state, kafka_port=0, registry_port=0, owner_pid=os.getpid())
    try:
        yield stack
    finally:
        local.down(state, wipe=True)


@contextmanager
def guarded_stack(
    state: Path, monkeypatch: pytest.MonkeyPatch, users: Iterable[str], administrator: str = "none"
) -> Iterator[tuple[local.LocalStack, str]]:
    """Yields the stack, and the broker's address for these users, who have passwords."""
    passwords = " ".join(f'user_{user}="secret"' for user in users)
    team = Listener(
        "SASL_PLAINTEXT",
        {
            "sasl.enabled.mechanisms": "PLAIN",
            "plain.sasl.jaas.config": f"{JAAS} required {passwords};",
        },
    )
    with listening_stack(state, monkeypatch, {"TEAM": team}, [administrator]) as stack:
        yield stack, team.address
