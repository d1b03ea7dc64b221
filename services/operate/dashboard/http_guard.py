"""Who may talk to the dashboard. Pure: it decides on the headers of a request.

The address has a token, since every user and every program of this machine can reach 127.0.0.1. A
web page that the operator visits can make the browser send requests here, too: it does not have the
headers with the tokens. Under a name of its own that it lets point to 127.0.0.1 (DNS rebinding), it
fails the check of `Host`. No token is in a cookie: browsers send a host's cookies to all of its
ports, and any user of the machine can listen on one.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""The headers of every answer."""
FILE_CSP = "default-src 'none'; sandbox"
"""The policy of a file of an episode, which anybody may have written."""
TOKEN_HEADER = "X-Headrace-Token"
LOCAL = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class RefusedRequest:
    """Why a request is refused."""

    status: int
    error: str


def new_token() -> str:
    """Returns a token that nobody guesses."""
    return secrets.token_urlsafe(24)


@dataclass(frozen=True)
class HttpGuard:
    """The tokens and the names of one server."""

    port: int
    hosts: Collection[str] = LOCAL
    """The names under which the server is reached, without the port."""
    token: str = field(default_factory=new_token)
    """In the address. It gives access to everything that the dashboard reads."""
    action_token: str = field(default_factory=new_token)
    """In a header of every request that changes something."""

    def refuse_origin(self, host: str, origin: str | None) -> RefusedRequest | None:
        """Returns why a request is refused for its `Host` or `Origin`; None if it is not."""
        names = {f"{name}:{self.port}" for name in self.hosts}
        if self.port == 80:
            names.update(self.hosts)
        if host.lower() not in names:
            return RefusedRequest(
                421,
                f"this dashboard does not answer to the name {host[:80]!r}. Use the address that "
                "`headrace dashboard` printed, or start it with --allowed-host NAME",
            )
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return RefusedRequest(403, "a page of another origin may not use the dashboard")
        return None

    def refuse_reader(self, authorization: str) -> RefusedRequest | None:
        """Returns why a request may not read; None if it has the token."""
        scheme, _, bearer = authorization.partition(" ")
        if scheme.lower() == "bearer" and _equal(bearer.strip(), self.token):
            return None
        return RefusedRequest(
            401,
            "the token is missing or wrong. Open the whole address that `headrace dashboard` "
            "printed, with ?token=",
        )

    def refuse_action(self, header: str | None) -> RefusedRequest | None:
        """Returns why a request may not change something; None if it may."""
        if header is not None and _equal(header, self.action_token):
            return None
        return RefusedRequest(
            403, f"an action needs the header {TOKEN_HEADER} of this dashboard's page"
        )


def _equal(one: str, other: str) -> bool:
    return secrets.compare_digest(one.encode("utf-8", "surrogateescape"), other.encode())
