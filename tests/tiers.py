"""Which values of a parameter belong to `make test`, and which to `make test-long`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first_in_every_change(values: Iterable[Any], count: int = 1) -> list[Any]:
    """The values for `parametrize`: all but the first `count` are long."""
    return [
        pytest.param(value, marks=pytest.mark.long if number >= count else ())
        for number, value in enumerate(values)
    ]
