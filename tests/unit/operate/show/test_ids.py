"""How ids are written."""

from __future__ import annotations

import pytest

from headrace.errors import UsageError
from headrace.services.operate.show.command import show
from headrace.services.operate.show.ids import (
    GRAMMAR,
    LabelId,
    RecordId,
    SourceId,
    StepId,
    TaskId,
    parse_id,
)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("42", TaskId(42)),
        ("42/3", TaskId(42, 3)),
        ("task:submit/map-1", SourceId("submit/map-1")),
        ("task:7/3", SourceId("7/3")),
        ("label:exp=7", LabelId("exp", "7")),
        ("label:exp=a=b", LabelId("exp", "a=b")),
        ("batch:7", StepId("batch", None, 7)),
        ("version:solver/7", StepId("version", "solver", 7)),
        ("results/2@17", RecordId("results", 2, 17)),
        ("exp-7.batches.default.v1/0@0", RecordId("exp-7.batches.default.v1", 0, 0)),
    ],
)
def test_an_id_names_one_thing(text: str, meant: object) -> None:
    assert parse_id(text) == meant


@pytest.mark.parametrize(
    "text", ["", "x", "42/", "42/3/1", "task:x", "batch:a/b", "label:x", "-1", "a/1@x"]
)
def test_what_is_no_id_shows_how_ids_are_written(text: str) -> None:
    with pytest.raises(UsageError, match="not an id") as raised:
        parse_id(text)
    assert GRAMMAR in str(raised.value)


def test_the_help_teaches_the_same() -> None:
    assert show.help is not None
    for line in GRAMMAR.splitlines():
        assert line.split()[0] in show.help
