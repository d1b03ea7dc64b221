"""Writes rows as a file. Rows of turns: JSON lines, or Parquet in row groups.

A file appears whole under its name, or not at all.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from headrace.schemas.codec import avsc, field_values
from headrace.schemas.events import TurnProjected
from headrace.services.models.blobs import disk_errors

Row = TypeVar("Row")
GROUP_ROWS = 1_000
GROUP_VALUES = 1_000_000
"""A row group is written once it has so many rows, or so many tokens and characters."""


class RowFile(ABC, Generic[Row]):
    """A file that is being written. Leaving the context after an error deletes it."""

    def __init__(self, file: Path) -> None:
        """Raises DependencyError if the file can't be made."""
        self._file = file
        self._unfinished = file.with_name(f".{file.name}.{os.getpid()}.unfinished")
        with disk_errors(f"make {file.parent}"):
            file.absolute().parent.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        with disk_errors(f"write {self._file}"):
            self._open(self._unfinished)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        try:
            with disk_errors(f"write {self._file}"):
                self._close()
                if error is None:
                    self._unfinished.replace(self._file)
        finally:
            self._unfinished.unlink(missing_ok=True)

    def write(self, rows: Sequence[Row]) -> None:
        """Writes rows. Raises DependencyError if the disk can't take them."""
        with disk_errors(f"write {self._file}"):
            self._write(rows)

    @abstractmethod
    def _open(self, path: Path) -> None:
        """Makes the file."""

    @abstractmethod
    def _write(self, rows: Sequence[Row]) -> None:
        """Writes rows, now or with later ones."""

    @abstractmethod
    def _close(self) -> None:
        """Writes what is left and closes the file."""


class JsonlFile(RowFile[TurnProjected]):
    """One JSON object for each row. Numbers that are not finite are null."""

    def _open(self, path: Path) -> None:
        self._output = open(path, "w", encoding="utf-8")  # noqa: SIM115

    def _write(self, rows: Sequence[TurnProjected]) -> None:
        for row in rows:  # pydantic writes NaN and infinity as null
            self._output.write(f"{row.model_dump_json()}\n")

    def _close(self) -> None:
        self._output.close()


class ParquetFile(RowFile[TurnProjected]):
    """A Parquet file with the fields of TurnProjected as columns. Needs pyarrow."""

    def _open(self, path: Path) -> None:
        import pyarrow.parquet

        self._arrow = pyarrow
        self._schema = arrow_schema(pyarrow)
        self._writer = pyarrow.parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._values = 0

    def _write(self, rows: Sequence[TurnProjected]) -> None:
        for row in rows:
            fields = field_values(row)
            for name in ("rewards", "labels"):
                fields[name] = list(fields[name].items())
            self._rows.append(fields)
            self._values += len(row.context) + len(row.tokens) + len(row.text)
            self._values += len(row.context_text or "")
            if len(self._rows) >= GROUP_ROWS or self._values >= GROUP_VALUES:
                self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(self._arrow.Table.from_pylist(self._rows, self._schema))
        self._rows, self._values = [], 0

    def _close(self) -> None:
        self._flush()
        self._writer.close()


def arrow_schema(arrow: Any) -> Any:
    """Returns the Arrow schema of TurnProjected, from its Avro schema. `arrow` is pyarrow."""
    plain = {
        "int": arrow.int32(),
        "long": arrow.int64(),
        "double": arrow.float64(),
        "boolean": arrow.bool_(),
        "string": arrow.string(),
    }

    def type_of(avro: Any) -> Any:
        if isinstance(avro, str):
            return plain[avro]
        match avro["type"]:
            case "array":
                return arrow.list_(type_of(avro["items"]))
            case "map":
                return arrow.map_(arrow.string(), type_of(avro["values"]))
            case "enum":
                return arrow.string()
            case kind if avro.get("logicalType") == "timestamp-millis":
                return arrow.timestamp("ms", "UTC")
            case kind:
                return plain[kind]

    fields = []
    for field in avsc(TurnProjected)["fields"]:
        union = isinstance(field["type"], list)
        inner = field["type"][1] if union else field["type"]
        fields.append(arrow.field(field["name"], type_of(inner), nullable=union))
    return arrow.schema(fields)
