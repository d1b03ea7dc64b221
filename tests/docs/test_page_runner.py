"""How a page is run: in one folder, one shell and one Python, and nothing is left."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.docs import page_runner
from tests.docs.markdown import blocks_of
from tests.docs.page_runner import BlockFailed, run_page


def run(folder: Path, *parts: str, long: bool = False) -> Path:
    """Runs a page of blocks, each an info string and its text. Returns the page's folder."""
    pairs = zip(parts[::2], parts[1::2], strict=True)
    page = "".join(f"```{info}\n{text}\n```\n" for info, text in pairs)
    run_page("page.md", blocks_of(page), folder, {"HEADRACE_STATE": "x"}, long=long)
    return folder / "page"


def test_shell_blocks_are_one_shell(tmp_path: Path) -> None:
    here = run(
        tmp_path,
        "sh", "mkdir a; cd a; export B='one\ntwo'; C=3",
        "text file=d.txt", "text",
        "sh", 'echo "$B" "${C-none}" "$HEADRACE_STATE" > e.txt; headrace --version',
    )  # fmt: skip
    assert (here / "a" / "d.txt").read_text() == "text\n"
    assert (here / "a" / "e.txt").read_text() == "one\ntwo none x\n"


def test_python_blocks_are_one_namespace(tmp_path: Path) -> None:
    here = run(
        tmp_path,
        "python file=own.py", "NUMBER = 6",
        "python", "import asyncio, own\nx = own.NUMBER",
        "sh", "mkdir a; cd a",
        "python", "await asyncio.sleep(0)\nopen('y', 'w').write(str(x * 7))\nassert __name__",
    )  # fmt: skip
    assert (here / "a" / "y").read_text() == "42"


def test_only_a_long_run_executes_long_blocks(tmp_path: Path) -> None:
    parts = ("sh run=never reason=long", "touch long", "sh run=never reason=needs-gpu", "touch gpu")
    (tmp_path / "short").mkdir()
    (tmp_path / "long").mkdir()
    assert list(run(tmp_path / "short", *parts).iterdir()) == []
    assert [path.name for path in run(tmp_path / "long", *parts, long=True).iterdir()] == ["long"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("sh", "echo seen\nfalse | true\ntouch no"), "page.md, line 2: exit code 1"),
        (("sh", "echo $NOT_SET"), "NOT_SET: unbound variable"),
        (("text", "a", "python", "b = 1\n1 / 0"), 'File "page.md", line 6, in <module>'),
        (("python", "import sys\nsys.exit()"), "SystemExit"),
        (("python", "import os\nos._exit(3)"), "Python ended"),
        (("python", "print('seen')\nraise OSError"), "seen"),
    ],
)
def test_a_failure_has_its_line_and_output(
    parts: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BlockFailed) as failed:
        run(tmp_path, *parts)
    assert message in str(failed.value)
    assert not (tmp_path / "page" / "no").exists()


@pytest.mark.parametrize("parts", [("sh", "sleep 60"), ("python", "import time; time.sleep(60)")])
def test_a_block_has_a_limit(
    parts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_runner, "BLOCK_S", 0.5)
    with pytest.raises(BlockFailed, match="still running after"):
        run(tmp_path, *parts)


def test_nothing_is_left_running(tmp_path: Path) -> None:
    begun = time.monotonic()
    here = run(tmp_path, "sh", "sleep 61.5 & echo $! > pid", "python", "x = 1")
    assert time.monotonic() - begun < 9
    pid = int((here / "pid").read_text())
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
