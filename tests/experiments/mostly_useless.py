"""A quiz of which 70 % is useless for learning: there, the reward does not depend on the answer."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from typing import Any

from headrace import Item

DIGITS = 5
"""The answers are the digits below it."""
USEFUL, SOLVED = 3, 7
"""Of ten kinds of items, those below USEFUL can be learned, those below SOLVED are always right,
and the others are always wrong."""


def items(useful: bool = False) -> Iterator[Item]:
    """Yields 260 items, mixed: a letter and a digit. The right answer follows from the letter.

    Options:
        useful: Whether only the 78 items that can be learned are given.
    """
    for second in range(10):
        for number, letter in enumerate(string.ascii_lowercase):
            kind = (number * 7 + second * 3) % 10
            if kind < USEFUL or not useful:
                payload = {"question": f"{letter}{second}", "kind": kind, "answer": number % DIGITS}
                yield Item(f"{letter}{second}", payload)


def grade(answer: str, payload: Mapping[str, Any]) -> float:
    """1 if the answer is right, or if the item is one that is always right."""
    if payload["kind"] >= USEFUL:
        return float(payload["kind"] < SOLVED)
    return float(answer == str(payload["answer"]))
