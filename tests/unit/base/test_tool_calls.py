"""Tool calls in a policy's text: what counts as a call, for environments and for clients."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import pytest

from headrace.services.base.tool_calls import (
    MOST,
    BadCall,
    ToolCall,
    parse_tool_calls,
    read_calls,
)

ADD = '{"name": "add", "arguments": {"a": 2, "b": 3}}'


def test_an_end_within_an_argument_ends_no_call() -> None:
    arguments = {"text": "</tool_call> and <tool_call>"}
    call = {"name": "say", "arguments": arguments}
    text = f"so: <tool_call>\n{json.dumps(call)}\n</tool_call>"
    assert parse_tool_calls(text, "hermes") == ("so:", (ToolCall("say", arguments),))


def test_hermes_calls_are_read_with_the_text_before_them() -> None:
    text = (
        'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    )
    said, calls = parse_tool_calls(text, "hermes")
    assert said == "Let me see."
    assert calls == (ToolCall("add", {"a": 1}), ToolCall("stop", {}))


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "add", "arguments": {"a": 1}}',
        '```json\n{"name": "add", "parameters": {"a": 1}}\n```',
        ' [{"name": "add", "arguments": {"a": 1}}]',
    ],
)
def test_plain_json_calls_are_read(text: str) -> None:
    assert parse_tool_calls(text, "json") == ("", (ToolCall("add", {"a": 1}),))
    assert parse_tool_calls(text, "hermes") == (text, ())
    assert parse_tool_calls(text, "none") == (text, ())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42",
        "[]",
        "<tool_call></tool_call>",
        '<tool_call>{"name": "add"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}}',
        '<tool_call>{"name": "add", "arguments": {}}</tool_call><tool_call>{',
        '{"name": 3, "arguments": {}}',
        '[{"name": "add", "arguments": {}}, 3]',
        "[" * 100_000,
    ],
)
def test_what_cannot_be_parsed_stays_text(text: str) -> None:
    for form in ("hermes", "json", "none"):
        assert parse_tool_calls(text, form) == (text, ())


def test_an_action_is_read_as_models_write_calls() -> None:
    call = ToolCall("add", {"a": 2, "b": 3})
    assert read_calls(ADD, ["add"]) == [call]
    assert read_calls(f"<tool_call>\n{ADD}\n</tool_call>" * 2, ["add"]) == [call, call]
    assert read_calls(f"so <tool_call>{ADD}\n", ["add"]) == [call]
    assert read_calls("the sum is 5", ["add"]) == []
    for bad in (
        "{",
        "{}",
        '{"name": 1}',
        '{"name": "add"}',
        '{"name": "add", "arguments": 1}',
        "{" * 100_000,
        f"<tool_call>{ADD} and more",
        f"<tool_call>{ADD}<tool_call>{ADD}</tool_call>",
    ):
        with pytest.raises(BadCall):
            read_calls(bad, ["add"])
    with pytest.raises(BadCall, match="calls at once"):
        read_calls(f"<tool_call>{ADD}</tool_call>" * (MOST + 1), ["add"])


@pytest.mark.parametrize(
    "text",
    [
        "```json" + " \n" * 200_000 + "x",
        "```" + "`" * 400_000 + " x",
        "<tool_call>" + " " * 400_000,
        f"<tool_call>{ADD}</tool_call>" * 10_000,
        "<tool_call>" * 40_000,
    ],
)
def test_reading_takes_linear_time(text: str) -> None:
    began = time.process_time()
    for form in ("hermes", "json"):
        parse_tool_calls(text, form)
    with suppress(BadCall):
        read_calls(text, ["add"])
    assert time.process_time() - began < 2
