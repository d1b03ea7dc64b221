"""Reads the fenced blocks of a Markdown page. The words after the language say what a block is for.

A page is a script: a test runs its blocks from top to bottom, in an empty folder.

| info string | meaning |
|---|---|
| `python` | is executed; all such blocks of a page share one namespace |
| `sh` | is executed by bash; a `cd` or an `export` is still true in the next block |
| `LANGUAGE file=NAME` | is written to that file |
| `toml` | a part of a recipe, which is checked over the quickstart's |
| `toml over=NAME` | the same over another shipped recipe |
| `python run=never reason=WHY`, `sh run=never reason=WHY` | is checked, but not executed |
| `text` | output or a picture |

A block whose reason is `long` is executed by `make test-long`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

LONG = "long"
NEEDS = frozenset({"needs-gpu", "needs-network", "needs-cluster", "needs-install"})
REASONS = NEEDS | {LONG, "interactive", "elsewhere"}
"""Why a block is not executed. `elsewhere`: on another machine, or beside a run of the reader's."""

_FENCE = re.compile(r"( *)(`{3,}|~{3,})(.*)")
_WORDS = {
    "python": ("file", "run", "reason"),
    "sh": ("run", "reason"),
    "toml": ("file", "over"),
    "text": ("file",),
}
"""The words that may follow a language. After any other language, `file` must follow."""


class PageError(ValueError):
    """A block has no meaning, or an unknown one. The message begins with the number of its line."""


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    words: Mapping[str, str]
    """The words after the language: `file=recipe.toml`."""
    text: str
    line: int
    """The number of its first line of text in the page."""

    @property
    def file(self) -> str | None:
        """The file that the block is written to."""
        return self.words.get("file")

    @property
    def reason(self) -> str | None:
        """Why the block is not executed."""
        return self.words.get("reason")

    @property
    def is_long(self) -> bool:
        """Whether only `make test-long` executes the block."""
        return self.reason == LONG

    def executed(self, *, long: bool) -> bool:
        """Whether a run of the page executes it, or writes it to its file."""
        if self.file is not None:
            return True
        if self.language not in ("python", "sh"):
            return False
        return self.reason is None or (long and self.is_long)


def blocks_of(page: str) -> list[Block]:
    """Returns the blocks of a page. Raises PageError."""
    blocks = []
    for line, indent, info, text in _fences(page):
        language, *words = info.split() or [""]
        found = dict(_word(word, line) for word in words)
        _check(language, found, line)
        body = "".join(f"{each.removeprefix(indent)}\n" for each in text)
        blocks.append(Block(language, found, body, line + 1))
    return blocks


def _fences(page: str) -> Iterator[tuple[int, str, str, list[str]]]:
    """Yields line number, indentation, info string and lines of each block."""
    lines = enumerate(page.splitlines(), 1)
    for number, line in lines:
        opened = _FENCE.fullmatch(line)
        if opened is None:
            continue
        indent, fence, info = opened.groups()
        text = []
        for _, inner in lines:
            closed = _FENCE.fullmatch(inner)
            if closed is not None and closed[2].startswith(fence) and not closed[3].strip():
                break
            text.append(inner)
        else:
            raise PageError(f"line {number}: the block has no end")
        yield number, indent, info, text


def _word(word: str, line: int) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not (name and equals and value):
        raise PageError(f"line {line}: {word!r}: write NAME=VALUE")
    return name, value


def _check(language: str, words: Mapping[str, str], line: int) -> None:
    if not language:
        raise PageError(f"line {line}: the block has no language")
    if language == "console":
        raise PageError(f"line {line}: write `sh`, and lines without `$`")
    if unknown := sorted(words.keys() - set(_WORDS.get(language, ("file",)))):
        raise PageError(f"line {line}: {language} has no words {', '.join(unknown)}")
    if language not in _WORDS and "file" not in words:
        raise PageError(f"line {line}: {language} needs file=NAME, or write `text`")
    if ("run" in words) != ("reason" in words) or words.get("run", "never") != "never":
        raise PageError(f"line {line}: write run=never reason=WHY, or neither")
    if "reason" in words and words["reason"] not in REASONS:
        raise PageError(f"line {line}: the reason must be one of {', '.join(sorted(REASONS))}")
    if "file" in words and len(words) > 1:
        raise PageError(f"line {line}: a block that is written to a file has no other words")
