"""docs/recipe.md says what the code says, and an option without a meaning is noticed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from headrace.services.operate.recipe.recipe_keys import (
    REQUIRED,
    UndocumentedOption,
    about,
    keys_of,
)
from headrace.services.operate.recipe.recipe_reference import PAGE, reference


@pytest.mark.filterwarnings("default")  # of the libraries that the built-ins import
def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run: make reference"


class Model(BaseModel):
    """A table."""

    wait_s: float | None = Field(default=None, gt=0, le=9)
    """How long."""
    order: Literal["a", "b"] = "a"
    """Which one."""


@dataclasses.dataclass
class Options:
    names: Mapping[str, int]
    """The numbers of names."""
    pair: tuple[float, float] = (0.5, 1.0)
    """Two numbers."""


def plug_in(sandbox: object, path: str, most: int | None = 3) -> None:
    """Does something. Raises UsageError if it can't. It goes on.

    Options:
        path: A file, which
            has lines.
        most: How many.
    """


def test_keys_come_from_fields_and_signatures() -> None:
    assert [tuple(key) for key in keys_of(Model)] == [
        ("wait_s", "number > 0 ≤ 9, seconds", None, "How long."),
        ("order", '`"a"` or `"b"`', "a", "Which one."),
    ]
    assert [tuple(key) for key in keys_of(Options)] == [
        ("names", "table of integers", REQUIRED, "The numbers of names."),
        ("pair", "array of 2 numbers", (0.5, 1.0), "Two numbers."),
    ]
    assert [tuple(key) for key in keys_of(plug_in, given=1)] == [
        ("path", "string", REQUIRED, "A file, which has lines."),
        ("most", "integer", 3, "How many."),
    ]


def test_a_plug_in_is_described_without_its_options_and_errors() -> None:
    assert about(plug_in) == "Does something. It goes on."


def test_an_option_without_a_meaning_is_noticed() -> None:
    def silent(speed: int = 1) -> None:
        """Does something."""

    def stale() -> None:
        """Does something.

        Options:
            speed: How fast.
        """

    class Table(BaseModel):
        speed: int = 1

    for owner in (silent, Table):
        with pytest.raises(UndocumentedOption, match=r"explains \['speed'\]: add them"):
            keys_of(owner)
    with pytest.raises(UndocumentedOption, match=r"explains \['speed'\]: remove them"):
        keys_of(stale)


def test_a_type_without_a_name_in_toml_is_noticed() -> None:
    def odd(when: Any, which: complex = 1j) -> None:
        """Does something.

        Options:
            when: A value.
            which: A number.
        """

    with pytest.raises(AssertionError, match="complex"):
        keys_of(odd)
