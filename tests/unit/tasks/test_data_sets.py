"""Data sets in files: what is wrong in one is named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import UsageError
from headrace.services.tasks.data_sets import jsonl


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "gr\xfcn"}', "not UTF-8.*Save the file as UTF-8"),
        (b"{", "not JSON"),
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
