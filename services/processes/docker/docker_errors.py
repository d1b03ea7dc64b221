"""Our errors for calls that the Docker engine refuses."""

from __future__ import annotations

import json

from headrace.errors import InfrastructureError
from headrace.services.base.redactor import REDACTOR


class NotThere(InfrastructureError):
    """There is no such container, image or command, or not any more, or not under that name."""


class Conflict(InfrastructureError):
    """It can't be done now, for example because a name is taken or a container does not run."""


def refused(status: int, text: str, call: str) -> InfrastructureError:
    """Returns the error for an HTTP answer with a status of 400 or more."""
    try:
        message = str(json.loads(text)["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        message = text
    message = REDACTOR.text(f"{call}: {message.strip()}", 1000)
    if "no space left on device" in message:
        return InfrastructureError("no_space", message)
    if status == 404:
        return NotThere("sandbox_lost", message)
    # The engine answers 500 if a command begins in a container that is being removed.
    if status in (400, 409) or "is not running" in message:
        return Conflict("sandbox_conflict", message)
    return InfrastructureError("engine_error", message)
