"""The secrets of a secure local stack: who gets which, and how long they live."""

from __future__ import annotations

import datetime
import ipaddress
import stat
import sys
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import verification

from headrace.errors import DependencyError, HeadraceError, UsageError
from headrace.infra import local
from headrace.infra.local import kafka_server, stack_record
from headrace.infra.local.security import certificates, stack_secrets
from headrace.infra.local.security.certificates import VALID_S, CertificateAuthority
from headrace.infra.local.security.secure_settings import broker_settings, write_registry_settings
from headrace.infra.local.security.stack_secrets import (
    keep_secrets,
    remove_secrets,
    require_valid,
    secure_roles,
)
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import locate

ROLES = ("agent", "guest")


def certificate_in(pem: bytes) -> x509.Certificate:
    """Returns the first certificate of a file with a key and a certificate."""
    return x509.load_pem_x509_certificate(pem[pem.index(b"-----BEGIN CERT") :])


def test_an_authority_signs_clients_and_servers() -> None:
    now = time.time()
    authority = CertificateAuthority("ours", now)
    store = verification.Store([x509.load_pem_x509_certificate(authority.pem)])
    at = datetime.datetime.fromtimestamp(now, datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    client = certificate_in(authority.issue("headrace-agent"))
    server = certificate_in(authority.issue("headrace-broker", server=True))
    build = verification.PolicyBuilder().store(store)

    build.time(at).build_client_verifier().verify(client, [])
    build.time(at).build_server_verifier(address).verify(server, [])
    assert client.subject.rfc4514_string() == "CN=headrace-agent"
    with pytest.raises(verification.VerificationError):  # An agent can't play the broker.
        build.time(at).build_server_verifier(address).verify(client, [])
    late = at + datetime.timedelta(seconds=VALID_S + 1)
    with pytest.raises(verification.VerificationError):
        build.time(late).build_client_verifier().verify(client, [])
    other = certificate_in(CertificateAuthority("ours", now).issue("headrace-agent"))
    with pytest.raises(verification.VerificationError):
        build.time(at).build_client_verifier().verify(other, [])
    with pytest.raises(verification.VerificationError):
        build.time(at).build_server_verifier(address).verify(
            certificate_in(authority.self_signed("headrace-controller")), []
        )


def test_only_the_user_can_read_the_secrets_and_each_role_has_its_own(tmp_path: Path) -> None:
    keep_secrets(tmp_path, ROLES)
    folder = tmp_path / stack_secrets.FOLDER
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_dir()} == {
        0o700
    }
    passwords = set()
    for role in (*ROLES, "administrator"):
        cluster = ClusterConfig(credentials=folder, role=role)
        own = cluster.broker_properties()
        assert certificate_in(
            Path(own["ssl.certificate.location"]).read_bytes()
        ).subject == x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"headrace-{role}")])
        passwords.add(cluster.registry_properties()["basic.auth.user.info"])
    assert len(passwords) == 3
    keys = {
        path.read_bytes()[:200]
        for path in files
        if path.suffix == ".pem" and b"PRIVATE" in path.read_bytes()
    }
    assert len(keys) == 6
    # The authority's key is nowhere: nobody can make a further principal.
    public = certificate_in((folder / "ca.pem").read_bytes()).public_key()
    for path in files:
        if b"PRIVATE KEY" in (data := path.read_bytes()):
            assert load_pem_private_key(data, None).public_key() != public


def test_secrets_are_kept_until_they_end_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    until = keep_secrets(tmp_path, ROLES)
    assert until == pytest.approx(time.time() + VALID_S, abs=60)
    authority = (tmp_path / stack_secrets.FOLDER / "ca.pem").read_bytes()
    assert keep_secrets(tmp_path, ROLES) == until
    assert (tmp_path / stack_secrets.FOLDER / "ca.pem").read_bytes() == authority
    keep_secrets(tmp_path, (*ROLES, "env"))  # another role
    renewed = (tmp_path / stack_secrets.FOLDER / "ca.pem").read_bytes()
    assert renewed != authority
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + VALID_S - 60)
    assert keep_secrets(tmp_path, (*ROLES, "env")) > until
    assert (tmp_path / stack_secrets.FOLDER / "ca.pem").read_bytes() != renewed


def test_a_stack_stays_secure_until_it_is_wiped(tmp_path: Path) -> None:
    assert secure_roles(tmp_path) == ()
    keep_secrets(tmp_path, ROLES)
    remove_secrets(tmp_path)
    assert secure_roles(tmp_path) == ROLES
    assert not (tmp_path / stack_secrets.FOLDER).exists()
    remove_secrets(tmp_path, forget=True)
    assert secure_roles(tmp_path) == ()
    (tmp_path / stack_secrets.ROLES_FILE).write_text("{")
    with pytest.raises(HeadraceError, match=r"stack-roles\.json is damaged"):
        secure_roles(tmp_path)


def test_certificates_that_have_ended_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_valid(None, tmp_path)
    require_valid(time.time() + 9, tmp_path)
    with pytest.raises(DependencyError, match=r"ended at 2001-09-09 01:46 UTC: `headrace down`"):
        require_valid(1e9, tmp_path)
    ended = local.LocalStack("b:1", "https://r", 1, 2, tmp_path, None, tmp_path, 1e9)
    monkeypatch.setattr(local, "find", lambda _: ended)
    with pytest.raises(DependencyError, match="the certificates of the local stack"):
        locate(ClusterConfig(state=tmp_path))


def test_a_record_of_an_older_stack_is_read(tmp_path: Path) -> None:
    (tmp_path / stack_record.FILE).write_text('{"servers": {}, "owner": null, "guard": null}')
    assert stack_record.load(tmp_path) == stack_record.NOTHING


def test_the_broker_denies_what_no_acl_allows() -> None:
    settings = broker_settings(1, 2)
    plain = dict(
        line.split("=", 1) for line in kafka_server.render_properties(1, 2, "kafka").splitlines()
    )
    assert "PLAINTEXT" not in str(plain | settings)
    assert settings["allow.everyone.if.no.acl.found"] == "false"
    assert settings["authorizer.class.name"].endswith("StandardAuthorizer")
    assert "ANONYMOUS" not in settings["super.users"]
    for listener in ("secure", "controller"):
        assert settings[f"listener.name.{listener}.ssl.client.auth"] == "required"


def test_the_registry_gets_its_passwords_by_file(tmp_path: Path) -> None:
    keep_secrets(tmp_path, ROLES)
    name = write_registry_settings(tmp_path, 3)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    text = (tmp_path / name).read_text()
    assert "quarkus.security.users.embedded.roles.headrace-guest=reader\n" in text
    assert "quarkus.security.users.embedded.roles.headrace-agent=writer\n" in text
    assert "quarkus.http.insecure-requests=disabled\n" in text


def test_without_cryptography_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.x509", None)
    with pytest.raises(UsageError, match=r"pip install 'headrace\[signatures\]'"):
        certificates.CertificateAuthority("x", 0.0)
