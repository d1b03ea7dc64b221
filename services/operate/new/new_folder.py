"""Writes the files of `headrace/template/` into a new folder of the user."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from headrace.errors import UsageError

MOST_NAMED = 3
"""Files that an error names."""


def make_folder(folder: Path) -> None:
    """Makes the folder and writes the files.

    Hidden files, such as `.git`, may exist already. Raises UsageError if it holds any other file,
    or if it can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        if found:
            named = found if len(found) <= MOST_NAMED else [*found[:MOST_NAMED], "…"]
            raise UsageError(
                f"the folder {folder} is not empty: it holds {', '.join(named)}. "
                "Nothing was written. Give the name of a new folder, or of an empty one"
            )
        for path in sorted((Path(str(files("headrace"))) / "template").iterdir()):
            if path.is_file():  # Python may have left a `__pycache__`.
                (folder / path.name).write_bytes(path.read_bytes())
    except FileExistsError:
        raise UsageError(f"{folder} is a file. Give the name of a new folder") from None
    except OSError as error:
        raise UsageError(f"can't write into the folder {folder}: {error.strerror}") from error
