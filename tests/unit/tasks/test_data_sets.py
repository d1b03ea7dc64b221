"""Data sets in files and folders: what is wrong in one is named with its line or its column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.services.namespace.cluster_config import read_recipe
from headrace.services.tasks.data_sets import hugging_face, jsonl, load_data_set
from headrace.services.tasks.task_maker import Item, TaskMaker
from headrace.services.tasks.warm_start import DEMONSTRATED


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "gr\xfcn"}', "not UTF-8.*Save the file as UTF-8"),
        (b"{", "not JSON: Expecting property name enclosed in double quotes at column 2$"),
        (b"[" * 100_000, "not JSON"),
        (b"1" * 5_000, "not JSON"),
        (b"[]", "must be a JSON object"),
    ],
)
def test_a_line_that_is_no_item_is_named(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "items.jsonl"
    path.write_bytes('{"id": "é"}\n\n'.encode() + line + b"\n")
    items = jsonl(str(path))
    assert next(items).item_id == "é"
    with pytest.raises(UsageError, match=rf"items\.jsonl:3: .*{reason}"):
        next(items)


def test_a_field_of_a_line_sets_what_its_task_has(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    task = {"environment": "other", "labels": {"a": "b"}, "artifacts": {"in/x": "x.txt"}}
    path.write_text(json.dumps({"id": "1", "question": "?", "task": task}))
    (whole,) = jsonl(str(path))  # as ever, if no field is named
    assert (whole.payload["task"], whole.task) == (task, {})
    (item,) = jsonl(str(path), task_field="task")
    assert item.payload == {"id": "1", "question": "?"}
    assert item.task == {**task, "artifacts": {"in/x": str(tmp_path / "x.txt")}}


@pytest.mark.parametrize(
    ("task", "reason"), [({"agnet": "a"}, "agnet: no such key"), ([], "must be an object")]
)
def test_a_wrong_field_of_a_task_is_named_with_its_line(
    tmp_path: Path, task: Any, reason: str
) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text('{"id": "0"}\n' + json.dumps({"id": "1", "task": task}))
    with pytest.raises(UsageError, match=rf"items\.jsonl:2: .*{reason}"):
        list(jsonl(str(path), task_field="task"))


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "link"])
def test_a_line_names_only_files_of_its_folder(tmp_path: Path, file: str) -> None:
    (tmp_path / "secret").touch()
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "link").symlink_to("../secret")
    path = folder / "items.jsonl"
    path.write_text(json.dumps({"id": "1", "task": {"artifacts": {"x": file}}}))
    with pytest.raises(UsageError, match=r"items\.jsonl:1: artifacts\.x: .* leads out of"):
        list(jsonl(str(path), task_field="task"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"items": 3},
            "'first': missing a required argument: 'use'. Its options are items, use, options",
        ),
        ({"items": 3, "use": "count", "option": {}}, "'first': .*'option'"),
    ],
)
@pytest.mark.parametrize("depth", range(3))
def test_wrong_options_of_a_function_are_found_before_an_item_is_read(
    options: dict[str, Any], message: str, depth: int
) -> None:
    """Also within a mixture within a stage that comes hours later."""
    use = "first"
    for composed, key in (("mixture", "parts"), ("curriculum", "stages"))[:depth]:
        part = {"name": "one", "use": use, "options": options}
        own: dict[str, Any] = {"weight": 1} if key == "parts" else {}
        use, options = composed, {key: [part | own]}
    with pytest.raises(UsageError, match=message):
        load_data_set(use, options)


def test_an_item_overrides_the_recipe_but_not_what_is_fixed() -> None:
    recipe = read_recipe("null")
    task = {"agent": "theirs", "tenant": "gold", "samples": 3, "labels": {"a": "b"}}
    item = Item("1", {"x": 1}, task=task)
    made = TaskMaker(recipe, "source").make(item, "0-0", labels={"curation.seed": "0"})
    assert (made.agent, made.tenant, made.samples) == ("theirs", "gold", 3)
    assert made.labels == {"a": "b", "curation.seed": "0"}
    fixed = TaskMaker(recipe, "source", fixed=DEMONSTRATED).make(item, "0-0")
    assert (fixed.agent, fixed.samples) == (recipe.tasks.agent, recipe.tasks.samples)
    assert fixed.tenant == "gold"


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets: Any = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.mark.usefixtures("offline")
def test_a_folder_as_the_hub_has_it_becomes_items_of_json_values(tmp_path: Path) -> None:
    folder = tmp_path / "questions"
    folder.mkdir()
    for split in ("train", "test"):
        rows = [
            {"id": f"{split}-{n}", "question": "?", "tags": [{"n": n}], "at": "2026-11-22T12:00:00"}
            for n in range(2)
        ]
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    items = [*hugging_face(str(folder), split="test")]
    assert [item.item_id for item in items] == ["test-0", "test-1"]
    assert items[1].payload == {
        "id": "test-1", "question": "?", "tags": [{"n": 1}], "at": "2026-11-22T12:00:00",
    }  # fmt: skip
    assert [item.item_id for item in hugging_face(str(folder), id_field="x")] == ["0", "1"]
    with pytest.raises(UsageError, match=r"questions: Unknown split .*'train', 'test'"):
        next(hugging_face(str(folder), split="exam"))
    with pytest.raises(UsageError, match=r"can't load the data set .*elsewhere"):
        next(hugging_face(str(tmp_path / "elsewhere")))


@pytest.mark.usefixtures("offline")
def test_a_configuration_is_named_and_what_is_not_json_is_refused(tmp_path: Path) -> None:
    for name, value in (("main", b"\xff"), ("text", "fine")):
        rows = {"answer": [value]}
        folder = tmp_path / "bytes" / name
        folder.mkdir(parents=True)
        pyarrow_table(rows, folder / "train.parquet")
    (tmp_path / "bytes" / "README.md").write_text(CARD)
    folder = tmp_path / "bytes"
    assert [one.payload for one in hugging_face(str(folder), name="text")] == [{"answer": "fine"}]
    with pytest.raises(UsageError, match="column answer has a value of type bytes"):
        next(hugging_face(str(folder), name="main"))
    with pytest.raises(UsageError, match=r"(?s)main.*text"):
        next(hugging_face(str(folder)))


CARD = """---
configs:
- config_name: main
  data_files: main/train.parquet
- config_name: text
  data_files: text/train.parquet
---
"""


def pyarrow_table(rows: dict[str, list[Any]], path: Path) -> None:
    from pyarrow import parquet, table

    parquet.write_table(table(rows), path)
