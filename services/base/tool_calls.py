"""Tool calls in the text of a policy: how they are read, and how one is forced.

A policy spells a call as JSON: `{"name": …, "arguments": {…}}`. The rules for reading it are:

- `name` is a string and `arguments` is an object. Both are required. Llama 3 writes `parameters`
  instead of `arguments`; that is accepted.
- In the format `hermes` a text contains any number of calls, each between `<tool_call>` and
  `</tool_call>`. The closing tag is searched behind the JSON, since an argument may contain it.
- In the format `json` the whole text is one call or a list of calls, with or without a Markdown
  code fence around it.
- If one call of a text breaks a rule, none of its calls is read.

Reading takes time linear in the text's length: a policy may write anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from headrace.services.base.json_text import TOO_DEEP, check_value, load_json

Format = Literal["hermes", "json", "none"]
"""How a model spells calls. Hermes and Qwen models use `hermes`, Llama 3 uses `json`; with `none`
a text never contains calls."""
FORMATS: tuple[Format, ...] = get_args(Format)

BEGIN, END = "<tool_call>", "</tool_call>"
"""The tags around a call in the format `hermes`."""
FENCE = "```"
MOST = 16
"""Largest number of calls in one action."""
NO_PARAMETERS = {"type": "object", "properties": {}}
"""The schema of the arguments of a tool that takes none."""
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of JSON Schema whose value maps names to schemas."""
VALUES = ("const", "enum", "default", "examples")
"""Keywords of JSON Schema that contain plain values, not schemas."""

_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


class BadCall(ValueError):
    """A policy meant to call a tool and wrote it wrongly. The message is for the policy."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


def read_calls(action: str, names: Collection[str]) -> list[ToolCall]:
    """Returns the calls of an action, for an environment that has the tools `names`.

    The calls are spelled as in `hermes`; or the action is a single JSON object, without tags. The
    closing tag of the last call may be missing, because the action does not contain the stop text.
    Returns an empty list if the action has no call. Raises BadCall if a call breaks a rule or names
    another tool, or if there are more than MOST calls.
    """
    bare = BEGIN not in action and action.lstrip().startswith("{")
    values = [_load(action)] if bare else _hermes(action, unclosed=True)[0]
    if len(values) > MOST:
        raise BadCall(f"{len(values)} calls at once; at most {MOST} are allowed")
    calls = [_call(value) for value in values]
    for call in calls:
        if call.name not in names:
            raise BadCall(f"there is no tool {call.name[:80]!r}; tools are {', '.join(names)}")
    return calls


def parse_tool_calls(text: str, form: Format) -> tuple[str, tuple[ToolCall, ...]]:
    """Returns the text around the calls, and the calls, as a client of the gateway sees them.

    If a call breaks a rule, or there is none, returns the whole text and no calls. The tokens of
    the answer stay as they are in either case.
    """
    try:
        if form == "hermes":
            values, rest = _hermes(text, unclosed=False)
        elif form == "json":
            value = _load(_unfenced(text))
            values, rest = value if isinstance(value, list) else [value], ""
        else:
            values, rest = [], text
        calls = tuple(_call(value) for value in values)
    except BadCall:
        return text, ()
    return (rest.strip(), calls) if calls else (text, ())


def spell_tool_calls(content: str, calls: Sequence[ToolCall], form: Format) -> str:
    """Returns an answer as a policy spells it: `parse_tool_calls` reads these calls of it again.

    Raises ValueError if the format can't spell it.
    """
    if not calls:
        return content
    if form == "none":
        raise ValueError("this policy can't call tools: the recipe's tool_calls is none")
    values = [{"name": one.name, "arguments": one.arguments} for one in calls]
    if form == "json":
        if content:
            raise ValueError("in the format json an answer is either text or calls of tools")
        return json.dumps(values if len(values) > 1 else values[0], ensure_ascii=False)
    texts = [f"{BEGIN}\n{json.dumps(one, ensure_ascii=False)}\n{END}" for one in values]
    return "\n".join([content, *texts] if content else texts)


def forced_call(
    form: Format, tools: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Any], tuple[str, str]]:
    """Returns the JSON schema of a call of one of `tools`, and the texts before and after its JSON.

    `tools` maps names to the schemas of their arguments. Raises ValueError if `form` is `none`.
    """
    if form == "none":
        raise ValueError(
            "this policy can't be forced to call a tool: the recipe's tool_calls is none"
        )
    calls = {}
    for index, (name, parameters) in enumerate(tools.items()):
        root = f"#/$defs/{index}/properties/arguments"
        calls[str(index)] = {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": _moved(parameters, root)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
    schema = {"$defs": calls, "anyOf": [{"$ref": f"#/$defs/{index}"} for index in calls]}
    return schema, (f"{BEGIN}\n", f"\n{END}") if form == "hermes" else ("", "")


def _moved(schema: Any, root: str) -> Any:
    """Returns a schema whose own references begin at `root`, as a part of a larger schema."""
    if isinstance(schema, list):
        return [_moved(one, root) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = root + value[1:]
        elif key in NAMED and isinstance(value, Mapping):
            moved[key] = {name: _moved(one, root) for name, one in value.items()}
        else:
            moved[key] = value if key in VALUES else _moved(value, root)
    return moved


def _hermes(text: str, *, unclosed: bool) -> tuple[list[Any], str]:
    """Returns the JSON values between tags, and the text around the tags.

    With `unclosed` the text may end behind the JSON of the last call.
    """
    values, rest, at = [], [], 0
    while (begin := text.find(BEGIN, at)) >= 0:
        rest.append(text[at:begin])
        try:
            start = _past_space(text, begin + len(BEGIN))
            value, at = _DECODER.raw_decode(text, start)
            check_value(value, text[start:at])
        except (ValueError, RecursionError) as error:
            raise _bad(error) from error
        values.append(value)
        at = _past_space(text, at)
        if text.startswith(END, at):
            at += len(END)
        elif not (unclosed and at == len(text)):
            raise BadCall(f"a tool call must be one JSON object, and end with {END}")
    return values, "".join([*rest, text[at:]])


def _past_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return start if found is None else found.end()


def _unfenced(text: str) -> str:
    text = text.strip()
    if len(text) < 2 * len(FENCE) or not (text.startswith(FENCE) and text.endswith(FENCE)):
        return text
    return text[len(FENCE) : -len(FENCE)].removeprefix("json")


def _load(text: str) -> Any:
    try:
        return load_json(text)
    except ValueError as error:
        raise _bad(error) from error


def _bad(error: Exception) -> BadCall:
    reason = TOO_DEEP if isinstance(error, RecursionError) else error
    return BadCall(f"a tool call must be JSON: {reason}")


def _call(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise BadCall('a tool call must be {"name": …, "arguments": {…}}')
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(arguments, dict):
        raise BadCall("a tool call must have `arguments`, an object")
    return ToolCall(value["name"], arguments)
