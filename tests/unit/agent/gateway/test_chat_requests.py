"""Requests and messages of OpenAI's format: what is taken, what is refused, what is the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.services.agent.gateway.chat_messages import extend, read_messages, start_of
from headrace.services.agent.gateway.chat_requests import read_request
from headrace.services.agent.gateway.refusals import ApiError
from headrace.services.base.tool_calls import NO_PARAMETERS

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
LIST = {"type": "array"}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "policy", "messages": [USER], **fields}).encode()


def calling(arguments: Any, call_id: str = "1", content: Any = None) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def digest(*messages: dict[str, Any], tools: tuple[Any, ...] = ()) -> bytes:
    found = start_of("policy", tools)
    for message in read_messages(list(messages)):
        found = extend(found, message)
    return found


def test_what_a_client_says_again_in_other_words_is_the_same() -> None:
    parts = [{"type": "text", "text": "hi"}]
    assert digest(USER) == digest({"role": "user", "content": parts})
    assert digest(USER) == digest({"role": "user", "content": " hi\n"})
    assert digest(calling('{"a": 1, "b": 2}')) == digest(calling('{"b":2,"a":1}', "other", ""))


def test_what_means_something_else_is_another_conversation() -> None:
    answers = ({"role": "tool", "tool_call_id": one, "content": "3"} for one in ("1", "2"))
    different = [
        digest(USER),
        digest(USER, tools=(TOOL,)),
        digest(USER, USER),
        digest({"role": "system", "content": "hi"}),
        digest({"role": "user", "content": "hi", "name": "eve"}),
        digest(calling('{"a": 1}')),
        digest(calling('{"a": 2}')),
        digest(calling("not json")),
        *(digest(answer) for answer in answers),
    ]
    assert len(set(different)) == len(different)


def test_templates_get_text_and_objects() -> None:
    developer, call = read_messages([{"role": "developer", "content": "be brief"}, calling("{}")])
    assert developer == {"role": "system", "content": "be brief"}
    assert call["content"] == ""
    assert call["tool_calls"][0]["function"] == {"name": "add", "arguments": {}}


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        ["hi"],
        [{"content": "hi"}],
        [{"role": "critic", "content": "hi"}],
        [{"role": ["user"], "content": "hi"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}],
        [{"role": "tool", "content": "3"}],
        [{"role": "user", "content": "hi", "tool_calls": [{}]}],
        [{"role": "assistant", "tool_calls": [{"function": {}}]}],
        [{"role": "assistant", "function_call": {"name": "f"}}],
    ],
)
def test_messages_that_cannot_be_taken_are_refused(messages: Any) -> None:
    with pytest.raises(ApiError) as caught:
        read_messages(messages)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": None}, "model"),
        ({"messages": None}, "messages"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "no tool 'sub'; tools are add",
        ),
        ({"tools": [{"type": "custom"}], "tool_choice": "required"}, "tools"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": LIST}}],
                "tool_choice": "required",
            },
            "parameters of 'f'",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": ["add"]}, "tools"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens"),
        ({"n": 17}, "n:"),
        ({"n": True}, "n:"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stop": [1]}, "stop"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"modalities": ["audio"]}, "modalities"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        read_request(body(**fields))
    assert caught.value.status == 400
    assert caught.value.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read_request(data)
    assert caught.value.status == 400


def test_the_recipe_s_sampling_is_told_of_and_not_refused() -> None:
    request = read_request(body(temperature=0, top_p=0.5, user="me", seed=None, stop="."))
    assert request.overridden == ("temperature", "top_p")
    assert request.stop == (".",)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("auto", []),
        ("none", []),
        ("required", ["add", "stop"]),
        ({"type": "function", "function": {"name": "stop"}}, ["stop"]),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}},
            ["add"],
        ),
    ],
)
def test_a_call_of_some_tools_is_asked_for(choice: Any, names: list[str]) -> None:
    schema = {"type": "object", "properties": {"why": {"type": "string"}}}
    stop = {"type": "function", "function": {"name": "stop", "parameters": schema, "strict": True}}
    request = read_request(body(tools=[TOOL, stop], tool_choice=choice))
    assert [*request.forced] == names
    assert request.forced.get("stop", schema) == schema
    assert request.forced.get("add", NO_PARAMETERS) == NO_PARAMETERS
    assert request.calls_tools == (choice != "none")
