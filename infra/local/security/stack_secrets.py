"""The files of a secure stack, all for its user alone, in `<state>/stack-credentials`.

`ca.pem` is the stack's authority. Each role has `<role>.pem`, its key and certificate, and
`<role>.properties`, with which its clients connect to the broker and the registry. `servers/` is
what only the servers read. `stack-roles.json` beside the folder says that this stack is secure, and
for which roles, until its data is wiped.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from headrace.errors import DependencyError, HeadraceError
from headrace.infra.local.security.certificates import VALID_S, CertificateAuthority
from headrace.services.base.files import private, private_folder

FOLDER, SERVERS, ROLES_FILE = "stack-credentials", "servers", "stack-roles.json"
ADMINISTRATOR = "administrator"
"""The role that may do everything, beside those of the stack's owner."""
RENEW_S = 86_400
"""Certificates are made again at a start if they are valid for less than this."""
_MARK = "valid-until"
"""The file with the end of the certificates, in Unix seconds. It is written last."""


def principal(role: str) -> str:
    """Returns the common name of a role's certificate, which is the name of its principal."""
    return f"headrace-{role}"


def secure_roles(state: Path) -> tuple[str, ...]:
    """Returns the roles for which a stack is secure. None: it is not secure."""
    path = state / ROLES_FILE
    try:
        return tuple(map(str, json.loads(path.read_bytes())))
    except FileNotFoundError:
        return ()
    except ValueError as error:
        raise HeadraceError(f"{path} is damaged: delete it, then `headrace up --secure`") from error


def keep_secrets(state: Path, roles: Sequence[str]) -> float:
    """Returns until when the secrets of a stack are valid, in Unix seconds.

    Makes all of them again if one is missing or they end soon: no server may use them now. Raises
    UsageError if the package cryptography is missing.
    """
    folder, until = state / FOLDER, _valid_until(state)
    whole = all((folder / f"{role}.properties").exists() for role in (*roles, ADMINISTRATOR))
    if whole and until > time.time() + RENEW_S:
        return until
    _write(state / ROLES_FILE, json.dumps(list(roles)).encode())
    scratch = state / f"{FOLDER}.new"
    shutil.rmtree(scratch, ignore_errors=True)
    private_folder(scratch / SERVERS)
    now = time.time()
    _make(scratch, folder, roles, now)
    until = float(int(now + VALID_S))
    _write(scratch / _MARK, str(until).encode())
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)
    return until


def require_valid(until: float | None, state: Path) -> None:
    """Raises DependencyError if the certificates of a stack have ended. None: it has none."""
    if until is not None and until < time.time():
        ended = time.strftime("%Y-%m-%d %H:%M", time.gmtime(until))
        raise DependencyError(
            f"the certificates of the local stack in {state} ended at {ended} UTC: `headrace down` "
            "and then `headrace up` make new ones. The data stays"
        )


def remove_secrets(state: Path, *, forget: bool = False) -> None:
    """Deletes a stack's secrets. With `forget`, it need not be secure at its next start."""
    for folder in (FOLDER, f"{FOLDER}.new"):
        shutil.rmtree(state / folder, ignore_errors=True)
    if forget:
        (state / ROLES_FILE).unlink(missing_ok=True)


def _make(scratch: Path, folder: Path, roles: Sequence[str], now: float) -> None:
    """Writes all secrets into `scratch`, which will be `folder`."""
    authority = CertificateAuthority("headrace-local", now)
    servers = scratch / SERVERS
    _write(scratch / "ca.pem", authority.pem)
    _write(servers / "broker.pem", authority.issue(principal("broker"), server=True))
    # It trusts nothing but itself, so no certificate of the authority reaches the controller.
    _write(servers / "controller.pem", controller := authority.self_signed(principal("controller")))
    _write(servers / "controller-ca.pem", controller[controller.index(b"-----BEGIN CERT") :])
    _write(servers / "registry.pem", authority.issue(principal("registry"), server=True))
    users = {}
    for role in (*roles, ADMINISTRATOR):
        users[principal(role)] = password = secrets.token_urlsafe(24)
        _write(scratch / f"{role}.pem", authority.issue(principal(role)))
        properties = {
            "security.protocol": "SSL",
            "ssl.ca.location": folder / "ca.pem",
            "ssl.certificate.location": folder / f"{role}.pem",
            "ssl.key.location": folder / f"{role}.pem",
            "schema.registry.ssl.ca.location": folder / "ca.pem",
            "schema.registry.basic.auth.user.info": f"{principal(role)}:{password}",
        }
        lines = "".join(f"{key}={value}\n" for key, value in properties.items())
        _write(scratch / f"{role}.properties", lines.encode())
    _write(servers / "users.json", json.dumps(users).encode())


def registry_users(state: Path) -> dict[str, str]:
    """Returns the password of each principal for the registry."""
    users: dict[str, str] = json.loads((state / FOLDER / SERVERS / "users.json").read_bytes())
    return users


def _valid_until(state: Path) -> float:
    try:
        return float((state / FOLDER / _MARK).read_text())
    except (FileNotFoundError, ValueError):
        return 0.0


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb", opener=private) as file:
        file.write(data)
        os.fchmod(file.fileno(), 0o600)  # It may have existed.
