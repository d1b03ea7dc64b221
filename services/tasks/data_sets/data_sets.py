"""Data sets: functions that yield items. Named in the recipe's `tasks.use`.

A data set of your own is a function like these, as `package.module:name`. It yields the same items
in the same order each time it is called with the same options: a source that starts again skips
what it finds submitted.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from headrace.errors import UsageError
from headrace.services.base.plugins import Loader, load
from headrace.services.tasks.task_maker import Item


def _arithmetic() -> Any:
    from headrace.services.tasks.data_sets.arithmetic import items

    return items


def _coding() -> Any:
    from headrace.services.tasks.data_sets.coding_items import items

    return items


def _repairs() -> Any:
    from headrace.services.tasks.data_sets.repairs import items

    return items


def _reasoning_gym() -> Any:
    from headrace.services.tasks.data_sets.reasoning_gym_items import items

    return items


BUILTIN: dict[str, Loader] = {
    "count": lambda: count,
    "first": lambda: first,
    "arithmetic": _arithmetic,
    "coding": _coding,
    "repairs": _repairs,
    "jsonl": lambda: jsonl,
    "reasoning_gym": _reasoning_gym,
    "hf": lambda: hugging_face,
}


def first(items: int, use: str, options: dict[str, Any]) -> Iterator[Item]:
    """The first items of another data set."""
    yield from itertools.islice(load("data set", use, BUILTIN)(**options), items)


def count(items: int | None = None, same: bool = False) -> Iterator[Item]:
    """Items 0, 1, 2, … with an empty payload: as many as `items`, or without end.

    With `same` all are one item with one seed: the same world, again and again.
    """
    for number in itertools.count() if items is None else range(items):
        yield Item("0", seed=0) if same else Item(str(number))


def jsonl(path: str, id_field: str = "id") -> Iterator[Item]:
    """A file of JSON objects, one a line. The item's id is its `id_field`, else its line number."""
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _item(line, f"{path}:{number}", id_field, str(number))
    except OSError as error:
        raise UsageError(f"can't read the data set {path}: {error.strerror}") from error


def _item(line: str, where: str, id_field: str, fallback: str) -> Item:
    try:
        payload = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON: {error}") from error
    if not isinstance(payload, dict):
        raise UsageError(f"{where}: a line must be a JSON object")
    return Item(str(payload.get(id_field, fallback)), payload)


def hugging_face(path: str, split: str = "train", id_field: str = "id") -> Iterator[Item]:
    """A data set of the `datasets` library, by what `load_dataset` takes. Needs that library."""
    try:
        from datasets import load_dataset  # type: ignore[import-not-found]
    except ImportError:
        raise UsageError("tasks.use = 'hf' needs the package `datasets`: install it") from None
    for number, row in enumerate(load_dataset(path, split=split)):
        yield Item(str(row.get(id_field, number)), dict(row))
