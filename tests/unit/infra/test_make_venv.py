"""Which Python `make` takes, and when what it installs counts as installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.infra import make_venv
from headrace.infra.make_venv import Interpreter, choose, on_path, probe

NEEDED = ("CPython", "venv", "ensurepip")
ALL = (*NEEDED, "ssl", "headers")
ROOT = Path(__file__).parents[3]


def python(path: str = "first", **fields: object) -> Interpreter:
    described = {
        "path": path, "version": (3, 11, 7), "has": ALL, "seconds": 0.02,
    }  # fmt: skip
    return Interpreter(**described | fields)  # type: ignore[arg-type]


def install(folder: Path, name: str, **fields: object) -> Path:
    """A program that describes itself as a Python would, and notes how it was called otherwise."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    described = json.dumps(python(str(path), **fields)._asdict())
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then echo \'{described}\'; else echo "$@" > {path}.ran; fi'
    )
    path.chmod(0o755)
    return path


def make(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["make_venv.py", *arguments])
    return make_venv.main()


def test_the_first_python_is_taken_unless_another_is_clearly_faster() -> None:
    first = python()
    assert choose([first, python("other", seconds=0.018)]) is first
    other = python("other", seconds=0.01)
    assert choose([first, other]) is other


@pytest.mark.parametrize(
    "lack",
    [
        {"version": (3, 10, 2)},
        {"version": (3, 14, 0)},
        {"has": ("CPython", "venv", "ssl", "headers")},
        {"has": ("PyPy", "venv", "ensurepip", "ssl", "headers")},
    ],
)
def test_a_python_on_which_headrace_cannot_run_is_passed_over(lack: dict[str, object]) -> None:
    usable = python()
    assert choose([python("bad", seconds=0.001, **lack), usable]) is usable
    assert choose([python("bad", **lack)]) is None


@pytest.mark.parametrize("has", [(*NEEDED, "ssl"), (*NEEDED, "headers")])
def test_a_faster_python_must_have_all_that_the_first_one_has(has: tuple[str, ...]) -> None:
    bare = python("bare", has=has, seconds=0.01)
    first = python()
    assert choose([first, bare]) is first
    first = python(has=NEEDED)
    assert choose([first, bare]) is bare


def test_this_python_describes_itself() -> None:
    this = probe(sys.executable)
    assert this is not None
    assert tuple(this.version) == sys.version_info[:3]
    assert this.is_usable
    assert 0 < this.seconds < make_venv.PROBE_S


def test_what_is_no_python_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "python3.12").write_text("#!/bin/sh\nexit 127\n")
    (tmp_path / "python3.12").chmod(0o755)
    (tmp_path / "python3.13").write_text("not executable")
    (tmp_path / "python3").symlink_to(sys.executable)
    assert [one.path for one in on_path([str(tmp_path)])] == [str(tmp_path / "python3")]


def test_the_fastest_python_of_the_path_makes_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = install(tmp_path / "a", "python3")
    fast = install(tmp_path / "b", "python3.12", version=(3, 12, 1), seconds=0.01)
    monkeypatch.setenv("PATH", f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    folder = str(tmp_path / "folder")
    assert make(monkeypatch, folder) == 0
    assert Path(f"{fast}.ran").read_text().split() == ["-m", "venv", folder]
    said = capsys.readouterr().out
    assert f"using {fast} (3.12.1), which is 2.0 times as fast as {slow} (3.11.7)" in said
    assert make(monkeypatch, folder, str(slow)) == 0  # a named one is taken
    assert Path(f"{slow}.ran").exists()
    assert capsys.readouterr().out == ""


def test_without_a_usable_python_the_error_says_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = install(tmp_path / "a", "python3", version=(3, 9, 2), has=("CPython", "venv"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'a'}:{tmp_path / 'none'}")
    folder = str(tmp_path / "folder")
    assert make(monkeypatch, folder) == 1
    assert f"found: {old} (3.9.2, without ensurepip). Install" in capsys.readouterr().err
    assert make(monkeypatch, folder, "/no/python") == 1
    assert "/no/python is no such Python; found: none" in capsys.readouterr().err


def test_an_installation_is_prepared_again_after_a_preparation_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MAKEFLAGS", raising=False)  # of the `make` that runs this test
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name in ("Makefile", "uv.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("python", "uv", "headrace"):
        program = binaries / name
        program.write_text('#!/bin/sh\ncase "$*" in *archives) test -e prepares;; esac\n')
        program.chmod(0o755)

    for _ in range(2):
        assert subprocess.run(["make", "install"], cwd=tmp_path, check=False).returncode != 0
    (tmp_path / "prepares").touch()
    assert subprocess.run(["make", "install"], cwd=tmp_path, check=False).returncode == 0

    (tmp_path / "prepares").unlink()
    assert subprocess.run(["make", "install"], cwd=tmp_path, check=False).returncode == 0
