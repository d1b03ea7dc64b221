"""Data sets: functions that yield items. The recipe's `tasks.use` names one.

A data set of your own is a function like these, named as `package.module:name`. It must yield the
same items in the same order each time it is called with the same options, because a task source
that starts again skips as many tasks as it has already submitted.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.services.base.plugins import load
from headrace.services.tasks.task_maker import Item

TASKS = Path(str(files("headrace.infra"))) / "tasks"
"""The folder of the data sets that ship with Headrace."""


def items_of(use: str, options: Mapping[str, Any]) -> Iterator[Item]:
    """Yields the items of a data set. Raises UsageError if `use` names none."""
    yield from load("data set", use, BUILTIN)(**options)


def items_by_epoch(
    use: str, options: Mapping[str, Any], epochs: int | None
) -> Iterator[tuple[str, int, Item]]:
    """Yields the id `EPOCH-POSITION`, the epoch and the item of every task, without end if
    `epochs` is None.
    """
    for epoch in itertools.count() if epochs is None else range(epochs):
        position = -1
        for position, item in enumerate(items_of(use, options)):
            yield f"{epoch}-{position}", epoch, item
        if position < 0:
            return  # another epoch of an empty data set is empty too


def first(items: int, use: str, options: dict[str, Any]) -> Iterator[Item]:
    """Yields the first items of another data set."""
    return itertools.islice(items_of(use, options), items)


def count(items: int | None = None, same: bool = False) -> Iterator[Item]:
    """Yields the items 0, 1, 2, … with an empty payload, without end if `items` is None.

    With `same`, they are all the same item with the same seed, so the environment is always equal.
    """
    for number in itertools.count() if items is None else range(items):
        yield Item("0", seed=0) if same else Item(str(number))


def reasoning_gym(
    dataset: str, size: int = 500, seed: int = 0, config: Mapping[str, Any] | None = None
) -> Iterator[Item]:
    """Yields the first `size` problems of a reasoning-gym data set, made with `config` and `seed`.

    A payload only names its problem. The environment `reasoning_gym` makes the problem, so the
    process that reads this data set does not need that library.
    """
    if size < 1:
        raise UsageError(f"size {size}: a reasoning-gym data set needs at least one problem")
    whole = {"dataset": dataset, "seed": seed, "config": {**(config or {}), "size": size}}
    for index in range(size):
        yield Item(f"{dataset}-{seed}-{index}", {**whole, "index": index})


def jsonl(path: str, id_field: str = "id") -> Iterator[Item]:
    """Yields the JSON objects of a file, one from each line.

    An item's id is the object's `id_field`, or the line number if it has no such field.
    """
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _item(line, f"{path}:{number}", id_field, str(number))
    except OSError as error:
        raise UsageError(f"can't read the data set {path}: {error.strerror}") from error


def _item(line: bytes, location: str, id_field: str, fallback: str) -> Item:
    try:
        payload = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise UsageError(f"{location}: not UTF-8: {error}. Save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{location}: not JSON: {error}") from error
    if not isinstance(payload, dict):
        raise UsageError(f"{location}: a line must be a JSON object")
    return Item(str(payload.get(id_field, fallback)), payload)


def shipped(name: str) -> Iterator[Item]:
    """Yields a data set that ships with Headrace, in `infra/tasks`: `coding` or `repairs`.

    `coding` has functions to write, with hidden calls and their values, for the tool `coding` of
    sandboxes. `repairs` has small repositories with a bug, a report of it and hidden tests, for the
    tool `repair`.
    """
    for item in jsonl(str(TASKS / f"{name}.jsonl")):
        yield Item(item.item_id, {k: v for k, v in item.payload.items() if k != "id"})


def hugging_face(path: str, split: str = "train", id_field: str = "id") -> Iterator[Item]:
    """Yields the rows of what `load_dataset` of the `datasets` library loads from `path`."""
    try:
        from datasets import load_dataset  # type: ignore[import-not-found]
    except ImportError:
        raise UsageError("tasks.use = 'hf' needs the package `datasets`: install it") from None
    for number, row in enumerate(load_dataset(path, split=split)):
        yield Item(str(row.get(id_field, number)), dict(row))


BUILTIN = {
    "count": count,
    "first": first,
    "coding": partial(shipped, "coding"),
    "repairs": partial(shipped, "repairs"),
    "jsonl": jsonl,
    "reasoning_gym": reasoning_gym,
    "hf": hugging_face,
}
