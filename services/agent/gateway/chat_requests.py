"""Reads what a client asks: the body of `POST /v1/chat/completions`.

https://platform.openai.com/docs/api-reference/chat/create
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.services.agent.gateway.chat_messages import Message, read_messages
from headrace.services.agent.gateway.refusals import bad_request
from headrace.services.base.json_text import load_json
from headrace.services.base.tool_calls import NO_PARAMETERS

MOST_MARKS = 500_000
"""Most commas and opening brackets of a body: each value needs one, and parsing takes time."""
CHOICES = 16
"""Largest number of choices of one request."""
OVERRIDDEN = (
    "temperature", "top_p", "seed", "frequency_penalty", "presence_penalty",
)  # fmt: skip
"""Ignored, and reported as overridden: the recipe decides how tokens are sampled, so that training
assumes the right distribution."""
WITHOUT_EFFECT = (
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention",
    "reasoning_effort", "safety_identifier", "service_tier", "store", "user", "verbosity",
)  # fmt: skip
"""Accepted and ignored."""
SERVED = (
    "model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "n",
    "logprobs", "top_logprobs", "stop", "stream", "stream_options", "response_format",
    "modalities",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    calls_tools: bool = True
    """Whether tool calls are searched in the answer."""
    forced: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """If the policy must call a tool: the schemas of the arguments of those that it may call."""
    max_tokens: int | None = None
    choices: int = 1
    logprobs: bool = False
    json_schema: Mapping[str, Any] | None = None
    """The JSON schema that the answer's text must follow."""
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_usage: bool = False
    overridden: tuple[str, ...] = ()
    """The fields of the request that the recipe overrides."""


def read_request(data: bytes) -> ChatRequest:
    """Reads a request's body. Raises ApiError 400, which says what can't be served, and why."""
    tree = read_object(data)
    tree = {name: value for name, value in tree.items() if value is not None}
    unknown = sorted(set(tree) - {*SERVED, *OVERRIDDEN, *WITHOUT_EFFECT})
    if unknown:
        raise bad_request(f"unknown fields: {', '.join(unknown)}", "unknown_parameter")
    if not isinstance(tree.get("model"), str):
        raise bad_request("model: a name is needed; GET /v1/models lists them")
    _refuse(tree)
    tools = tree.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise bad_request("tools: a list of objects is needed")
    stop = tree.get("stop", [])
    usage = tree.get("stream_options", {})
    return ChatRequest(
        model=tree["model"],
        messages=read_messages(tree.get("messages")),
        tools=tuple(tools),
        calls_tools=bool(tools) and tree.get("tool_choice", "auto") != "none",
        forced=_forced(tree.get("tool_choice", "auto"), tools),
        max_tokens=_positive(tree, "max_completion_tokens") or _positive(tree, "max_tokens"),
        choices=_positive(tree, "n", CHOICES) or 1,
        logprobs=bool(tree.get("logprobs", False)),
        json_schema=_json_schema(tree.get("response_format", {"type": "text"})),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stream=bool(tree.get("stream", False)),
        stream_usage=isinstance(usage, dict) and bool(usage.get("include_usage")),
        overridden=tuple(name for name in OVERRIDDEN if name in tree),
    )


def read_object(data: bytes) -> dict[str, Any]:
    """Reads a body that is a JSON object. Raises ApiError 400 if it is something else."""
    if sum(map(data.count, (b",", b"[", b"{"))) > MOST_MARKS:
        raise bad_request(f"the body has more than {MOST_MARKS} commas and brackets")
    try:
        tree = load_json(data)
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise bad_request("the body must be a JSON object")
    return tree


def _refuse(tree: Mapping[str, Any]) -> None:
    """Refuses what the gateway understands but does not do."""
    if tree.get("top_logprobs"):
        raise bad_request("top_logprobs: only the logprobs of the sampled tokens are recorded")
    if tree.get("modalities", ["text"]) != ["text"]:
        raise bad_request("modalities: only text is served")
    stop = tree.get("stop", [])
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise bad_request("stop: a text or a list of texts is needed")


def _forced(choice: object, tools: list[dict[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Returns the tools of which a `tool_choice` demands a call; empty if it leaves the choice."""
    match choice:
        case "auto" | "none":
            return {}
        case "required":
            names = None
        case {"type": "function", "function": {"name": str(name)}}:
            names = [name]
        case {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [*allowed]}}:
            names = [_name(tool) for tool in allowed]
        case _:
            raise bad_request(
                "tool_choice: use auto, none, required, a function's name, or allowed_tools of "
                "mode required"
            )
    known = {_name(tool): _parameters(tool["function"]) for tool in tools}
    if names is None:
        names = [*known]
    if not names:
        raise bad_request("tool_choice: it demands a call, but `tools` is empty")
    if missing := [name for name in names if name not in known]:
        raise bad_request(f"tool_choice: no tool {missing[0]!r}; tools are {', '.join(known)}")
    return {name: known[name] for name in names}


def _name(tool: object) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise bad_request("tools: if tool_choice demands a call, each must be a function with a name")


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema of a function's arguments, which must be an object."""
    parameters = function.get("parameters") or NO_PARAMETERS
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise bad_request(
            f"tools: the parameters of {function['name']!r} must be a schema of type object"
        )
    return parameters


def _json_schema(form: object) -> Mapping[str, Any] | None:
    """Returns the schema that a `response_format` asks for; None for plain text."""
    match form:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
    raise bad_request(
        'response_format: use {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
        '"json_schema": {"schema": {…}}}'
    )


def _positive(tree: Mapping[str, Any], name: str, most: int = 2**31 - 1) -> int | None:
    value = tree.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise bad_request(f"{name}: a whole number from 1 to {most} is needed")
    return value
