"""Public keys in a recipe. Whoever has the private key of one may publish a policy's versions, or
act for a tenant."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

from pydantic import AfterValidator

ED25519 = "ed25519:"
"""How the text of a public key begins. After it come its 32 bytes (RFC 8032) in base64."""
KEY_BYTES = 32


def key_text(raw: bytes) -> str:
    """Returns the text of a public key of 32 bytes, as a recipe has it."""
    return ED25519 + base64.b64encode(raw).decode()


def key_bytes(text: str) -> bytes:
    """Returns the 32 bytes of a public key. Raises ValueError if the text is no key."""
    try:
        raw = base64.b64decode(text.removeprefix(ED25519), validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if not text.startswith(ED25519) or len(raw) != KEY_BYTES:
        raise ValueError(
            f"{text!r} is not a public key: copy what `headrace keys show FILE` prints, "
            f"{ED25519} and 44 characters"
        )
    return raw


def _check(keys: tuple[str, ...]) -> tuple[str, ...]:
    for key in keys:
        key_bytes(key)
    return keys


PublicKeys = Annotated[tuple[str, ...], AfterValidator(_check)]
"""Public keys in a recipe."""
