"""Names of files, and patterns that choose among them."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.untrusted.artifact_names import (
    BadName,
    check_limits,
    check_name,
    check_names,
    check_patterns,
    matches,
)

PARTS = st.text("ab.*?[]\\/\0\n é", min_size=0, max_size=12)


@pytest.mark.parametrize("name", ["a", "out/report.md", "a b/ü.txt", ".hidden", "a.b/..c"])
def test_relative_paths_are_names(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "", "/etc/passwd", "../x", "a/../b", "a//b", "a/", ".", "a/./b", "a\\b", "a\0", "a\nb",
        "\u202ex", "\ud800", "x" * 256, "/".join("a" * 17),
    ],
)  # fmt: skip
def test_what_could_lead_elsewhere_is_no_name(name: str) -> None:
    with pytest.raises(BadName):
        check_name(name)


@given(PARTS)
def test_an_accepted_name_stays_in_its_folder(name: str) -> None:
    try:
        check_name(name)
    except BadName:
        return
    root = Path("/some/folder")
    assert Path(os.path.normpath(root / name)).is_relative_to(root)
    assert str(PurePosixPath(name)) == name


def test_names_of_one_episode_differ_and_are_no_folders_of_each_other() -> None:
    check_names(["a/b", "a/c", "ab"])
    for names in (["a", "a"], ["a/b", "a"], ["a", "x", "a/b/c"]):
        with pytest.raises(BadName):
            check_names(names)


@pytest.mark.parametrize(
    ("pattern", "name", "matched"),
    [
        ("out/*", "out/a", True),
        ("out/*", "out/a/b", False),
        ("out/*", "a", False),
        ("**/*.md", "a.md", True),
        ("**/*.md", "x/y/a.md", True),
        ("out/**", "out/x/y", True),
        ("report.md", "report.md", True),
        ("report.md", "x/report.md", False),
        ("[ab]?", "bz", True),
    ],
)
def test_patterns(pattern: str, name: str, matched: bool) -> None:
    check_patterns([pattern])
    assert matches(name, [pattern]) is matched


@given(st.lists(st.sampled_from(["a", "b", "ab"]), min_size=1, max_size=3), st.data())
def test_a_pattern_matches_as_its_expression_does(parts: list[str], data: st.DataObject) -> None:
    pattern = data.draw(
        st.lists(st.sampled_from(["a", "*", "?", "a*", "[ab]"]), min_size=1, max_size=3)
    )
    expected = re.fullmatch(as_expression("/".join(pattern)), "/".join(parts)) is not None
    assert matches("/".join(parts), ["/".join(pattern)]) is expected


def as_expression(pattern: str) -> str:
    return pattern.replace("*", "[^/]*").replace("?", "[^/]")


def test_patterns_are_bounded() -> None:
    for patterns in (["x"] * 65, ["../*"], ["**/**/**/x"], [""]):
        with pytest.raises(BadName):
            check_patterns(patterns)


def test_limits_count_bytes_and_files() -> None:
    check_limits([1 << 20] * 2, files=2, file_mb=1, total_mb=2)
    for sizes in ([0] * 3, [(1 << 20) + 1], [1 << 20] * 2 + [1]):
        with pytest.raises(ValueError, match="at most"):
            check_limits(sizes, files=2 if len(sizes) < 3 or not sizes[0] else 3, file_mb=1,
                         total_mb=2)  # fmt: skip


def test_no_pattern_matches_a_name_of_too_many_parts() -> None:
    assert matches("/".join("a" * 16), ["**"])
    for name in ("/".join("a" * 17), "a/" * 1_000_000):
        assert not matches(name, ["**", "**/a/**"])
