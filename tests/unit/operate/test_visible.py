"""Control characters in texts of policies and other teams never reach the operator's terminal."""

from __future__ import annotations

import io
import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.services.operate.options import echo, print_json, print_page, print_table, visible
from headrace.services.operate.run.live_view import PlainView, Status
from headrace.services.operate.show.pages import Part

ATTACK = "a\x1b]0;title\x07\x1b[2J\x9b31m\r\u202eb"


@given(st.text())
def test_no_control_character_is_left_and_nothing_else_changes(text: str) -> None:
    shown = visible(text)
    kinds = {unicodedata.category(character) for character in shown if character not in "\t\n"}
    assert "Cc" not in kinds
    assert visible(shown) == shown
    if text.isprintable():
        assert [c for c in shown if c.isascii()] == [c for c in text if c.isascii()]


@given(st.text())
def test_json_means_the_same(text: str) -> None:
    assert json.loads(visible(json.dumps(text, ensure_ascii=False))) == text


def test_every_way_to_print_is_safe(capsys: pytest.CaptureFixture[str]) -> None:
    page: list[Part] = [f" {ATTACK}", ATTACK]
    echo(ATTACK)
    echo(ATTACK, err=True)
    print_json({ATTACK: ATTACK})
    print_table((ATTACK,), [[ATTACK]])
    print_page(page)
    PlainView(Status("run"), Console(file=(file := io.StringIO()), width=200)).say(ATTACK)
    out, err = capsys.readouterr()
    for text in (out, err, file.getvalue()):
        assert "title" in text
        assert not {"\x1b", "\x07", "\x9b", "\r", "\u202e"} & set(text)
