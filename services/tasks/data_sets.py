"""Data sets: functions that yield items. The recipe's `tasks.use` names one.

A data set of your own is a function like these, named as `package.module:name`. It must yield the
same items in the same order each time it is called with the same options, because a task source
that starts again skips as many tasks as it has already submitted.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import date, time
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from headrace.errors import UsageError
from headrace.services.base.plugins import load, with_options
from headrace.services.base.reveal import reveal
from headrace.services.tasks.per_task import read_settings
from headrace.services.tasks.task_maker import Item

TASKS = Path(str(files("headrace.infra"))) / "tasks"
"""The folder of the data sets that ship with Headrace."""


def items_of(use: str, options: Mapping[str, Any]) -> Iterator[Item]:
    """Yields the items of a data set. Raises UsageError if `use` names none."""
    data_set = load_data_set(use, options)
    yield from data_set if isinstance(data_set, Iterator) else data_set.items(items_of)


def load_data_set(use: str, options: Mapping[str, Any]) -> Any:
    """Returns the items of a data set, or its object if it is a class: a `Curriculum`.

    Raises UsageError if `use` names none, and for wrong options, also of data sets within it.
    """
    data_set = load("data set", use, BUILTIN)
    revealed = reveal(options, f"options of the data set {use!r}")
    if inspect.isclass(data_set) and issubclass(data_set, BaseModel):
        made = with_options("data set", use, data_set, revealed)
        for part in getattr(made, "inner", ()):
            load_data_set(part.use, part.options)
        return made
    taken = inspect.signature(data_set)
    try:
        taken.bind(**revealed)
    except TypeError as error:
        names = ", ".join(taken.parameters) or "none"
        raise UsageError(f"data set {use!r}: {error}. Its options are {names}") from error
    return iter(data_set(**revealed))


def items_by_epoch(
    use: str, options: Mapping[str, Any], epochs: int | None, first: int = 0
) -> Iterator[tuple[str, int, Item]]:
    """Yields the id `EPOCH-POSITION`, the epoch and the item of every task from the epoch `first`
    on, without end if `epochs` is None.
    """
    for epoch in itertools.count(first) if epochs is None else range(first, epochs):
        position = -1
        for position, item in enumerate(items_of(use, options)):
            yield f"{epoch}-{position}", epoch, item
        if position < 0:
            return  # another epoch of an empty data set is empty too


def first(items: int, use: str, options: dict[str, Any] | None = None) -> Iterator[Item]:
    """Yields the first items of another data set.

    Options:
        items: Number of items.
        use: The other data set: a built-in, or an import path.
        options: Options of the other data set.
    """
    return itertools.islice(items_of(use, options or {}), items)


def count(items: int | None = None, same: bool = False) -> Iterator[Item]:
    """Yields the items 0, 1, 2, … with an empty payload, for environments that need only a seed.

    Options:
        items: Number of items. Absent: without end.
        same: Whether they are all the same item with the same seed, so that the environment is
            always equal.
    """
    for number in itertools.count() if items is None else range(items):
        yield Item("0", seed=0) if same else Item(str(number))


def reasoning_gym(
    dataset: str, size: int = 500, seed: int = 0, config: Mapping[str, Any] | None = None
) -> Iterator[Item]:
    """Yields the first problems of a data set of reasoning-gym.

    A payload only names its problem. The environment `reasoning_gym` makes the problem and scores
    the answer, so the process that reads this data set does not need that library.

    Options:
        dataset: The library's name of the data set, such as `count_bits`.
        size: Number of problems.
        seed: The seed from which the problems are made.
        config: The configuration of the library's data set.
    """
    if size < 1:
        raise UsageError(f"size {size}: a reasoning-gym data set needs at least one problem")
    whole = {"dataset": dataset, "seed": seed, "config": {**(config or {}), "size": size}}
    for index in range(size):
        yield Item(f"{dataset}-{seed}-{index}", {**whole, "index": index})


def jsonl(path: str, id_field: str = "id", task_field: str = "") -> Iterator[Item]:
    """Yields the JSON objects of a file, one from each line. The object is the item's payload.

    Options:
        path: The file, in JSON lines.
        id_field: The field with the item's id. An object without it gets its line number as id.
        task_field: The field with what the item's task sets for itself: an object with keys such
            as `environment`, `image`, `tenant`, `labels` and `artifacts`. It is not part of the
            payload. Paths of files are relative to the folder of `path`. Absent: the recipe
            decides everything, and each field is payload.
    """
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    found = _item(line, f"{path}:{number}", id_field, str(number))
                    yield _with_task(found, task_field, Path(path).parent, f"{path}:{number}")
    except OSError as error:
        raise UsageError(f"can't read the data set {path}: {error.strerror}") from error


def _item(line: bytes, location: str, id_field: str, fallback: str) -> Item:
    try:
        payload = json.loads(line.decode().rstrip())
    except UnicodeDecodeError as error:
        raise UsageError(f"{location}: not UTF-8: {error}. Save the file as UTF-8") from error
    except json.JSONDecodeError as error:  # its own text would name line 1, of this line alone
        raise UsageError(f"{location}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{location}: not JSON: {error}") from error
    if not isinstance(payload, dict):
        raise UsageError(f"{location}: a line must be a JSON object")
    return Item(str(payload.get(id_field, fallback)), payload)


def _with_task(item: Item, field: str, folder: Path, location: str) -> Item:
    """Returns an item whose task sets for itself what a field of its payload says."""
    if not field or field not in item.payload:
        return item
    payload = dict(item.payload)
    task = payload.pop(field)
    if not isinstance(task, dict):
        raise UsageError(f"{location}: {field!r} must be an object with keys of a task")
    if isinstance(files := task.get("artifacts"), dict):
        found = {}
        for name, one in files.items():
            if isinstance(one, str):
                path = (folder / one).resolve()  # a row may be anybody's, and so may a link
                if not path.is_relative_to(folder.resolve()):
                    raise UsageError(f"{location}: artifacts.{name}: {one!r} leads out of {folder}")
                one = str(folder / one)
            found[name] = one
        task = {**task, "artifacts": found}
    read_settings(task, location)  # a wrong key is reported with its line
    return replace(item, payload=payload, task=task)


def coding() -> Iterator[Item]:
    """Yields functions to write, which ship with Headrace.

    A payload also has hidden calls and their values. The tool `coding` of the environment `docker`
    shows the prompt and grades programs by them.
    """
    return _shipped("coding")


def repairs() -> Iterator[Item]:
    """Yields small repositories with a bug and a report of it, which ship with Headrace.

    A payload also has hidden tests. The tool `repair` of the environment `docker` writes the files,
    shows the report and grades the repository by the tests.
    """
    return _shipped("repairs")


def _shipped(name: str) -> Iterator[Item]:
    for item in jsonl(str(TASKS / f"{name}.jsonl")):
        yield Item(item.item_id, {k: v for k, v in item.payload.items() if k != "id"})


def hugging_face(
    path: str,
    split: str = "train",
    name: str | None = None,
    id_field: str = "id",
    task_field: str = "",
) -> Iterator[Item]:
    """Yields the rows of a data set of Hugging Face. A row is its item's payload.

    It needs the extra `hf`. `load_dataset` of the library `datasets` gets `path`, `name` and
    `split`. Without a network, it reads a folder, and what it has fetched before. Dates and times
    become text, as in ISO 8601.

    Options:
        path: Name of the data set on the Hub, or a folder.
        split: The split of the data set.
        name: The configuration of the data set, if it has several, such as `main` of
            `openai/gsm8k`.
        id_field: The field with the item's id. A row without it gets its number as id.
        task_field: The column with what the item's task sets for itself, as for `jsonl`. Paths of
            files are relative to the current folder.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UsageError(f"{error}: run pip install 'headrace[hf]'") from error
    try:
        rows = load_dataset(path, name=name, split=split)
    except (OSError, ValueError) as error:  # not there, or no such configuration or split
        raise UsageError(f"can't load the data set {path}: {error}") from error
    for number, row in enumerate(rows):
        payload = {field: _json(value, f"{path}: column {field}") for field, value in row.items()}
        item = Item(str(row.get(id_field, number)), payload)
        yield _with_task(item, task_field, Path(), f"{path}: row {number}")


def _json(value: Any, column: str) -> Any:
    """Returns a value of a row as JSON values. Raises UsageError for an image, for example."""

    def as_text(value: Any) -> str:
        if isinstance(value, date | time):
            return value.isoformat()
        raise UsageError(
            f"{column} has a value of type {type(value).__name__}, which a task can't carry. "
            "Remove the column, or write a data set that converts it"
        )

    return json.loads(json.dumps(value, default=as_text))


BUILTIN: dict[str, Any] = {
    "count": count,
    "first": first,
    "coding": coding,
    "repairs": repairs,
    "jsonl": jsonl,
    "reasoning_gym": reasoning_gym,
    "hf": hugging_face,
    "mixture": "headrace.services.tasks.curation.composed_data_sets:Mixture",
    "curriculum": "headrace.services.tasks.curation.composed_data_sets:Curriculum",
}
