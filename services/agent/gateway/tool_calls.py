"""Tool calls in what a policy said. Its tokens stay as they are: only the client's view changes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

Format = Literal["hermes", "json", "none"]
"""How a model spells calls.

`hermes`: any number of `<tool_call>{"name": …, "arguments": {…}}</tool_call>` after the text, as
Hermes and Qwen do. `json`: the whole answer is such an object, or a list of them, as Llama 3 does,
which writes `parameters`. `none`: never."""
FORMATS: tuple[Format, ...] = get_args(Format)

_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


def parse_tool_calls(text: str, form: Format) -> tuple[str, tuple[ToolCall, ...]]:
    """The text beside the calls, and the calls. What can't be parsed as a whole stays text."""
    if form == "hermes":
        found = [_load(one) for one in _HERMES.findall(text)]
        rest = _HERMES.sub("", text)
        if "<tool_call>" in rest:
            return text, ()  # one was begun and not ended
    elif form == "json":
        fenced = _FENCE.fullmatch(text.strip())
        value = _load(fenced[1] if fenced else text)
        found, rest = value if isinstance(value, list) else [value], ""
    else:
        return text, ()
    calls = [_call(value) for value in found]
    if not calls or any(call is None for call in calls):
        return text, ()
    return rest.strip(), tuple(call for call in calls if call is not None)


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    return ToolCall(value["name"], arguments) if isinstance(arguments, dict) else None
