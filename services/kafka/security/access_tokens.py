"""Fetches tokens for OAUTHBEARER, as librdkafka does for its own clients."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from headrace.errors import DependencyError
from headrace.services.base.redactor import REDACTOR
from headrace.services.kafka.security.client_security import OAuthSettings

REQUEST_S = 5.0
"""The limit of a request for a token."""
MAX_BYTES = 64 * 1024
"""The longest answer of a token endpoint that is read."""
REFRESH_SHARE = 0.8
"""A token is replaced after this share of its lifetime."""
UNSECURED_S = 3600
"""Lifetime of an unsecured token, unless its claims say another one."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: the secret of the client would follow them to any host."""

    def redirect_request(self, *_: Any) -> None:
        return None


class AccessTokens:
    """Returns the same token until it ends soon, and then a new one.

    Event loops of several threads may use it: Faust's consumer has a loop of its own.
    """

    def __init__(self, settings: OAuthSettings, context: ssl.SSLContext) -> None:
        """`context` is for an `https` endpoint."""
        self._settings = settings
        self._opener = urllib.request.build_opener(
            urllib.request.HTTPSHandler(context=context), _NoRedirect
        )
        self._token, self._refresh_at = "", 0.0
        self._fetching = threading.Lock()

    async def token(self) -> str:
        """Raises DependencyError within 10 s if the endpoint gives no token."""
        return await asyncio.to_thread(self._current)

    def _current(self) -> str:
        with self._fetching:
            if time.time() >= self._refresh_at:
                token, lifetime_s = self._fetch()
                REDACTOR.add("OAUTHBEARER token", token)
                self._token = token
                self._refresh_at = time.time() + REFRESH_SHARE * lifetime_s
            return self._token

    def _fetch(self) -> tuple[str, float]:
        settings = self._settings
        if settings.method == "unsecured":
            return unsecured_token(settings.claims, time.time())
        form = {"grant_type": "client_credentials"}
        form |= {"scope": settings.scope} if settings.scope else {}
        user = f"{settings.client_id}:{settings.client_secret}".encode()
        request = urllib.request.Request(
            settings.token_url,
            urllib.parse.urlencode(form).encode(),
            {"Authorization": f"Basic {base64.b64encode(user).decode()}"},
        )
        try:
            with self._opener.open(request, timeout=REQUEST_S) as answer:
                tree: Any = json.loads(answer.read(MAX_BYTES))
            token = str(tree["access_token"])
            return token, float(tree.get("expires_in", 0.0)) or _lifetime_s(token)
        except (OSError, ValueError, LookupError, TypeError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            raise DependencyError(
                f"the token endpoint {settings.token_url} gave no token: {error}. Check the URL, "
                "sasl.oauthbearer.client.id and sasl.oauthbearer.client.secret"
            ) from error


def unsecured_token(claims: str, now: float) -> tuple[str, float]:
    """Returns a token that nobody signed, and its lifetime in seconds. `claims` are those of
    `sasl.oauthbearer.config`: `principal=NAME`, `lifeSeconds=N`, `scope=A,B`, and names of claims.

    Only brokers that believe everybody accept it (RFC 7515, appendix A.5).
    """
    given = dict(pair.split("=", 1) for pair in claims.split() if "=" in pair)
    lifetime_s = float(given.get("lifeSeconds", UNSECURED_S))
    body: dict[str, Any] = {
        given.get("principalClaimName", "sub"): given.get("principal", ""),
        "iat": now,
        "exp": now + lifetime_s,
    }
    if scope := given.get("scope"):
        body[given.get("scopeClaimName", "scope")] = scope.split(",")
    parts = (_base64(json.dumps(part).encode()) for part in ({"alg": "none"}, body))
    return ".".join((*parts, "")), lifetime_s


def _lifetime_s(token: str) -> float:
    """Returns how long a token that is a JWT is valid from now on, in seconds."""
    body = token.split(".")[1]
    tree = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    return float(tree["exp"]) - time.time()


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
