"""Every page is true: its commands and recipes exist, and its code and commands run.

`tests/docs/markdown.py` says how a page marks its blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace.infra import local
from tests.docs.markdown import Block, PageError, blocks_of
from tests.docs.page_checks import problems_of_page
from tests.docs.page_runner import run_page

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *TUTORIALS)
}


def blocks(page: str) -> list[Block]:
    try:
        return blocks_of(PAGES[page].read_text())
    except PageError:
        return []  # `test_every_block_of_a_page_is_right` shows it.


def pages_with(*languages: str, long: bool = False) -> list[str]:
    """Pages that execute a block of one of the languages, or have a long one."""
    return [
        page
        for page in PAGES
        if any(
            block.is_long if long else block.language in languages and block.executed(long=False)
            for block in blocks(page)
        )
    ]


WITH_COMMANDS = pages_with("sh")
LONG = ("docs/tutorials/laptop-to-cluster.md", "docs/tutorials/your-data-set.md")
"""Their commands run in `make test-long`: they show again what those of other pages show."""


def stack_variables(folder: Path, stack: local.LocalStack) -> Mapping[str, str]:
    """Lets the commands of a page find the stack that the tests share, and `Client()` too."""
    (folder / "page").mkdir()
    (folder / "page" / ".headrace").symlink_to(stack.state)
    return {"HEADRACE_STATE": str(stack.state)}


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_is_right(page: str) -> None:
    assert problems_of_page(blocks_of(PAGES[page].read_text())) == []


@pytest.mark.parametrize("page", [one for one in pages_with("python") if one not in WITH_COMMANDS])
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    run_page(page, blocks(page), tmp_path, {}, long=False)


@pytest.mark.parametrize(
    "page",
    [pytest.param(one, marks=pytest.mark.long if one in LONG else ()) for one in WITH_COMMANDS],
)
def test_the_commands_of_a_page_run(
    page: str, tmp_path: Path, local_stack: local.LocalStack
) -> None:
    run_page(page, blocks(page), tmp_path, stack_variables(tmp_path, local_stack), long=False)


@pytest.mark.long
@pytest.mark.parametrize("page", pages_with(long=True))
def test_the_long_commands_of_a_page_run(
    page: str, tmp_path: Path, local_stack: local.LocalStack
) -> None:
    run_page(page, blocks(page), tmp_path, stack_variables(tmp_path, local_stack), long=True)
