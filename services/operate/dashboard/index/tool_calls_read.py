"""Which tools an agent's texts and actions call, and whether the answer to a call is an error."""

from __future__ import annotations

import re

from headrace.schemas.events import ActionRequested, ObservationRecorded
from headrace.services.base.json_text import load_json
from headrace.services.base.tool_calls import BEGIN, Format, ToolCall, parse_tool_calls
from headrace.services.operate.dashboard.index.index_rows import short

LONGEST = 1_000_000
"""Longer texts are not searched for calls."""
_ERROR = re.compile(r"\s*(error|traceback|exception)\b", re.IGNORECASE)


def calls_in(text: str) -> tuple[ToolCall, ...]:
    """Returns the calls of tools that a sampled text contains, in either spelling."""
    if len(text) > LONGEST:
        return ()
    head = text.lstrip()[:3]
    form: Format = "hermes" if BEGIN in text else "json" if head[:1] in ("{", "[") else "none"
    if head == "```":
        form = "json"
    return parse_tool_calls(text, form)[1]


def tools_of(action: ActionRequested) -> tuple[str, ...]:
    """Returns the names of the tools that a step calls, or the environment's own `NAME.step`."""
    names: tuple[str, ...] = ()
    try:
        tree = load_json(action.payload)
    except (ValueError, RecursionError):
        tree = None
    text = tree.get("action") if isinstance(tree, dict) else None
    if isinstance(text, str):
        # An environment gets the text without the stop token that may close the last call.
        closed = f"{text}</tool_call>" if text.count(BEGIN) > text.count("</tool_call>") else text
        names = tuple(dict.fromkeys(short(call.name) for call in calls_in(closed)))
    return names or (short(f"{action.environment.use}.step"),)


def has_failed(answer: ObservationRecorded) -> bool:
    """Whether the answer to a step is a failure, or a text that begins like an error."""
    return answer.failure is not None or _ERROR.match(answer.text) is not None
