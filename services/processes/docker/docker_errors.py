"""What the Docker engine refuses, as errors of our own."""

from __future__ import annotations

import json

from headrace.errors import InfrastructureError


class NotThere(InfrastructureError):
    """No such container, image or command: or no longer, or not under that name."""


class Conflict(InfrastructureError):
    """It can't be done as things stand: a name is taken, a container doesn't run."""


def refused(status: int, text: str, call: str) -> InfrastructureError:
    """The error for an HTTP answer of status 400 or more."""
    try:
        message = str(json.loads(text)["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        message = text
    message = f"{call}: {message.strip()}"[:1000]
    if "no space left on device" in message:
        return InfrastructureError("no_space", message)
    if status == 404:
        return NotThere("sandbox_lost", message)
    # A command that is to begin in a container while that is being removed: the engine's error 500.
    if status in (400, 409) or "is not running" in message:
        return Conflict("sandbox_conflict", message)
    return InfrastructureError("engine_error", message)
