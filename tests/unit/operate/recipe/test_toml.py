from __future__ import annotations

import tomllib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.services.operate.recipe.toml import to_toml

SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    # A surrogate is no character, so no file can hold it.
    st.text(st.characters(exclude_categories=["Cs"])),
)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3))
TREES = st.recursive(
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), VALUES, max_size=4),
    lambda inner: st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])), st.one_of(VALUES, inner), max_size=4
    ),
    max_leaves=10,
)


@given(TREES)
def test_tomllib_reads_back_what_is_written(tree: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(tree)) == tree


def test_none_is_left_out_but_training_is_false() -> None:
    assert to_toml({"a": None, "training": None}) == "training = false\n"


def test_tables_within_lists() -> None:
    tree = {"a": [{"b": 1, "c d": "x"}]}
    assert tomllib.loads(to_toml(tree)) == tree
