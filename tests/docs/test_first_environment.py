"""The page that explains what `headrace new` makes shows exactly those files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.services.operate.run import endings
from tests.docs.markdown import blocks_of
from tests.docs.test_pages import ROOT

PAGE = ROOT / "docs" / "tutorials" / "first-environment.md"
TEMPLATE = ROOT / "headrace" / "template"
FILES = {block.file: block.text for block in blocks_of(PAGE.read_text()) if block.file is not None}


@pytest.mark.parametrize("file", sorted(path.name for path in TEMPLATE.glob("*.py")))
def test_the_page_shows_the_files_of_a_new_folder(file: str) -> None:
    assert FILES[file] == (TEMPLATE / file).read_text()


def test_the_hints_of_the_page_exist() -> None:
    table = PAGE.read_text().partition("| what you see |")[2]
    quoted = [text.strip("… ") for text in re.findall(r"^\| `(.+?)`", table, re.MULTILINE)]
    code = " ".join(Path(endings.__file__).read_text().replace('"\n', "").split())
    code = re.sub(r'" f?"|\{[^}]*\}', "", code)
    hints = [text for text in quoted if not text.startswith("failed")]
    assert len(hints) == 5
    assert [text for text in hints if re.sub(r" \d$", "", text) not in code] == []
