"""References to secrets in the options of plug-ins, and literals that look like secrets.

A recipe is kept in the topic `runs` for ever, so it holds no secret. It says where a worker finds
one: `{ env = "NAME" }` is a variable of the worker's environment, and `{ file = "/path" }` is a
file on the worker's machine. Every table with exactly one of these two keys, whose value is text,
is a reference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator

KINDS = ("env", "file")
COMMAND = "command"
"""The options that become command lines, which every user of the machine can read."""
MIN_CHARACTERS = 8
"""A shorter literal is never taken for a secret."""

_TELLING_KEY = re.compile(
    r"(?:^|[_.-])(?:token|password|passwd|passphrase|secret|credentials?"
    r"|(?:api|access|private|secret)[_-]?key)$",
    re.IGNORECASE,
)
_TELLING_VALUE = re.compile(
    r"(?:sk-|hf_|gh[opsu]_|github_pat_|glpat-|npm_|pypi-|xox[abp]-|AKIA|ASIA|AIza|eyJ)"
    r"[\w.-]{16}|-----BEGIN [A-Z ]*PRIVATE KEY|[a-z]+://[^/@\s:]*:[^/@\s]+@"
)
_SPECIAL_TOKEN = re.compile(r"\s*[<\[].*[>\]]\s*", re.DOTALL)
"""A token of a tokenizer, such as `<|im_end|>`: many options have a key that ends with `token`."""


class SecretReference(NamedTuple):
    """Where a worker finds a secret."""

    kind: str
    """`env` or `file`."""
    name: str
    """The name of the variable, or the path of the file."""

    def __str__(self) -> str:
        return f'{{ {self.kind} = "{self.name}" }}'


def read_reference(value: Any) -> SecretReference | None:
    """Returns the reference that a value of an option is, or None if it is no reference."""
    if isinstance(value, Mapping) and len(value) == 1:
        ((kind, name),) = value.items()
        if kind in KINDS and isinstance(name, str):
            return SecretReference(kind, name)
    return None


def leaves(options: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted key and the value of everything in options that is no table and no list.

    A reference counts as one value.
    """
    if (reference := read_reference(options)) is not None:
        yield key, reference
    elif isinstance(options, Mapping):
        for name, value in options.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(options, Sequence) and not isinstance(options, str):
        for index, value in enumerate(options):
            yield from leaves(value, f"{key}.{index}")
    else:
        yield key, options


def _check(options: dict[str, Any]) -> dict[str, Any]:
    for key, value in leaves(options):
        if not isinstance(value, SecretReference):
            continue
        if not key:
            raise ValueError(f"{value} is a reference to a secret, but options must be a table")
        if COMMAND in key.split("."):
            raise ValueError(
                f"{key}: {value} can't be part of a command line, because every user of the "
                "machine can read it. Pass the secret to the program in the option `environment`"
            )
        if not value.name:
            raise ValueError(f"{key}: {value} names no variable and no file")
        if value.kind == "file" and not value.name.startswith("/"):
            raise ValueError(
                f"{key}: {value} must be an absolute path, because workers start in any folder"
            )
    return options


Options = Annotated[dict[str, Any], AfterValidator(_check)]
"""The options of a plug-in. Values at any depth may be references to secrets."""


def literal_secrets(recipe: Mapping[str, Any]) -> list[str]:
    """Returns the keys of options in a recipe's tree whose values look like secrets."""
    return [
        key
        for key, value in leaves(recipe)
        if ".options." in key and isinstance(value, str) and _looks_secret(key, value)
    ]


def _looks_secret(key: str, value: str) -> bool:
    if _TELLING_VALUE.match(value):
        return True
    if len(value) < MIN_CHARACTERS or _SPECIAL_TOKEN.fullmatch(value):
        return False
    return _TELLING_KEY.search(key) is not None
