"""Texts that a record can hold, whoever made them."""

from __future__ import annotations


def encodable(text: str) -> str:
    """Returns a text with `?` for each lone surrogate, which UTF-8 can't encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def message_of(error: BaseException) -> str:
    """Returns the type and the message of an exception of a user's code, which may be anything."""
    try:
        text = str(error)
    except Exception as broken:
        text = f"its message raises {type(broken).__name__}"
    return encodable(f"{type(error).__name__}: {text}")
