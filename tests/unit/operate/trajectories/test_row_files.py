"""A file of rows appears whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet
import pytest

from headrace.schemas.events import TurnProjected
from headrace.services.operate.asyncapi.example_events import EXAMPLES
from headrace.services.operate.trajectories import row_files
from headrace.services.operate.trajectories.row_files import JsonlFile, ParquetFile, RowFile

(ROW,) = (one for _, one in EXAMPLES if isinstance(one, TurnProjected))


@pytest.mark.parametrize("kind", [JsonlFile, ParquetFile])
def test_an_interrupted_file_leaves_nothing(
    kind: type[RowFile[TurnProjected]], tmp_path: Path
) -> None:
    file = tmp_path / "rows"
    file.write_text("of an earlier export")

    def interrupted() -> None:
        with kind(file) as output:
            output.write([ROW])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["of an earlier export"]


def test_parquet_has_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "GROUP_ROWS", 4)
    with ParquetFile(tmp_path / "rows") as output:
        output.write([ROW] * 6)
        output.write([ROW] * 4)
    found = pyarrow.parquet.ParquetFile(tmp_path / "rows")
    assert found.num_row_groups == 3
    rows = found.read().to_pylist(maps_as_pydicts="strict")
    assert len(rows) == 10
    assert rows[0]["logprobs"] == list(ROW.logprobs)
    assert rows[0]["labels"] == ROW.labels


def test_json_has_no_nan(tmp_path: Path) -> None:
    with JsonlFile(tmp_path / "rows") as output:
        output.write([ROW.model_copy(update={"logprobs": (float("nan"), -1.0)})])
    (line,) = (tmp_path / "rows").read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["logprobs"] == [None, -1.0]
