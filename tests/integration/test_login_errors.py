"""What a client says, within seconds, if brokers and client do not accept each other."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread

import pytest

from headrace.errors import DependencyError
from headrace.infra import local
from headrace.infra.local.security.certificates import VALID_S, CertificateAuthority
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.kafka_broker import KafkaBroker
from headrace.services.namespace.cluster_config import ClusterConfig
from tests.guarded_stack import guarded_stack, properties_of

pytestmark = pytest.mark.long

BOUND_S = 10.0


def failure_of(servers: str, properties: dict[str, str]) -> str:
    """Returns what a client says that can't log in; empty if it can."""

    async def check() -> str:
        broker = KafkaBroker(KafkaSettings(servers, "test", properties))
        began = time.monotonic()
        try:
            await broker.check()
        except DependencyError as error:
            assert time.monotonic() - began < BOUND_S
            return str(error)
        finally:
            await broker.close()
        return ""

    return asyncio.run(check())


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterConfig]:
    """A secure stack, as its operator sees it."""
    state = tmp_path_factory.mktemp("secure")
    stack = local.up(
        state, kafka_port=0, registry_port=0, owner_pid=os.getpid(), roles=("operator",)
    )
    yield ClusterConfig(state).connected(
        stack.bootstrap_servers, stack.registry_url, stack.credentials
    )
    local.down(state, wipe=True)


@contextmanager
def other_name(port: int) -> Iterator[str]:
    """Yields an address that leads to the broker, and that is not in its certificate."""

    def carry(one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65_536):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def accept(server: socket.socket) -> None:
        with ExitStack() as stack, suppress(OSError):
            while True:
                near = stack.enter_context(server.accept()[0])
                far = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                for pair in ((near, far), (far, near)):
                    Thread(target=carry, args=pair, daemon=True).start()

    with socket.create_server(("127.0.0.2", 0)) as server:
        thread = Thread(target=accept, args=(server,))
        thread.start()
        yield f"127.0.0.2:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def pem(folder: Path, name: str, data: bytes) -> str:
    """Writes a file and returns its path."""
    path = folder / name
    path.write_bytes(data)
    return str(path)


def test_tls_that_fails_says_what_to_change(secure: ClusterConfig, tmp_path: Path) -> None:
    servers, own = str(secure.bootstrap_servers), secure.broker_properties()
    assert failure_of(servers, own) == ""

    strange = CertificateAuthority("other", time.time())
    wrong = failure_of(servers, own | {"ssl.ca.location": pem(tmp_path, "ca.pem", strange.pem)})
    assert wrong.startswith(f"can't log in to Kafka at {servers}")
    assert "ssl.ca.location" in wrong

    name = failure_of(f"ip6-unknown.invalid:{servers.rpartition(':')[2]}", own)
    assert "no Kafka broker answers" in name
    with other_name(int(servers.rpartition(":")[2])) as address:
        name = failure_of(address, own)
    assert "the broker's certificate has another name" in name

    for file, authority in (
        ("other.pem", strange),
        ("ended.pem", CertificateAuthority("other", time.time() - 2 * VALID_S)),
    ):
        path = pem(tmp_path, file, authority.issue("headrace-operator"))
        mine = {"ssl.certificate.location": path, "ssl.key.location": path}
        assert "can't log in to Kafka" in failure_of(servers, own | mine), file

    without = {key: value for key, value in own.items() if "certificate" not in key}
    without.pop("ssl.key.location")
    assert "can't log in to Kafka" in failure_of(servers, without)


def test_a_wrong_password_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with guarded_stack(tmp_path, monkeypatch, ["team"]) as (_, servers):
        assert failure_of(servers, properties_of("team")) == ""
        said = failure_of(servers, properties_of("team") | {"sasl.password": "canary12"})
        assert said.startswith(f"can't log in to Kafka at {servers}")
        assert "check sasl.mechanism, sasl.username and sasl.password" in said
        assert "canary12" not in said
