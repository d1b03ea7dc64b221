"""Figures of matplotlib, which the extra `plot` installs, and their files."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import UsageError
from headrace.services.models.blobs import disk_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png")
COLUMNS = 2
PANEL_INCHES = (5.0, 2.6)
"""Width and height of a panel."""


def empty_figure(path: Path, what: str) -> Figure:
    """Returns an empty figure. Raises UsageError if it could not be drawn into `path`.

    `what` names the option or argument that gave the path. Call it before the work whose result is
    drawn.
    """
    if path.suffix not in FORMATS:
        raise UsageError(f"{what} {path}: give a file whose name ends in {' or '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{what} {path}: there is no folder {path.absolute().parent}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(f"{what}: {error}. Run pip install 'headrace[plot]'") from None
    return Figure(layout="constrained")


def add_panels(figure: Figure, titles: list[str]) -> list[Axes]:
    """Adds a panel over versions for each title, in two columns."""
    rows = max(1, ceil(len(titles) / COLUMNS))
    figure.set_size_inches(COLUMNS * PANEL_INCHES[0], rows * PANEL_INCHES[1])
    panels = []
    for position, title in enumerate(titles, 1):
        axes = figure.add_subplot(rows, COLUMNS, position)
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("version", fontsize="small")
        axes.locator_params(axis="x", integer=True)
        panels.append(axes)
    return panels


def save_figure(figure: Figure, path: Path) -> None:
    """Writes the figure. Text stays text, and the same figure gives the same file.

    Raises DependencyError if the disk can't take it.
    """
    from matplotlib import rc_context

    with (
        rc_context({"svg.fonttype": "none", "svg.hashsalt": "headrace"}),
        disk_errors(f"write {path}"),
    ):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
