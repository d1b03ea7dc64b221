"""Writes TOML. The standard library only reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(tree: Mapping[str, Any], prefix: str = "") -> str:
    """Returns JSON values as TOML that `tomllib` reads back.

    A key with the value None is left out, except `training`: without it, its default would apply.
    It is written as `false`.
    """
    own, tables = [], []
    for name, value in tree.items():
        if isinstance(value, Mapping):
            path = f"{prefix}{_key(name)}"
            body = to_toml(value, f"{path}.")
            # A table that contains only tables needs no header line.
            only_tables = value and all(isinstance(child, Mapping) for child in value.values())
            tables.append(body if only_tables else f"\n[{path}]\n{body}")
        elif value is not None:
            own.append(f"{_key(name)} = {_value(value)}\n")
        elif name == "training":
            own.append("training = false\n")
    return "".join(own + tables)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, Mapping):
        pairs = (f"{_key(name)} = {_value(item)}" for name, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    # Strings, numbers and booleans are the same in TOML and JSON, except that TOML escapes DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
