"""Rows of files: which answers are learned, and why a row is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.services.base.tool_calls import FORMATS, ToolCall, parse_tool_calls, spell_tool_calls
from headrace.services.operate.sft import sft_rows
from headrace.services.operate.sft.sft_rows import BadRow, SftRow, read_row, read_rows

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def policy(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def learned(row: SftRow) -> list[tuple[int, str, bool]]:
    """Of each exchange: the number of messages that are read, the answer, whether it is learned."""
    return [(len(one.messages), one.answer, one.learned) for one in row.exchanges]


def test_each_answer_of_a_chat_is_learned_unless_its_weight_is_0() -> None:
    system = {"role": "system", "content": "Be brief."}
    messages = [system, user("1"), policy("a", weight=0), user("2"), policy("b"), user("thanks")]
    row = read_row({"messages": messages, "id": 7}, "hermes")
    assert learned(row) == [(2, "a", False), (1, "b", True)]
    assert row.ignored == ("id",)


def test_only_the_completion_of_a_pair_is_learned() -> None:
    row = read_row({"prompt": "2+2=", "completion": "4"}, "hermes")
    assert [(one.text, one.answer, one.learned) for one in row.exchanges] == [("2+2=", "4", True)]
    prompt = [user("1"), policy("a"), user("2")]
    row = read_row({"prompt": prompt, "completion": [policy("b")]}, "hermes")
    assert learned(row) == [(1, "a", False), (1, "b", True)]


def test_calls_of_tools_are_learned_as_the_policy_spells_them() -> None:
    messages = [user("1+1"), policy("So:", tool_calls=[CALL])]
    row = read_row({"messages": messages, "tools": [{"type": "function"}]}, "hermes")
    answer = row.exchanges[0].answer
    assert parse_tool_calls(answer, "hermes") == ("So:", (ToolCall("add", {"a": 1}),))
    assert row.tools == ({"type": "function"},)


@pytest.mark.parametrize("form", [one for one in FORMATS if one != "none"])
@pytest.mark.parametrize("count", [1, 2])
def test_what_is_spelled_is_read_again(form: Any, count: int) -> None:
    calls = tuple(ToolCall(f"f{n}", {"x": ["</tool_call>", "é", n]}) for n in range(count))
    assert parse_tool_calls(spell_tool_calls("", calls, form), form) == ("", calls)
    assert spell_tool_calls("text", (), form) == "text"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([], "not a JSON object"),
        ({"text": "a"}, "either `messages`, or"),
        ({"messages": [user("1"), policy("a")], "prompt": "p"}, "either `messages`, or"),
        ({"prompt": "p"}, "two texts, or two lists"),
        ({"prompt": "p", "completion": ""}, "`completion` is empty"),
        ({"prompt": "p", "completion": "c", "tools": [1]}, "plain text has no place"),
        ({"messages": "hello"}, "must be a list"),
        ({"messages": [user("1")]}, "no message of the assistant to learn"),
        ({"messages": [user("1"), policy("a", weight=0)]}, "no message of the assistant to learn"),
        ({"messages": [policy("a")]}, r"messages\[0\]: nothing comes before"),
        ({"messages": [user("1"), policy("a"), policy("b")]}, r"messages\[2\]: nothing comes"),
        ({"messages": [user("1"), policy("")]}, r"messages\[1\]: .* is empty"),
        ({"messages": [user("1"), policy("a", weight=0.5)]}, "must be 0 or 1"),
        ({"messages": [user("1"), policy("a", reasoning="hm")]}, "'reasoning', which is not read"),
        ({"messages": [{"role": "judge", "content": "1"}]}, "one of the roles"),
        ({"messages": [user("1"), 7]}, r"messages\[1\] is not a JSON object"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "must be text"),
    ],
)
def test_a_row_is_refused_with_a_reason(row: Any, reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        read_row(row, "hermes")


def test_a_policy_that_can_not_call_tools_learns_no_calls() -> None:
    with pytest.raises(BadRow, match="tool_calls is none"):
        read_row({"messages": [user("1"), policy("", tool_calls=[CALL])]}, "none")


def test_rows_have_the_numbers_of_their_lines(tmp_path: Path) -> None:
    good = json.dumps({"prompt": "p", "completion": "c"}).encode()
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([good, b"", b"{", b"\xff", good]))
    found = [(number, isinstance(row, SftRow)) for number, row in read_rows(path, "hermes")]
    assert found == [(1, True), (3, False), (4, False), (5, True)]


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft_rows, "LINE_BYTES", 100)
    (tmp_path / "rows.jsonl").write_text("x" * 200)
    with pytest.raises(UsageError, match=r"rows.jsonl:1 is longer"):
        list(read_rows(tmp_path / "rows.jsonl", "hermes"))
