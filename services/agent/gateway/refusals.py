"""Errors of the gateway, in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RETRY_S = 1
"""Seconds after which a client may retry."""
MESSAGE = 2000
"""Most characters of a message. It may repeat a part of the request, and stays in memory until the
client has read it."""


class ApiError(Exception):
    """A request was refused. The client gets `body`."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message[:MESSAGE])
        self.status = status
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON, as OpenAI's clients read it."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else None)
        error = {"message": str(self), "type": kind or "invalid_request_error"}
        return {"error": {**error, "param": None, "code": self.code}}

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers that say whether and when to retry. The official clients obey them."""
        if self.status not in (429, 503):
            return {}
        # Permanent failures have a code.
        return {"x-should-retry": "false"} if self.code else {"Retry-After": str(RETRY_S)}


def bad_request(message: str, code: str | None = None) -> ApiError:
    """Returns the error for a request that is wrong: a retry would not help."""
    return ApiError(400, message, code)
