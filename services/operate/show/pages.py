"""The parts of a page for people, and the page of a record."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """A table: column titles and rows."""

    head: tuple[str, ...]
    rows: list[list[str]]


Part = str | Table
"""A part of a page. A text without indentation is a heading."""


def record_page(tree: dict[str, Any]) -> list[Part]:
    """Shows one record, field by field."""
    location = f"{tree['topic']}/{tree['partition']}@{tree['offset']}"
    page: list[Part] = [f"{tree['type']} {tree['id']}".rstrip(), line("location", location)]
    page.append(line("recorded", tree["at"]))
    event = tree["event"]
    page += [line(name, json.dumps(value, ensure_ascii=False)) for name, value in event.items()]
    if "task" in event:
        sample = f"/{event['sample']}" if "sample" in event else ""
        page.append(line("see also", f"headrace show {event['task']}{sample}"))
    elif "version" in event and "policy" in event:
        page.append(line("see also", f"headrace show version:{event['policy']}/{event['version']}"))
    return page


def line(label: str, text: str) -> str:
    """Formats a line with a label."""
    return f"  {label:<11} {text}"


def number(value: float | None) -> str:
    """Formats a number with 4 digits; `-` for None."""
    return "-" if value is None else f"{value:.4g}"


def versions_range(versions: Sequence[int]) -> str:
    """Formats ascending versions: `3`, `3-5`, or `-` for an empty list."""
    if not versions:
        return "-"
    return str(versions[0]) if len(versions) == 1 else f"{versions[0]}-{versions[-1]}"


def dropped_name(task: int, sample: int) -> str:
    """Formats what a batch dropped: a sample as TASK/SAMPLE, or a whole task (sample -1)."""
    return str(task) if sample < 0 else f"{task}/{sample}"


def one_line(text: str) -> str:
    """Shows line ends as ⏎, so that a text stays on one line."""
    return text.replace("\r", "").replace("\n", "⏎")
