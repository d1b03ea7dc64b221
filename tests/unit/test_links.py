"""Every link of a page to a file of this repository leads to that file, and to a heading in it.

Paths and names of modules in a page's text exist, too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md")
    for path in sorted(ROOT.glob(pattern))
}
FOLDERS = ("docs", "examples", "headrace", "infra", "schemas", "services", "stream_jobs", "tests",
           "trainer")  # fmt: skip
NAMED = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`")
MODULE = re.compile(r"`(\w+\.py|\w+/)`")
FOR_DEVELOPERS = ("CONTRIBUTING.md", "docs/architecture.md")
"""Pages that name modules and folders without the path to them."""
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^ *(```|~~~).*?^ *\1", re.DOTALL | re.MULTILINE)


def anchors(page: str) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    found: Counter[str] = Counter()
    names = set()
    for heading in re.findall(r"^#{1,6} +(.+)$", FENCED.sub("", page), re.MULTILINE):
        text = LINK.sub(lambda link: link[0][1 : link[0].index("]")], heading).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return names


def broken_links(path: Path, page: str) -> Iterator[str]:
    """Yields the links of `page`, which is or would be at `path`, that lead nowhere."""
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "", FENCED.sub("", page))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if target != path and not target.exists():
            yield f"{link}: no such file"
        elif anchor and anchor not in anchors(page if target == path else target.read_text()):
            yield f"{link}: no such heading"


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    assert list(broken_links(PAGES[name], PAGES[name].read_text())) == []


def test_a_link_that_leads_nowhere_is_found() -> None:
    page = """# `One` and [two](README.md)
## A
## A
```text
# not a heading, and [not a link](gone.md)
```
[1](#one-and-two), [2](#a-1), [3](#not-a-heading), [4](gone.md), [5](README.md#gone),
`[6](gone.md)`, [7](https://example.com/gone.md)
"""
    assert list(broken_links(ROOT / "page.md", page)) == [
        "#not-a-heading: no such heading",
        "gone.md: no such file",
        "README.md#gone: no such heading",
    ]


def missing_paths(page: str) -> list[str]:
    """The paths in a page's text that don't exist."""
    return [name for name in NAMED.findall(page) if not (ROOT / name).exists()]


@pytest.mark.parametrize("name", [name for name in PAGES if "decisions/" not in name])
def test_paths_in_the_text_exist(name: str) -> None:
    """Decisions are as old as their date, so what they name may be gone."""
    assert missing_paths(PAGES[name].read_text()) == []


@pytest.mark.parametrize("name", FOR_DEVELOPERS)
def test_modules_in_the_text_exist(name: str) -> None:
    known = {
        f"{path.name}/" if path.is_dir() else path.name
        for folder in FOLDERS
        for path in (ROOT / folder, *(ROOT / folder).rglob("*"))
    }
    named = MODULE.findall(PAGES[name].read_text())
    assert named
    assert [one for one in named if one not in known] == []


def test_a_path_that_does_not_exist_is_found() -> None:
    page = "`schemas/events.py`, `services/gone.py`, `services/`, `mine/gone.py`, `a services/gone`"
    assert missing_paths(page) == ["services/gone.py"]
