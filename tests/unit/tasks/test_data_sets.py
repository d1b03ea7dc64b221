"""Data sets in files and folders: what is wrong in one is named with its line or its column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.services.tasks.data_sets import hugging_face, jsonl


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
