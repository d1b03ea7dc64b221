"""Parses JSON that a policy or a client wrote, so that whatever it is can be handled further."""

from __future__ import annotations

import json
from typing import Any

MOST_DEPTH = 100
"""Deepest nesting of values. Code that handles values recursively could not handle any depth."""
TOO_DEEP = f"values are nested deeper than {MOST_DEPTH}"


def load_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text. Raises ValueError if it is not one, and as `check_value`.

    It takes time linear in the text's length.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    check_value(value, text)
    return value


def check_value(value: Any, text: str | bytes) -> None:
    """Checks a value that was parsed from a text.

    Raises ValueError if it is nested deeper than MOST_DEPTH, or if an escape in it is half a
    character (a lone surrogate), which no record and no other program could hold.
    """
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_DEPTH):
        inner = (one for each in level for one in (each.values() if type(each) is dict else each))
        level = [one for one in inner if isinstance(one, dict | list)]
        if not level:
            break
    else:
        raise ValueError(TOO_DEEP)
    if ("\\u" in text) if isinstance(text, str) else (b"\\u" in text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("a text has half a character, which is not valid Unicode") from error
