"""Messages of OpenAI's chat format: checks, converts for chat templates, and compares them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from headrace.services.agent.gateway.refusals import bad_request
from headrace.services.base.json_text import load_json
from headrace.services.base.tool_calls import ToolCall

Message = dict[str, Any]
"""A message for a chat template: the content is text, arguments of tool calls are objects."""

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
         "tool": "tool"}  # fmt: skip
"""The role in the template for each role of a message. Few templates have developers."""


def read_messages(value: Any) -> tuple[Message, ...]:
    """Reads a request's messages. Raises ApiError 400, which says which one is wrong, and why."""
    if not isinstance(value, list) or not value:
        raise bad_request("messages: a list of at least one message is needed")
    return tuple(_read(message, f"messages[{index}]") for index, message in enumerate(value))


def said_by_policy(call: str, content: str, tool_calls: Sequence[ToolCall]) -> Message:
    """Returns an answer as a message. `call` is the path of the generation.

    The ids of its tool calls are unique within an attempt.
    """
    path = call.replace(".", "_")
    calls = [
        {"id": f"call_{path}_{index}", "type": "function",
         "function": {"name": one.name, "arguments": one.arguments}}
        for index, one in enumerate(tool_calls)
    ]  # fmt: skip
    message: Message = {"role": "assistant", "content": content}
    return {**message, "tool_calls": calls} if calls else message


def start_of(role: str, tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns the digest of an empty conversation."""
    return _digest(role, [*tools])


def extend(digest: bytes, message: Message) -> bytes:
    """Returns the digest of a conversation with one more message.

    Differences that a client can't have meant don't count: white space around the content, the
    spelling of a call's arguments, and the ids of an assistant's calls.
    """
    calls = [
        [call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls", ())
    ]
    answered = message.get("tool_call_id", "")
    return _digest(
        digest.hex(), message["role"], message.get("name", ""), message["content"].strip(),
        calls, answered,
    )  # fmt: skip


def _digest(*parts: Any) -> bytes:
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).digest()


def _read(value: Any, path: str) -> Message:
    role = value.get("role") if isinstance(value, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise bad_request(f"{path}: a message needs one of the roles {', '.join(ROLES)}")
    message: Message = {"role": ROLES[role], "content": _text(value.get("content"), path)}
    if isinstance(value.get("name"), str):
        message["name"] = value["name"]
    if role == "tool":
        if not isinstance(value.get("tool_call_id"), str):
            raise bad_request(f"{path}: a tool's message needs a tool_call_id")
        message["tool_call_id"] = value["tool_call_id"]
    if value.get("function_call") is not None:
        raise bad_request(f"{path}: function_call is not supported: use tool_calls")
    calls = value.get("tool_calls")
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise bad_request(f"{path}: tool_calls must be a list in an assistant's message")
        message["tool_calls"] = [_read_call(call, path) for call in calls]
    return message


def _text(content: Any, path: str) -> str:
    """Returns a content as text, one line a part. Raises ApiError 400 if a part is not text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            raise bad_request(f"{path}: content must be text, not of type {kind!r}")
        texts.append(text)
    return "\n".join(texts)


def _read_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{path}: a tool call needs a function with a name")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        with suppress(ValueError):  # if it isn't JSON, the template gets the text
            arguments = load_json(arguments)
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
