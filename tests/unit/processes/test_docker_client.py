"""Which Docker engine is found, as the command `docker` would find it; and TLS."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import ssl
from pathlib import Path

import pytest
from docker.context import ContextAPI

from headrace.errors import InfrastructureError, UsageError
from headrace.services.processes.docker.docker_client import find_host
from headrace.services.processes.docker.docker_engine import DockerEngine
from tests.certificates import make_certificates
from tests.unit.processes.docker_fake import (
    INSPECT,
    START,
    FakeEngine,
    counts,
    on,
    says,
    streams,
    until,
)
from tests.unit.processes.test_docker_output import READ, WRITTEN, read_all

VARIABLES = ("HOST", "CONTEXT", "TLS_VERIFY", "CERT_PATH", "CONFIG")


@pytest.fixture(autouse=True)
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the command `docker`, whose current context is `current`."""
    for variable in VARIABLES:
        monkeypatch.delenv(f"DOCKER_{variable}", raising=False)
    folder = tmp_path / "configuration"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"currentContext": "current"}))
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    for name in ("current", "other"):
        ContextAPI.create_context(name, host=f"unix:///run/{name}.sock")
    ContextAPI.create_context("far", host="ssh://me@far")
    return folder


@pytest.mark.parametrize(
    ("variables", "url", "host"),
    [
        ({}, None, "unix:///run/current.sock"),
        ({"DOCKER_CONTEXT": "other"}, None, "unix:///run/other.sock"),
        ({"DOCKER_CONTEXT": "default"}, None, "unix:///var/run/docker.sock"),
        ({"DOCKER_CONTEXT": "other", "DOCKER_HOST": "tcp://a:1"}, None, "tcp://a:1"),
        ({"DOCKER_HOST": ""}, None, "unix:///run/current.sock"),
        ({"DOCKER_HOST": "tcp://a:1"}, "unix:///run/b.sock", "unix:///run/b.sock"),
        ({"DOCKER_HOST": "ssh://you@there"}, None, "ssh://you@there"),
        ({"DOCKER_CONTEXT": "far"}, None, "ssh://me@far:22"),
    ],
)
def test_the_engine_is_the_one_that_docker_would_use(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], url: str | None, host: str
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert find_host(url).url.replace("http+", "") == host
    assert DockerEngine(url).local == host.startswith("unix:")


def test_without_any_configuration_it_is_the_usual_socket(configuration: Path) -> None:
    shutil.rmtree(configuration)
    assert find_host().url == "unix:///var/run/docker.sock"


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"DOCKER_CONTEXT": "gone"}, r"there is no Docker context 'gone'.*docker context ls"),
        ({"DOCKER_HOST": "ssh://me:word@far"}, r"DOCKER_HOST: the address is not ssh://.*password"),
        ({"DOCKER_HOST": "ssh://-oProxyCommand=id"}, r"is not ssh://USER@HOST:PORT/PATH"),
        ({"DOCKER_HOST": "ftp://there"}, r"DOCKER_HOST names 'ftp://there'"),
        (
            {"DOCKER_HOST": "tcp://a:1", "DOCKER_TLS_VERIFY": "1"},
            r"ca\.pem, cert\.pem and key\.pem",
        ),
    ],
)
def test_a_host_that_can_not_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], complaint: str
) -> None:
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path) if len(variables) == 2 else "")
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(UsageError, match=complaint):
        DockerEngine()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates, and isn't installed")
    return make_certificates(tmp_path_factory.mktemp("tls") / "certificates")


def serving(certificates: Path) -> ssl.SSLContext:
    """TLS of an engine that wants to see a certificate too."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates / "ca.pem")
    context.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


@pytest.mark.parametrize(
    "parts", [(WRITTEN,), (b"", WRITTEN), (WRITTEN[:5], WRITTEN[5:20], WRITTEN[20:])]
)
def test_output_is_whole_by_tls(
    certificates: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    configuration: Path,
    parts: tuple[bytes, ...],
) -> None:
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(certificates))
    # A bundle of other authorities, which requests would prefer to the engine's own.
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(make_certificates(tmp_path / "other") / "ca.pem"))

    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        assert not engine.local
        async with engine.run("a", ("true",), "1", "/") as (run, output):
            assert await read_all(output) == READ
        assert await engine.exit_code(run) == 0
        made.answers[START] = counts(3_000_000)
        async with engine.run("a", ("wc",), "1", "/", io.BytesIO(bytes(3_000_000))) as (_, output):
            assert await read_all(output) == [(1, b"3000000")]
        made.answers[START] = streams(WRITTEN, ends=False)
        async with engine.run("a", ("true",), "1", "/") as (_, output):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await output.drain()
        await until(lambda: made.open <= 1)  # but for one that is kept for the next call

    on(tmp_path, {START: streams(*parts)}, test, tls=serving(certificates))


def test_an_engine_of_another_authority_is_not_trusted(
    certificates: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(certificates))

    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        with pytest.raises(InfrastructureError, match=r"engine_unreachable: .*certificate"):
            await engine.info()
        assert made.asked == []

    other = make_certificates(tmp_path / "other")
    on(tmp_path, {INSPECT: says({})}, test, tls=serving(other))
