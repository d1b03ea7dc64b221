"""Replaces references in the options of a plug-in with the secrets that they name."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.recipe.secret_references import SecretReference, read_reference
from headrace.services.base.files import known_to_all
from headrace.services.base.redactor import MIN_CHARACTERS, MIN_SIMPLE_CHARACTERS, REDACTOR

logger = logging.getLogger(__name__)

MAX_BYTES = 64 * 1024
"""Size of the largest secret in a file."""


def reveal(options: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns the recipe's options for a plug-in with secrets in place of references.

    Call it only with options of the recipe, never with those of a task: another team could read
    this process's environment. `key` is the key of the options in the recipe; error messages begin
    with it. What it reads is redacted from now on. Raises UsageError if a secret is missing.
    """
    return {name: _revealed(value, f"{key}.{name}") for name, value in options.items()}


def _revealed(value: Any, key: str) -> Any:
    if (reference := read_reference(value)) is not None:
        return _secret(reference, key)
    if isinstance(value, Mapping):
        return reveal(value, key)
    if isinstance(value, list | tuple):
        return [_revealed(one, f"{key}.{index}") for index, one in enumerate(value)]
    return value


def _secret(reference: SecretReference, key: str) -> str:
    try:
        secret = _variable(reference.name) if reference.kind == "env" else _file(reference.name)
        # A variable that is not UTF-8 holds surrogates.
        secret.encode()
    except UnicodeError:
        raise UsageError(f"{key}: {reference} is not UTF-8 text") from None
    except _Unusable as error:
        raise UsageError(f"{key}: {error}") from None
    if not secret:
        raise UsageError(f"{key}: {reference} is empty")
    if not REDACTOR.add(reference.name, secret):
        logger.warning(
            "%s: %s is too simple to be recognized, so it is not removed from logs and events. Use "
            "at least %d characters, or %d if they are only letters or only digits",
            key,
            reference,
            MIN_CHARACTERS,
            MIN_SIMPLE_CHARACTERS,
        )
    return secret


class _Unusable(Exception):
    """A secret can't be read."""


def _variable(name: str) -> str:
    try:
        return os.environ[name]
    except KeyError:
        raise _Unusable(
            f"the environment variable {name} is not set. Set it where this worker runs"
        ) from None


def _file(path: str) -> str:
    try:
        # A pipe must not block the worker.
        with open(path, "rb", opener=_without_waiting) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise _Unusable(f"{path} is not a file")
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _Unusable(
            f"the file {path} can't be read: {error.strerror}. It must be on this worker's machine"
        ) from None
    if len(data) > MAX_BYTES:
        raise _Unusable(f"the file {path} has more than {MAX_BYTES // 1024} KiB")
    if known_to_all(Path(path), mode):
        logger.warning("every user of this machine can read the secret %s. chmod 600 it", path)
    text = data.decode()
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
