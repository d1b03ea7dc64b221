"""Refusals of the gateway, as OpenAI's API words them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RETRY_S = 1
"""Seconds after which a client that was turned away for now may come again."""


class ApiError(Exception):
    """A request that is not answered. What the client is told is `body`."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """JSON, as OpenAI's clients read it."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else None)
        error = {"message": str(self), "type": kind or "invalid_request_error"}
        return {"error": {**error, "param": None, "code": self.code}}

    @property
    def headers(self) -> Mapping[str, str]:
        """Whether, and when, it is worth asking again; the official clients heed it."""
        if self.status not in (429, 503):
            return {}
        # What has failed for good has a code.
        return {"x-should-retry": "false"} if self.code else {"Retry-After": str(RETRY_S)}


def bad_request(message: str, code: str | None = None) -> ApiError:
    """A request that no repetition makes good."""
    return ApiError(400, message, code)
