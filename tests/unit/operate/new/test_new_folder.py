"""`headrace new`: the folder works as it is, and nothing that exists is overwritten."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from headrace.services.operate import cli

ROOT = Path(__file__).parents[4]
TEMPLATE = ROOT / "headrace" / "template"
OWN = {"my_agent.py", "my_environment.py", "recipe.toml", "tasks.jsonl", "test_my_environment.py"}


def made(folder: Path, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert cli._run(["new", str(folder)]) == code
    shown = capsys.readouterr()
    return shown.out + shown.err


def test_the_folder_has_every_file_and_the_next_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = made(tmp_path / "deep" / "my folder", capsys)
    assert f"cd '{tmp_path}/deep/my folder'\n" in shown
    assert "headrace run recipe.toml" in shown
    assert {path.name for path in (tmp_path / "deep" / "my folder").iterdir()} == OWN


def test_every_part_of_the_recipe_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "cd " not in made(Path("."), capsys)
    assert cli._run(["check", "recipe.toml"]) == 0
    assert cli._run(["try", "recipe.toml", "--by", "random"]) == 0
    assert "the episode ended: finished" in capsys.readouterr().out


def test_hidden_files_do_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".git").mkdir()
    made(tmp_path, capsys)
    assert {path.name for path in tmp_path.iterdir()} == OWN | {".git"}


def test_a_folder_with_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "dcba":
        (tmp_path / name).write_text("mine")
    shown = made(tmp_path, capsys, code=2)
    assert "is not empty: it holds a, b, c, …. Nothing was written. Give the name of a" in shown
    assert {path.name for path in tmp_path.iterdir()} == set("abcd")


def test_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert "is a file. Give the name of a new folder" in made(tmp_path / "file", capsys, code=2)
    assert "can't write into the folder" in made(tmp_path / "file" / "in", capsys, code=2)


def test_the_files_import_only_the_facade() -> None:
    imported = set()
    for path in TEMPLATE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module))
    assert imported == {"__future__", "headrace", "pytest"}


def test_the_wheel_takes_the_files_from_the_package() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    # hatchling ships every file in these folders that git does not ignore.
    assert pyproject["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["headrace"]}
    assert {path.name for path in TEMPLATE.iterdir() if path.is_file()} == OWN
