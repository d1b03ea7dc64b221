"""Whatever 1 MB a policy, a client or another team writes, to parse it takes linear time.

Nothing here has a time limit in seconds: a text of four times the length may take at most eight
times as much CPU.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import DecodeError, EnvironmentFailed
from headrace.schemas.codec import Codec, avsc
from headrace.schemas.events import EVENTS, BatchAssembled, ObservationRecorded, TaskEnded
from headrace.schemas.untrusted.schema_check import check_schema
from headrace.services.agent.gateway.chat_messages import extend, read_messages
from headrace.services.agent.gateway.chat_requests import read_request
from headrace.services.agent.gateway.chat_session import read_report
from headrace.services.agent.gateway.refusals import ApiError
from headrace.services.base.json_text import MOST_DEPTH, load_json
from headrace.services.base.tool_calls import (
    BadCall,
    forced_call,
    parse_tool_calls,
    read_calls,
)
from headrace.services.env.gymnasium_environment import GymnasiumEnvironment
from headrace.services.env.http_environment import Answer
from headrace.services.env.openenv.openenv_messages import read_object, read_step, render
from headrace.services.env.sandbox import coding, repair
from headrace.services.inference.tokenizer import Tokenizer
from headrace.services.models.weights import model_folder
from headrace.services.operate.options import visible
from headrace.services.operate.readable import readable
from headrace.services.operate.submit.task_lines import TaskLine

SIZES = [4**exponent for exponent in range(6, 11)]
"""Up to 1 MB."""
SOME_S = 0.01
"""CPU seconds that can be compared."""
TRIES = 3
EXPECTED = (ApiError, DecodeError, EnvironmentFailed, ValueError)
"""Errors that the callers of these parsers handle. RecursionError and MemoryError are not."""

SHAPES = {
    "spaces": " ",
    "newlines": "\n",
    "open lists": "[",
    "open objects": '{"a":',
    "open tags": "<tool_call>",
    "calls": '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "open calls": '<tool_call>{"name": "f", "arguments": {"a": "',
    "answers": "<answer>",
    "backticks": "`",
    "fences": "```\n",
    "fences with spaces": "```python \t",
    "quotes": '"',
    "backslashes": "\\",
    "escapes": "\\u0041",
    "half characters": "\\ud800",
    "digits": "1",
    "decimals": "1.",
    "exponents": "1e9",
    "lists": "[],",
    "combining characters": "\u0301",
    "hangul": "\u1100\u1161",
    "control characters": "\x1b[",
    "control tokens": "<end>",
}


def grammar_of_calls(text: str) -> object:
    return forced_call("hermes", {text: {"type": "object", "properties": {text: {"$ref": text}}}})


def in_a_message(text: str) -> object:
    message = {"role": "user", "content": text, "name": text}
    return read_request(json.dumps({"model": "m", "messages": [message]}).encode())


def in_arguments(text: str) -> object:
    call = {"function": {"name": "f", "arguments": text}}
    (message,) = read_messages([{"role": "assistant", "tool_calls": [call]}])
    return extend(b"", message)


def in_an_observation(text: str) -> object:
    body = {"type": "observation", "data": {"observation": {"text": text}}}
    return render(read_step(json.dumps(body), "ws://x").observation, ())


def an_action(text: str) -> object:
    game = GymnasiumEnvironment("FrozenLake-v1", {"0": 0}, blocking=False)
    return asyncio.run(game.step(text))


def a_schema(text: str) -> object:
    return check_schema(json.dumps({**avsc(TaskEnded), "doc": text}))


def shown(text: str) -> object:
    observed = ObservationRecorded(
        task=0, sample=0, call="1", index=0, digest=text.encode()[:16].ljust(16), text=text
    )
    return visible(json.dumps(readable(observed), ensure_ascii=False))


CODEC = Codec()
for number, event in enumerate(EVENTS):
    CODEC.register(event, number)
BATCH = EVENTS.index(BatchAssembled)

PARSERS: dict[str, Callable[[str], object]] = {
    "json": load_json,
    "calls of an action": lambda text: read_calls(text, ["f"]),
    "a call without tags": lambda text: read_calls('{"name": "f", "arguments": ' + text, ["f"]),
    "calls in an answer": lambda text: parse_tool_calls(text, "hermes"),
    "calls in JSON": lambda text: parse_tool_calls(text, "json"),
    "a call in a fence": lambda text: parse_tool_calls(f"```{text}```", "json"),
    "the grammar of calls": grammar_of_calls,
    "a body": lambda text: read_request(text.encode()),
    "a message": in_a_message,
    "arguments of a message": in_arguments,
    "a report": lambda text: read_report({"rewards": {text: 1.0}, "reward": text}),
    "a program": coding._FENCED.findall,
    "a command": repair._FENCED.findall,
    "a program's output": coding._results,
    "an action": an_action,
    "an action in JSON": read_object,
    "a message of OpenEnv": lambda text: read_step(text, "ws://x"),
    "an observation of OpenEnv": in_an_observation,
    "an observation over HTTP": Answer.model_validate_json,
    "a line of tasks": TaskLine.model_validate_json,
    "a schema": check_schema,
    "the text of a schema": a_schema,
    "a record": lambda text: CODEC.decode(
        BatchAssembled, b"\0" + BATCH.to_bytes(4, "big") + text.encode()
    ),
    "a page of show": shown,
}


def grows_too_fast(parse: Callable[[str], object], unit: str, sizes: list[int]) -> str:
    """Why a parser is worse than linear; empty if it is not."""
    before_s = 0.0
    for size in sizes:
        text = (unit * (size // len(unit) + 1))[:size]
        took_s = _cpu_s(parse, text)
        for _ in range(TRIES - 1):
            if before_s < SOME_S or took_s <= 8 * before_s:
                break
            took_s = min(took_s, _cpu_s(parse, text))
        if before_s >= SOME_S and took_s > 8 * before_s:
            return f"{size // 4:,} characters took {before_s:.3f} s, {size:,} took {took_s:.3f} s"
        before_s = took_s
    return ""


def _cpu_s(parse: Callable[[str], object], text: str) -> float:
    began = time.process_time()
    with suppress(*EXPECTED):
        parse(text)
    return time.process_time() - began


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_takes_time_linear_in_its_text(name: str) -> None:
    slow = {
        shape: why
        for shape, unit in SHAPES.items()
        if (why := grows_too_fast(PARSERS[name], unit, SIZES))
    }
    assert slow == {}


def test_tokenizing_takes_time_linear_in_its_text(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(
        (model_folder("tiny-llama") / "tokenizer.json").read_bytes()
    )
    (tmp_path / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content | trim }}<end>{% endfor %}"
    )
    tokenizer = Tokenizer(tmp_path)

    def chat(text: str) -> object:
        return tokenizer.chat(json.dumps({"messages": [{"role": "user", "content": text}]}), [1])

    for shape, unit in SHAPES.items():
        assert grows_too_fast(chat, unit, SIZES[:-2]) == "", shape


@pytest.mark.long
def test_the_measure_finds_a_parser_that_is_worse_than_linear() -> None:
    quadratic = re.compile("<answer>(.*?)</answer>", re.DOTALL)
    assert "took" in grows_too_fast(quadratic.findall, "<answer>", SIZES)


@pytest.mark.parametrize("depth", [MOST_DEPTH + 1, 900, 100_000])
@pytest.mark.parametrize("brackets", ["[]", '{"a":}'])
def test_what_is_nested_too_deeply_is_bad_output(depth: int, brackets: str) -> None:
    """Also if Python could parse it: what handles the value next would fail."""
    nested = brackets[:-1] * depth + "1" + brackets[-1] * depth
    call = '{"name": "f", "arguments": {"x": ' + nested + "}}"
    for action in (call, f"<tool_call>{call}</tool_call>"):
        with pytest.raises(BadCall, match="nested deeper than 100"):
            read_calls(action, ["f"])
        assert parse_tool_calls(action, "hermes") == (action, ())
        assert parse_tool_calls(action, "json") == (action, ())
    with pytest.raises(ValueError, match="nested deeper than 100"):
        read_object(call)
    with pytest.raises(ApiError, match="nested deeper than 100") as refused:
        read_request(call.encode())
    assert refused.value.status == 400
    assert coding._results(nested) == []


def test_what_is_nested_as_deeply_as_allowed_is_read() -> None:
    nested = json.loads("[" * (MOST_DEPTH - 2) + "]" * (MOST_DEPTH - 2))
    action = json.dumps({"name": "f", "arguments": {"x": nested}})
    (call,) = read_calls(action, ["f"])
    assert call.arguments == {"x": nested}


def test_half_a_character_is_bad_output() -> None:
    call = '{"name": "f", "arguments": {"x": "\\ud800"}}'
    for action in (call, f"<tool_call>{call}</tool_call>"):
        with pytest.raises(BadCall, match="half a character"):
            read_calls(action, ["f"])
    whole = call.replace("\\ud800", "\\ud83d\\ude00")
    assert read_calls(whole, ["f"])[0].arguments == {"x": "😀"}
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "\ud800"}]}
    with pytest.raises(ApiError, match="half a character"):
        read_request(json.dumps(body).encode())
