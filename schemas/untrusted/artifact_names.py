"""The names of artifacts, and the patterns that choose among them.

A name is a relative path with `/` between its parts. It comes from other programs, and files are
written under it, so it must not lead out of a folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from headrace.schemas.events import Blob

MAX_NAME_BYTES = 255
"""Maximum length of a name in UTF-8."""
MAX_PARTS = 16
"""Maximum number of parts of a name or a pattern."""
MAX_PATTERNS = 64
"""Maximum number of patterns of a task."""


class BadName(ValueError):
    """A name or a pattern of artifacts can't be used. The message says why."""


def check_name(name: str) -> None:
    """Raises BadName if a name is not a relative path below a folder."""
    problem = _problem(name)
    if problem:
        raise BadName(f"{name[:MAX_NAME_BYTES]!r} can't be the name of a file: {problem}")


def check_pattern(pattern: str) -> None:
    """Raises BadName if a pattern could not match a name."""
    problem = _problem(pattern)
    if problem:
        raise BadName(f"{pattern[:MAX_NAME_BYTES]!r} can't be a pattern of files: {problem}")
    if len([part for part in pattern.split("/") if part == "**"]) > 2:
        raise BadName(f"{pattern!r} can't be a pattern of files: it has more than two `**`")


def check_patterns(patterns: Sequence[str]) -> None:
    """Raises BadName if there are too many patterns, or if one is wrong."""
    if len(patterns) > MAX_PATTERNS:
        raise BadName(f"{len(patterns)} patterns of files; at most {MAX_PATTERNS} are allowed")
    for pattern in patterns:
        check_pattern(pattern)


def check_names(names: Iterable[str]) -> None:
    """Raises BadName if a name is wrong, occurs twice, or is a folder of another one."""
    seen: set[str] = set()
    for name in names:
        check_name(name)
        if name in seen:
            raise BadName(f"{name!r} is the name of two files")
        seen.add(name)
    for name in seen:
        for end in (at for at, letter in enumerate(name) if letter == "/"):
            if name[:end] in seen:
                raise BadName(f"{name[:end]!r} is the name of a file and of a folder")


def check_limits(sizes: Sequence[int], files: int, file_mb: int, total_mb: int) -> None:
    """Raises ValueError if there are too many files, or if they are too large. Sizes in bytes."""
    if len(sizes) > files:
        raise ValueError(f"{len(sizes)} files; at most {files} are allowed")
    if sizes and max(sizes) > file_mb << 20:
        raise ValueError(f"a file has {max(sizes):,} bytes; at most {file_mb} MiB are allowed")
    if sum(sizes) > total_mb << 20:
        raise ValueError(f"files of {sum(sizes):,} bytes; at most {total_mb} MiB are allowed")


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns matches a name.

    `*` and `?` do not match `/`. A part `**` matches any number of parts, also 0. No pattern
    matches a name of more than MAX_PARTS parts, which can't be an artifact: policies make names,
    and the time grows with the square of the parts, or with the third power.
    """
    parts = name.split("/", MAX_PARTS)
    if len(parts) > MAX_PARTS:
        return False
    return any(_matches(parts, pattern.split("/")) for pattern in patterns)


def by_name(artifacts: Iterable[Blob]) -> dict[str, Blob]:
    """Returns artifacts by their names. Raises BadName as `check_names` does."""
    found = list(artifacts)
    check_names(one.name for one in found)
    return {one.name: one for one in found}


def _problem(name: str) -> str:
    """Returns what is wrong with a name, or an empty text."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "it is not Unicode text"
    parts = name.split("/")
    if not 0 < size <= MAX_NAME_BYTES:
        return f"it must have 1 to {MAX_NAME_BYTES} bytes"
    if len(parts) > MAX_PARTS:
        return f"it has more than {MAX_PARTS} parts"
    if "" in parts or "." in parts or ".." in parts:
        return "it must be a relative path, without `.`, `..` and empty parts"
    if "\\" in name or not name.isprintable():
        return "it has a backslash or a character that can't be printed"
    return ""


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[start:], pattern[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])
