"""One reading of librdkafka's security properties, for Faust and for documents."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from aiokafka.errors import KafkaConnectionError  # type: ignore[import-untyped]
from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    load_pem_private_key,
    pkcs12,
)

from headrace.errors import DependencyError, UsageError
from headrace.infra.local.security.certificates import CertificateAuthority
from headrace.services.kafka.security.access_tokens import AccessTokens, unsecured_token
from headrace.services.kafka.security.client_security import ClientSecurity, OAuthSettings
from headrace.services.kafka.security.ssl_context import ssl_context
from headrace.stream_jobs.security.faust_credentials import faust_credentials

SASL = {"security.protocol": "SASL_SSL"}
OIDC = {
    "sasl.mechanism": "OAUTHBEARER",
    "sasl.oauthbearer.method": "oidc",
    "sasl.oauthbearer.token.endpoint.url": "http://127.0.0.1:1/token",
    "sasl.oauthbearer.client.id": "agent",
    "sasl.oauthbearer.client.secret": "canary12",
    "sasl.oauthbearer.extensions": "logicalCluster=a, pool=b",
}


def credentials(properties: Mapping[str, str]) -> object:
    """Returns what Faust gets."""
    return faust_credentials(properties, "assemble-groups")


def test_plain_text_needs_no_credentials() -> None:
    assert credentials({"client.rack": "a"}) is None
    assert credentials({"security.protocol": "PLAINTEXT"}) is None


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_passwords_reach_faust(mechanism: str) -> None:
    secret = {"sasl.username": "name", "sasl.password": "word", "sasl.mechanism": mechanism}
    found = faust_credentials(SASL | secret, "x")
    assert (found.protocol.value, found.mechanism.value) == ("SASL_SSL", mechanism)
    assert (found.username, found.password) == ("name", "word")
    assert found.ssl_context.check_hostname
    plain = faust_credentials(secret | {"security.protocol": "sasl_plaintext"}, "x")
    assert (plain.protocol.value, plain.ssl_context) == ("SASL_PLAINTEXT", None)


def test_tokens_reach_faust() -> None:
    found = faust_credentials(SASL | OIDC, "x")
    assert (found.protocol.value, found.mechanism.value) == ("SASL_SSL", "OAUTHBEARER")
    assert found.oauth_cb.extensions() == {"logicalCluster": "a", "pool": "b"}


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ({"security.protocol": "TLS"}, "security.protocol 'tls' does not exist"),
        (SASL | {"sasl.mechanism": "SCRAM"}, "SCRAM: assemble-groups supports PLAIN"),
        (SASL, "GSSAPI: assemble-groups supports PLAIN"),
        (SASL | {"sasl.mechanism": "OAUTHBEARER"}, "needs sasl.oauthbearer.method=oidc"),
        (SASL | OIDC | {"sasl.oauthbearer.client.id": ""}, "needs sasl.oauthbearer.client.id"),
        (
            {"security.protocol": "SSL", "ssl.ca.location": "/none.pem"},
            r"files of TLS can't be used: .*No such file.*Check ssl.ca.location",
        ),
        (SASL | OIDC | {"https.ca.location": "/none"}, "authority of the token endpoint"),
    ],
)
def test_what_is_wrong_is_said(properties: Mapping[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace(".", r"\.").replace(r"\.*", ".*")):
        credentials(properties)


def handshake(client: ssl.SSLContext, server: ssl.SSLContext, name: str = "127.0.0.1") -> str:
    """Connects two contexts in memory. Returns the common name of the client's certificate."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_client, to_server, server_hostname=name)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (one, other):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    found = other.getpeercert()
    assert found is not None
    return str(dict(pair for pairs in found["subject"] for pair in pairs)["commonName"])  # type: ignore[misc]


class Files:
    """The certificates of a broker and of a client, in files."""

    def __init__(self, folder: Path) -> None:
        authority = CertificateAuthority("ours", time.time())
        self.ca, self.own, self.store = folder / "ca.pem", folder / "own.pem", folder / "own.p12"
        self.ca.write_bytes(authority.pem)
        self.own.write_bytes(pem := authority.issue("headrace-agent"))
        self.key, self.certificate = (
            pem[: pem.index(b"-----BEGIN CERT")].decode(),
            pem[pem.index(b"-----BEGIN CERT") :].decode(),
        )
        self.store.write_bytes(
            pkcs12.serialize_key_and_certificates(
                b"own",
                load_pem_private_key(pem, None),  # type: ignore[arg-type]
                x509.load_pem_x509_certificate(self.certificate.encode()),
                None,
                BestAvailableEncryption(b"word"),
            )
        )
        broker = folder / "broker.pem"
        broker.write_bytes(authority.issue("broker", server=True))
        self.server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(self.ca))
        self.server.load_cert_chain(broker)
        self.server.verify_mode = ssl.CERT_REQUIRED

    def forms(self) -> list[dict[str, str]]:
        """Returns every form in which a client can name its certificate."""
        files = {"ssl.ca.location": str(self.ca)}
        return [
            files | {"ssl.certificate.location": str(self.own), "ssl.key.location": str(self.own)},
            {
                "ssl.ca.pem": self.ca.read_text(),
                "ssl.certificate.pem": self.certificate,
                "ssl.key.pem": self.key,
            },
            files | {"ssl.certificate.location": str(self.own), "ssl.key.pem": self.key},
            files | {"ssl.keystore.location": str(self.store), "ssl.keystore.password": "word"},
        ]


def test_a_client_certificate_comes_as_file_text_or_key_store(tmp_path: Path) -> None:
    files = Files(tmp_path)
    for form in files.forms():
        context = ssl_context(ClientSecurity.of({"security.protocol": "SSL", **form}))
        assert context is not None
        assert handshake(context, files.server) == "headrace-agent"
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            handshake(context, files.server, "broker.example")
        more = {"security.protocol": "SSL", "ssl.endpoint.identification.algorithm": "none"}
        lax = ssl_context(ClientSecurity.of(more | form))
        assert lax is not None
        assert handshake(lax, files.server, "broker.example") == "headrace-agent"
    wrong = files.forms()[3] | {"ssl.keystore.password": "x", "security.protocol": "SSL"}
    with pytest.raises(UsageError, match="files of TLS can't be used"):
        ssl_context(ClientSecurity.of(wrong))


@contextmanager
def endpoint(
    lifetime_s: float, status: int = 200, location: str | None = None
) -> Iterator[tuple[str, list[str]]]:
    """Serves tokens. Yields its URL, and the requests that it got."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            asked.append(f"{self.headers['Authorization']} {body}")
            tree = {"access_token": f"token-{len(asked)}", "expires_in": lifetime_s}
            self.send_response(status)
            if location is not None:
                self.send_header("Location", location)
            self.end_headers()
            self.wfile.write(json.dumps(tree).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/token", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def tokens_of(url: str) -> AccessTokens:
    settings = OAuthSettings("oidc", url, "agent", "canary12", "kafka")
    return AccessTokens(settings, ssl.create_default_context())


def test_a_token_is_used_until_it_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        with endpoint(100.0) as (url, asked):
            tokens = tokens_of(url)
            assert await asyncio.gather(*(tokens.token() for _ in range(5))) == ["token-1"] * 5
            now = time.time()
            monkeypatch.setattr(time, "time", lambda: now + 79)
            assert await tokens.token() == "token-1"
            monkeypatch.setattr(time, "time", lambda: now + 82)
            assert await tokens.token() == "token-2"
            user = base64.b64encode(b"agent:canary12").decode()
            assert asked == [f"Basic {user} grant_type=client_credentials&scope=kafka"] * 2

    asyncio.run(ask())


def test_loops_of_several_threads_share_the_tokens() -> None:
    with endpoint(0.01) as (url, asked), ThreadPoolExecutor(4) as pool:
        tokens = tokens_of(url)
        found = [pool.submit(asyncio.run, tokens.token()) for _ in range(40)]
        assert {one.result(30) for one in found} <= {f"token-{n}" for n in range(1, 41)}
    assert len(asked) > 1


def test_a_redirect_is_refused_so_the_secret_stays_where_it_is() -> None:
    with (
        endpoint(100.0) as (other, asked_there),
        endpoint(1.0, status=302, location=other) as (url, _),
        pytest.raises(DependencyError, match="HTTP Error 302"),
    ):
        asyncio.run(tokens_of(url).token())
    assert asked_there == []


def test_a_failed_request_is_an_error_after_which_aiokafka_tries_again() -> None:
    found = faust_credentials(SASL | OIDC, "x")
    with pytest.raises(KafkaConnectionError, match="gave no token"):
        asyncio.run(found.oauth_cb.token())


def test_an_endpoint_that_gives_no_token_is_named_without_the_secret() -> None:
    async def ask(url: str) -> str:
        with pytest.raises(DependencyError) as caught:
            await tokens_of(url).token()
        return str(caught.value)

    with endpoint(1.0, status=401) as (url, _):
        said = asyncio.run(ask(url))
    assert "gave no token: HTTP Error 401" in said
    assert "canary" not in said
    assert "Connection refused" in asyncio.run(ask("http://127.0.0.1:1/token"))


def test_an_unsecured_token_has_the_claims() -> None:
    token, lifetime_s = unsecured_token("principal=alice scope=a,b lifeSeconds=60", 1000.0)
    head, body, signature = token.split(".")
    padded = (part + "=" * (-len(part) % 4) for part in (head, body))
    first, claims = (json.loads(base64.urlsafe_b64decode(part)) for part in padded)
    assert (first, signature, lifetime_s) == ({"alg": "none"}, "", 60.0)
    assert claims == {"sub": "alice", "iat": 1000.0, "exp": 1060.0, "scope": ["a", "b"]}
