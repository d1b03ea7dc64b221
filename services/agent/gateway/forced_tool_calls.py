"""Tool calls in what a policy says: how one is forced, and how they are read.

Reading changes the client's view alone: the tokens stay as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Format = Literal["hermes", "json", "none"]
"""How a model spells calls.

`hermes`: any number of `<tool_call>{"name": …, "arguments": {…}}</tool_call>` after the text, as
Hermes and Qwen do. `json`: the whole answer is such an object, or a list of them, as Llama 3 does,
which writes `parameters`. `none`: never."""
FORMATS: tuple[Format, ...] = get_args(Format)

BEGIN, END = "<tool_call>", "</tool_call>"
"""Of a call as Hermes spells it."""
NO_PARAMETERS = {"type": "object", "properties": {}}
"""The schema of a tool's arguments that names none."""
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of a JSON schema that have schemas by name, whatever the names are."""
VALUES = ("const", "enum", "default", "examples")
"""Those that have values, and no schemas."""

_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()
_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


def parse_tool_calls(text: str, form: Format) -> tuple[str, tuple[ToolCall, ...]]:
    """The text beside the calls, and the calls. What can't be parsed as a whole stays text."""
    if form == "hermes":
        found, rest = _hermes(text)
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


def forced_call(
    form: Format, tools: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Any], tuple[str, str]]:
    """The JSON schema that a call of one of `tools` follows, and what is around the call.

    `tools` are the schemas of their arguments, by name. ValueError where calls have no spelling.
    """
    if form == "none":
        raise ValueError("this policy spells no calls: the recipe's tool_calls is none")
    calls = {}
    for index, (name, parameters) in enumerate(tools.items()):
        place = f"#/$defs/{index}/properties/arguments"
        calls[str(index)] = {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": _moved(parameters, place)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
    schema = {"$defs": calls, "anyOf": [{"$ref": f"#/$defs/{index}"} for index in calls]}
    return schema, (f"{BEGIN}\n", f"\n{END}") if form == "hermes" else ("", "")


def _moved(schema: Any, place: str) -> Any:
    """A schema as it reads at another place of a document: its own references begin there."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = place + value[1:]
        elif key in NAMED and isinstance(value, Mapping):
            moved[key] = {name: _moved(one, place) for name, one in value.items()}
        else:
            moved[key] = value if key in VALUES else _moved(value, place)
    return moved


def _hermes(text: str) -> tuple[list[Any], str]:
    """What stands in calls, and the text beside them. [None] where one isn't JSON, or doesn't end.

    The end is looked for behind the JSON: an argument may have it, too.
    """
    found, rest, at = [], "", 0
    while (begin := text.find(BEGIN, at)) >= 0:
        try:
            value, end = _DECODER.raw_decode(text, _past_space(text, begin + len(BEGIN)))
        except (ValueError, RecursionError):
            return [None], text
        end = _past_space(text, end)
        if not text.startswith(END, end):
            return [None], text
        found.append(value)
        rest, at = rest + text[at:begin], end + len(END)
    return found, rest + text[at:]


def _past_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return start if found is None else found.end()


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
