"""A local stack to which clients log in by certificate, by SCRAM-SHA-512, and by short tokens."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._scram import (
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialAlteration,
    UserScramCredentialUpsertion,
)
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256

from headrace.infra import local
from headrace.infra.local import kafka_server
from headrace.infra.local.security.certificates import VALID_S, CertificateAuthority
from tests.guarded_stack import Listener, listening_stack

WAYS = ("certificate", "pem", "scram", "token")
"""How a client can log in: `pem` is a certificate whose texts are in the properties."""
ENDED = "headrace-ended"
"""Has a certificate that has ended. The broker's certificate has, too, at the address `ended`."""
TOKEN_S = 60
"""How long a token is valid. The broker ends the connections of a token that has ended."""
KEY_ID, AUDIENCE, ISSUER, SECRET = "test-key", "kafka", "http://test-issuer", "test-secret"
_OAUTH = "org.apache.kafka.common.security.oauthbearer"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


@dataclass
class TokenEndpoint:
    """Gives a signed token to each client that knows the secret (RFC 6749, client credentials)."""

    lifetime_s: int = TOKEN_S
    key: rsa.RSAPrivateKey = field(default_factory=lambda: rsa.generate_private_key(65537, 2048))
    given: list[str] = field(default_factory=list)
    """The client of each token."""

    def key_set(self) -> str:
        """The public key, as JSON Web Key Set (RFC 7517)."""
        numbers = self.key.public_key().public_numbers()
        modulus, exponent = (
            _base64(number.to_bytes((number.bit_length() + 7) // 8, "big"))
            for number in (numbers.n, numbers.e)
        )
        own = {"kty": "RSA", "kid": KEY_ID, "use": "sig", "alg": "RS256"}
        return json.dumps({"keys": [{**own, "n": modulus, "e": exponent}]})

    def token(self, client: str) -> str:
        """Returns a token for a client, as JSON Web Token (RFC 7519)."""
        now = int(time.time())
        head = {"alg": "RS256", "typ": "JWT", "kid": KEY_ID}
        body = {
            **{"iss": ISSUER, "aud": AUDIENCE, "sub": client, "scope": "kafka"},
            **{"iat": now, "exp": now + self.lifetime_s},
        }
        signed = ".".join(_base64(json.dumps(part).encode()) for part in (head, body))
        signature = self.key.sign(signed.encode(), padding.PKCS1v15(), SHA256())
        self.given.append(client)
        return f"{signed}.{_base64(signature)}"

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Yields its URL on this host."""
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                kind, _, user = self.headers.get("Authorization", "").partition(" ")
                client, _, secret = base64.b64decode(user).decode().partition(":")
                known = (kind, secret) == ("Basic", SECRET)
                answer: dict[str, str | int] = {"error": "invalid_client"}
                if known:
                    token = endpoint.token(client)
                    answer = {
                        "access_token": token,
                        "token_type": "Bearer",
                        "expires_in": endpoint.lifetime_s,
                    }
                self.send_response(200 if known else 401)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, format: str, *arguments: object) -> None:
                """Says nothing."""

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}/token"
            finally:
                server.shutdown()
                thread.join()


class Files:
    """The certificates of the broker and of each user, by one authority."""

    def __init__(self, folder: Path, users: Sequence[str]) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700)
        authority = CertificateAuthority("test", time.time())
        (folder / "ca.pem").write_bytes(authority.pem)
        (folder / "broker.pem").write_bytes(authority.issue("broker", server=True))
        for user in users:
            (folder / f"{user}.pem").write_bytes(authority.issue(user))
        # The same authority signs certificates that have ended.
        authority._begin -= timedelta(seconds=2 * VALID_S)
        authority._end -= timedelta(seconds=2 * VALID_S)
        (folder / "ended-broker.pem").write_bytes(authority.issue("broker", server=True))
        (folder / f"{ENDED}.pem").write_bytes(authority.issue(ENDED))

    def text(self, name: str) -> str:
        """Returns a file as a value of one line."""
        return (self.folder / name).read_text().replace("\n", "\\n")

    def certificate(self, user: str) -> dict[str, str]:
        """Returns the properties of a client with a certificate, in files."""
        own = str(self.folder / f"{user}.pem")
        return {
            "ssl.ca.location": str(self.folder / "ca.pem"),
            "ssl.certificate.location": own,
            "ssl.key.location": own,
        }

    def pem(self, user: str) -> dict[str, str]:
        """Returns the same, with the texts in the properties."""
        key, mark, certificate = self.text(f"{user}.pem").partition("-----BEGIN CERT")
        return {
            "ssl.ca.pem": self.text("ca.pem"),
            "ssl.certificate.pem": mark + certificate,
            "ssl.key.pem": key,
        }

    def settings(self, broker: str = "broker.pem") -> dict[str, str]:
        """Returns the broker's settings of a listener with TLS."""
        return {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self.folder / broker),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.folder / "ca.pem"),
        }


@dataclass(frozen=True)
class LoginStack:
    """The stack, and how to log in to its broker."""

    stack: local.LocalStack
    listeners: Mapping[str, Listener]
    files: Files
    tokens: TokenEndpoint
    token_url: str

    def servers(self, way: str) -> str:
        """Returns the broker's address for clients that log in like this."""
        return self.listeners["CERTIFICATE" if way == "pem" else way.upper()].address

    def properties(self, way: str, user: str) -> dict[str, str]:
        """Returns the properties with which a user logs in."""
        authority = {"ssl.ca.location": str(self.files.folder / "ca.pem")}
        match way:
            case "certificate":
                return {"security.protocol": "SSL", **self.files.certificate(user)}
            case "pem":
                return {"security.protocol": "SSL", **self.files.pem(user)}
            case "scram":
                return {
                    **authority,
                    "security.protocol": "SASL_SSL",
                    "sasl.mechanism": "SCRAM-SHA-512",
                    "sasl.username": user,
                    "sasl.password": SECRET,
                }
        return {
            **authority,
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.client.id": user,
            "sasl.oauthbearer.client.secret": SECRET,
            "sasl.oauthbearer.token.endpoint.url": self.token_url,
        }

    def write_credentials(self, way: str, folder: Path, roles: Sequence[str]) -> None:
        """Writes a file of properties for each role. The user of a role is `headrace-<role>`."""
        folder.mkdir(mode=0o700)
        for role in roles:
            properties = self.properties(way, f"headrace-{role}")
            file = folder / f"{role}.properties"
            file.touch(0o600)
            file.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))


def _listeners(files: Files, keys: str) -> dict[str, Listener]:
    tls = files.settings()
    jaas = "sasl.jaas.config"
    token = {
        "sasl.enabled.mechanisms": "OAUTHBEARER",
        f"oauthbearer.{jaas}": f"{_OAUTH}.OAuthBearerLoginModule required;",
        "oauthbearer.sasl.server.callback.handler.class": (
            f"{_OAUTH}.OAuthBearerValidatorCallbackHandler"
        ),
        "oauthbearer.sasl.oauthbearer.jwks.endpoint.url": keys,
        "oauthbearer.sasl.oauthbearer.expected.audience": AUDIENCE,
        "oauthbearer.sasl.oauthbearer.expected.issuer": ISSUER,
        "oauthbearer.connections.max.reauth.ms": str(TOKEN_S * 1_000),
    }
    scram = {
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        f"scram-sha-512.{jaas}": (
            "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        ),
    }
    certificate = {
        "ssl.client.auth": "required",
        "ssl.principal.mapping.rules": "RULE:^CN=(.*)$/$1/",
    }
    return {
        "CERTIFICATE": Listener("SSL", tls | certificate),
        "SCRAM": Listener("SASL_SSL", tls | scram),
        "TOKEN": Listener("SASL_SSL", tls | token),
        "ENDED": Listener("SSL", files.settings("ended-broker.pem") | certificate),
    }


@contextmanager
def login_stack(
    folder: Path, monkeypatch: pytest.MonkeyPatch, users: Sequence[str], administrator: str
) -> Iterator[LoginStack]:
    """Yields a stack whose broker knows these users, each by all of the `WAYS`.

    `administrator` is one of them and may do everything.
    """
    folder.mkdir(exist_ok=True)
    files, tokens = Files(folder / "certificates", users), TokenEndpoint()
    keys = folder / "keys.json"
    keys.write_text(tokens.key_set())
    listeners = _listeners(files, keys.as_uri())
    allowed = f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={keys.as_uri()}"
    monkeypatch.setattr(kafka_server, "_QUIET", (*kafka_server._QUIET, allowed))
    with (
        tokens.serving() as url,
        listening_stack(folder / "stack", monkeypatch, listeners, [administrator]) as stack,
    ):
        admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers, "log_level": 0})
        sha512 = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        every: list[UserScramCredentialAlteration] = [
            UserScramCredentialUpsertion(user, sha512, SECRET.encode()) for user in users
        ]
        for made in admin.alter_user_scram_credentials(every).values():
            made.result(30)
        yield LoginStack(stack, listeners, files, tokens, url)
