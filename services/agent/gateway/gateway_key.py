"""The key of clients from outside. A module of its own: whoever needs the key needs no server."""

from __future__ import annotations

import os

from headrace.errors import UsageError
from headrace.services.base.redactor import REDACTOR

KEY = "HEADRACE_GATEWAY_KEY"
"""The environment variable with the key that clients need to take episodes."""
KEY_CHARACTERS = 16
"""Smallest length of the key: whoever guesses it can take episodes."""


def gateway_key() -> str:
    """Returns the key that clients need, and keeps it out of logs. Raises UsageError without it."""
    key = os.environ.get(KEY, "")
    if len(key) < KEY_CHARACTERS:
        raise UsageError(
            f"clients from outside need a key to take episodes: set {KEY} to a secret of at least "
            f"{KEY_CHARACTERS} characters, for example `export {KEY}=$(openssl rand -hex 24)`"
        )
    REDACTOR.add(KEY, key)
    return key
