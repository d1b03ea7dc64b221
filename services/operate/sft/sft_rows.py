"""Reads rows for supervised fine-tuning: JSON lines of chat messages, or of a prompt and an answer.

A row that can't be used is never left out silently: whoever reads gets the reason, with its line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.services.agent.gateway.chat_messages import Message, read_messages
from headrace.services.agent.gateway.refusals import ApiError
from headrace.services.base.json_text import load_json
from headrace.services.base.tool_calls import Format, ToolCall, spell_tool_calls

LINE_BYTES = 64 * 1024 * 1024
"""The longest line that is read."""
MESSAGE_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "weight"}
"""What a message may have. Of another key nobody could say whether it is to be learned."""
ROW_KEYS = {"messages", "tools", "prompt", "completion"}
"""What is read of a row."""


class BadRow(ValueError):
    """A row can't be learned. The message says why."""


@dataclass(frozen=True, slots=True)
class SftExchange:
    """What the policy reads, and what it should answer."""

    messages: tuple[Message, ...]
    """New messages, for the model's chat template. Empty if it reads plain text."""
    text: str
    """Plain text that it reads. Empty if it reads messages."""
    answer: str
    """As the policy spells it, with its calls of tools."""
    learned: bool
    """Whether the answer is learned, or only read as context."""


@dataclass(frozen=True, slots=True)
class SftRow:
    """One conversation."""

    exchanges: tuple[SftExchange, ...]
    """At least one of them is learned."""
    tools: tuple[Any, ...] = ()
    """Descriptions of tools for the chat template."""
    ignored: tuple[str, ...] = ()
    """The keys of the row that were not read."""


def read_rows(path: Path, form: Format) -> Iterator[tuple[int, SftRow | BadRow]]:
    """Yields each row of a file with the number of its line, from 1 on. Skips empty lines.

    `form` is how the policy spells calls of tools. Raises UsageError if the file can't be read.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(LINE_BYTES + 1):
                number += 1
                if len(line) > LINE_BYTES:
                    raise UsageError(
                        f"{path}:{number} is longer than {LINE_BYTES >> 20} MiB: write one JSON "
                        "object in each line"
                    )
                if line.strip():
                    yield number, _read_line(line, form)
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from error


def _read_line(line: bytes, form: Format) -> SftRow | BadRow:
    try:
        tree = load_json(line)
    except ValueError as error:
        return BadRow(f"it is not JSON: {error}")
    try:
        return read_row(tree, form)
    except BadRow as error:
        return error


def read_row(tree: Any, form: Format) -> SftRow:
    """Returns a row of its JSON value. Raises BadRow."""
    if not isinstance(tree, dict):
        raise BadRow("it is not a JSON object")
    tools = tree.get("tools") or []
    if not isinstance(tools, list):
        raise BadRow("`tools` must be a list")
    ignored = tuple(sorted(set(tree) - ROW_KEYS))
    chat, pair = "messages" in tree, "prompt" in tree or "completion" in tree
    if chat == pair:
        raise BadRow("it needs either `messages`, or `prompt` and `completion`")
    if chat:
        return SftRow(_exchanges(tree["messages"], 0, form), tuple(tools), ignored)
    prompt, completion = tree.get("prompt"), tree.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return SftRow(_exchanges(prompt + completion, len(prompt), form), tuple(tools), ignored)
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise BadRow("`prompt` and `completion` must be two texts, or two lists of messages")
    if not prompt or not completion:
        raise BadRow(f"its `{'completion' if prompt else 'prompt'}` is empty")
    if tools:
        raise BadRow("`tools` need `messages`: plain text has no place for them")
    return SftRow((SftExchange((), prompt, completion, True),), (), ignored)


def _exchanges(values: Any, first: int, form: Format) -> tuple[SftExchange, ...]:
    """Divides messages at each answer. Answers from index `first` on are learned."""
    weights = _weights(values)
    try:
        messages = read_messages(
            [{k: v for k, v in one.items() if k != "weight"} for one in values]
        )
    except ApiError as error:
        raise BadRow(str(error)) from error
    exchanges: list[SftExchange] = []
    read: list[Message] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            read.append(message)
            continue
        if not read:
            raise BadRow(f"messages[{index}]: nothing comes before this answer of the assistant")
        learned = index >= first and weights[index] == 1
        exchanges.append(SftExchange(tuple(read), "", _answer(message, index, form), learned))
        read = []
    if not any(one.learned for one in exchanges):
        raise BadRow("it has no message of the assistant to learn")
    return tuple(exchanges)


def _weights(values: Any) -> Sequence[int]:
    if not isinstance(values, list):
        raise BadRow("`messages` must be a list")
    weights = []
    for index, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise BadRow(f"messages[{index}] is not a JSON object")
        if unknown := sorted(set(value) - MESSAGE_KEYS):
            raise BadRow(
                f"messages[{index}] has the key {unknown[0]!r}, which is not read. Write what the "
                "policy should say into `content`, as it should spell it, or remove the key"
            )
        weight = value.get("weight", 1)
        if weight not in (0, 1):
            raise BadRow(f"messages[{index}]: `weight` must be 0 or 1")
        weights.append(int(weight))
    return weights


def _answer(message: Message, index: int, form: Format) -> str:
    calls = [one["function"] for one in message.get("tool_calls", ())]
    if strange := [one["name"] for one in calls if not isinstance(one["arguments"], dict)]:
        raise BadRow(f"messages[{index}]: the arguments of {strange[0]!r} are not a JSON object")
    named = [ToolCall(one["name"], one["arguments"]) for one in calls]
    try:
        answer = spell_tool_calls(message["content"], named, form)
    except ValueError as error:
        raise BadRow(f"messages[{index}]: {error}") from error
    if not answer:
        raise BadRow(f"messages[{index}]: this answer of the assistant is empty")
    return answer
