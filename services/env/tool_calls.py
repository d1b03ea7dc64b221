"""Tool calls in what a policy wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

MARKED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
"""A call as chat templates of the Hermes kind spell it, as Qwen's."""
MOST = 16
"""Calls in one action."""


class BadCall(ValueError):
    """It was to be a tool call, and is none: the policy is told."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool and its arguments."""

    name: str
    arguments: Mapping[str, Any]


def read_calls(action: str, names: Collection[str]) -> list[Call]:
    """The calls of an action, marked or the whole of it; none where it is an answer.

    BadCall where one isn't JSON with `name` and `arguments`, or names no tool.
    """
    texts = MARKED.findall(action)
    if not texts and action.lstrip().startswith("{"):
        texts = [action]
    if len(texts) > MOST:
        raise BadCall(f"{len(texts)} calls at once; there may be {MOST}")
    return [_read(text, names) for text in texts]


def _read(text: str, names: Collection[str]) -> Call:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadCall(f"a tool call must be JSON: {error}") from error
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise BadCall('a tool call must be {"name": …, "arguments": {…}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        raise BadCall("a tool call's arguments must be an object")
    if call["name"] not in names:
        raise BadCall(f"there is no tool {call['name'][:80]!r}; tools are {', '.join(names)}")
    return Call(call["name"], arguments)
