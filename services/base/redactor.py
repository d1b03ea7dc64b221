"""Removes secrets from texts that leave the process: logs, events, error messages.

Every process has one `REDACTOR`, which knows the secrets that the process has resolved. It replaces
each secret with `[secret NAME]`, also if the secret is escaped for JSON, HTML, a URL or Python, or
if it is inside of a base64 text, as in the header of HTTP's basic authentication.
"""

from __future__ import annotations

import base64
import html
import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO, TypeVar
from urllib.parse import quote, quote_plus, unquote, urlsplit

if TYPE_CHECKING:
    from pydantic import BaseModel

MIN_CHARACTERS = 8
"""A shorter secret is not replaced: it would be found in texts that have nothing to do with it."""
MIN_SIMPLE_CHARACTERS = 16
"""The same for a secret of letters or digits alone, such as `password`, for a line of a secret
with several lines, and for a text in a secret that is JSON."""
MAX_PARTS = 256
"""Largest number of parts of one secret that are replaced, in addition to the whole."""
_PUBLIC = ("-----", "http://", "https://")
"""Beginnings of parts that are no secrets: the first line of a key, and addresses."""

M = TypeVar("M", bound="BaseModel")


class Redactor:
    """Replaces known secrets in texts. Safe to use from several threads."""

    def __init__(self) -> None:
        self._labels: dict[str, str] = {}
        self._forms: tuple[tuple[str, bytes, str], ...] = ()
        """What to replace, as text and as UTF-8, and its replacement. The longest comes first."""
        self._lock = threading.Lock()

    def add(self, name: str, secret: str) -> bool:
        """From now on replaces a secret. Returns False if it is too simple to be replaced."""
        if not _is_replaced(secret):
            return False
        label = f"[secret {re.sub(r'[^A-Za-z0-9_./ -]', '_', name)}]"
        with self._lock:
            if secret in self._labels:
                return True
            for part in _parts(secret):
                for form in _forms(part):
                    self._labels.setdefault(form, label)
            self._forms = tuple(
                (form, form.encode(), self._labels[form])
                for form in sorted(self._labels, key=len, reverse=True)
            )
        return True

    def text(self, text: str, characters: int | None = None) -> str:
        """Returns a text without the secrets, and of it at most the first `characters`.

        It must be shortened after that: half a secret is not recognized.
        """
        for form, _, label in self._forms:
            if form in text:
                text = text.replace(form, label)
        return text if characters is None else text[:characters]

    def finds(self, data: bytes) -> bool:
        """Returns whether bytes contain a secret."""
        return bool(self._forms) and any(form in data for _, form, _ in self._forms)

    def model(self, model: M) -> M:
        """Returns a model whose texts, at any depth, are without the secrets."""
        changes = {}
        for name, value in model if self._forms else ():
            redacted = self._value(value)
            if redacted is not value:
                changes[name] = redacted
        return model.model_copy(update=changes) if changes else model

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if hasattr(value, "model_copy"):
            return self.model(value)
        if isinstance(value, Mapping):
            pairs = {self.text(str(key)): self._value(one) for key, one in value.items()}
            return value if pairs == value else pairs
        if isinstance(value, list | tuple):
            items = [self._value(one) for one in value]
            same = all(new is old for new, old in zip(items, value, strict=True))
            return value if same else type(value)(items)
        return value


REDACTOR = Redactor()
"""The secrets of this process."""


def redact_output() -> None:
    """Redacts all that this process prints to stdout and stderr: logs, tracebacks, user's prints.

    It changes the streams themselves, because loggers of libraries may hold them already.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and "write" not in vars(stream):
            vars(stream)["write"] = _redacting(stream)


def _redacting(stream: TextIO) -> Any:
    write = stream.write

    def redacted_write(text: str) -> int:
        write(REDACTOR.text(text))
        return len(text)

    return redacted_write


def _parts(secret: str) -> Iterator[str]:
    """Yields a secret, and the parts of it that may be printed alone."""
    yield secret
    found = [line.strip() for line in secret.splitlines()] if "\n" in secret else []
    try:
        password = urlsplit(secret).password
    except ValueError:
        password = None
    if password is not None and _is_replaced(password):
        yield from {password, unquote(password)}
    if secret.lstrip().startswith("{"):
        with suppress(ValueError, RecursionError):
            found += _texts(json.loads(secret))
    for part in found[:MAX_PARTS]:
        if len(part) >= MIN_SIMPLE_CHARACTERS and not part.startswith(_PUBLIC):
            yield part


def _is_replaced(secret: str) -> bool:
    simple = secret.isalpha() or secret.isdecimal()
    return len(secret) >= (MIN_SIMPLE_CHARACTERS if simple else MIN_CHARACTERS)


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
        yield from tree.splitlines()
    elif isinstance(tree, list | dict):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts(value)


def _forms(secret: str) -> set[str]:
    """Returns how a secret may be written in a text."""
    forms = {
        secret,
        json.dumps(secret)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1],
        repr(secret)[1:-1],
        html.escape(secret),
        quote(secret),
        quote(secret, safe=""),
        quote_plus(secret),
    }
    data = secret.encode()
    for before in range(3):
        # Base64 has 4 characters for 3 bytes, so the secret has one of three positions in them.
        # Characters that also depend on the neighbours of the secret are left out.
        text = base64.b64encode(bytes(before) + data).decode()
        own = text[(before * 8 + 5) // 6 : (before + len(data)) * 8 // 6]
        forms |= {own, own.replace("+", "-").replace("/", "_")}
    return forms
