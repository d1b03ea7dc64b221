"""The reader of pages: which blocks it finds, and which it refuses."""

from __future__ import annotations

import pytest

from tests.docs.markdown import Block, PageError, blocks_of


def block(info: str, text: str = "x\n") -> Block:
    (found,) = blocks_of(f"```{info}\n{text}```\n")
    return found


def test_a_page_has_its_blocks_with_lines_and_words() -> None:
    page = "# Title\n\n```python file=a.py\nimport b\n\nb.c()\n```\n\nText.\n\n```sh\nls\n```\n"
    first, second = blocks_of(page)
    assert (first.language, first.file, first.line) == ("python", "a.py", 4)
    assert first.text == "import b\n\nb.c()\n"
    assert (second.language, second.words, second.line, second.text) == ("sh", {}, 12, "ls\n")


def test_a_block_in_a_list_loses_its_indentation() -> None:
    (found,) = blocks_of("- item\n\n  ```python\n  if a:\n      b\n\n  ```\n")
    assert found.text == "if a:\n    b\n\n"


def test_a_longer_fence_holds_a_shorter_one() -> None:
    (found,) = blocks_of("````text\n```python\nx\n```\n````\n")
    assert found.text == "```python\nx\n```\n"
    (found,) = blocks_of("~~~text\n```\n~~~\n")
    assert found.text == "```\n"


def test_inline_code_is_no_block() -> None:
    assert blocks_of("Use `a` and ``b``.\n\n    indented\n") == []


@pytest.mark.parametrize(
    ("info", "short", "long"),
    [
        ("python", True, True),
        ("sh", True, True),
        ("sh run=never reason=long", False, True),
        ("python run=never reason=long", False, True),
        ("sh run=never reason=needs-gpu", False, False),
        ("toml", False, False),
        ("toml file=recipe.toml", True, True),
        ("jsonl file=tasks.jsonl", True, True),
        ("text", False, False),
    ],
)
def test_what_is_executed(info: str, short: bool, long: bool) -> None:
    found = block(info)
    assert (found.executed(long=False), found.executed(long=True)) == (short, long)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ("", "line 1: the block has no language"),
        ("console", "line 1: write `sh`"),
        ("javascript", "javascript needs file=NAME, or write `text`"),
        ("sh never", "'never': write NAME=VALUE"),
        ("sh run=", "'run=': write NAME=VALUE"),
        ("sh run=never", "write run=never reason=WHY, or neither"),
        ("sh reason=long", "write run=never reason=WHY, or neither"),
        ("sh run=later reason=long", "write run=never reason=WHY, or neither"),
        ("sh run=never reason=slow", "the reason must be one of elsewhere, interactive, long"),
        ("sh file=a.sh", "sh has no words file"),
        ("toml run=never reason=long", "toml has no words reason, run"),
        ("toml file=a.toml over=null", "a block that is written to a file has no other words"),
        ("python runs=never", "python has no words runs"),
    ],
)
def test_what_a_block_must_not_say(info: str, message: str) -> None:
    with pytest.raises(PageError, match=message):
        block(info)


def test_a_block_without_an_end_is_refused() -> None:
    with pytest.raises(PageError, match="line 3: the block has no end"):
        blocks_of("a\n\n```sh\nls\n")
