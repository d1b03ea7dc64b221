"""The project's text has none of the words that were replaced by the field's terms."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("schemas", "services", "stream_jobs", "trainer", "infra", "headrace", "docs", "examples")
KINDS = {".avsc", ".html", ".js", ".md", ".py", ".toml"}
FROZEN = ("schemas/released/",)
"""What was released stays as it is, its documentation included."""
WORDS = {
    "companions?": "side partition",
    "let[ _]?go": "release",
    "put[ _]back": "redrive",
    "stretch(es)?": "offset range",
    "mend(s|ed|ing)?": "repair",
    "anew": "again",
    "suspects?": "crash isolation",
    "heed(s|ed|ing)?": "follow, apply, notice",
    "whose doing": "who is responsible",
    "is none of": "is not a",
}
"""Patterns of whole words, and what is written instead."""
CLASSES = (
    "Standing", "Where", "Ledger", "CommitNote", "Walk", "Lasting", "Door", "Offer", "Context",
)  # fmt: skip
"""Names of classes that said too little."""
_RETIRED = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
_CLASS = re.compile(rf"\bclass (?:{'|'.join(CLASSES)})\b")


def texts() -> Iterator[tuple[str, str]]:
    """Yields the path and the text of each file that people read."""
    for path in sorted(ROOT.glob("*.md")):
        yield path.name, path.read_text()
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            name = str(path.relative_to(ROOT))
            if path.suffix in KINDS and not name.startswith(FROZEN):
                yield name, path.read_text()


def retired(text: str) -> list[str]:
    """Returns the retired words of a text."""
    return [found[0] for pattern in (_RETIRED, _CLASS) for found in pattern.finditer(text)]


def test_no_retired_word_is_left() -> None:
    found = {name: words for name, text in texts() if (words := retired(text))}
    assert not found, f"write instead: {WORDS}"


def test_all_texts_are_read() -> None:
    names = {name for name, _ in texts()}
    assert {"README.md", "docs/architecture.md", "schemas/events.py", "headrace/client.py"} < names
    assert len(names) > 500


def test_retired_words_are_found() -> None:
    assert retired("It mends the ledger, and puts it back. class Walk: let_go") == [
        "mends",
        "let_go",
        "class Walk",
    ]
    assert retired("commend, amendment, a walk, Where it was put") == []
