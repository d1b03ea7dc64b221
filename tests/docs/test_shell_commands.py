"""Which commands are found in shell text, and which are refused."""

from __future__ import annotations

import pytest

from headrace.services.namespace.cluster_config import RECIPES
from tests.docs.shell_commands import headrace_commands, problem_of


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("headrace run quickstart   # a comment", [["run", "quickstart"]]),
        ("ls -l; echo headrace run", []),
        ("cd a && .venv/bin/headrace status --json | tee out", [["status", "--json"]]),
        ("headrace up; headrace apply null", [["up"], ["apply", "null"]]),
        ("headrace recipe null > my.toml 2> log", [["recipe", "null"]]),
        ("A=1 B='x y' headrace end &", [["end"]]),
        ("headrace run x.toml \\\n    --set a.b=1", [["run", "x.toml", "--set", "a.b=1"]]),
        ("headrace run --check 'reward>=0.9'", [["run", "--check", "reward>=0.9"]]),
        ("headrace submit - <<'E'\nheadrace x\nE\nheadrace end", [["submit", "-"], ["end"]]),
        ("headrace submit - <<< '{\"a\":\n 1}'", [["submit", "-"]]),
        ("headrace show v:7 --set a={b=[1,2]}", [["show", "v:7", "--set", "a={b=[1,2]}"]]),
    ],
)  # fmt: skip
def test_the_commands_of_a_script(text: str, commands: list[list[str]]) -> None:
    assert headrace_commands(text) == commands


def test_a_quotation_without_an_end_is_an_error() -> None:
    with pytest.raises(ValueError, match="a quotation has no end"):
        headrace_commands("headrace run 'a\nb")


@pytest.mark.parametrize(
    "text",
    [
        "run quickstart --check reward>=0.5 --set stop.versions=10",
        "run my.toml --set whatever.key=1",
        "submit no-such-file.jsonl",
        "evaluate --weights no-such-folder",
        "dead-letters redrive 0",
        "--version",
        "run --help",
    ],
)
def test_a_right_command(text: str) -> None:
    assert problem_of(text.split()) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("runs quickstart", "No such command 'runs'"),
        ("run quickstart --fast", "No such option: --fast"),
        ("run --metrics-port many", "'many' is not a valid integer"),
        ("run --check reward", "reward"),
        ("submit", "Missing argument"),
        ("dead-letters look", "No such command 'look'"),
        ("run frozen-lake", "no recipe 'frozen-lake'"),
        ("run quickstart --set stop.version=1", "stop.version"),
    ],
)
def test_a_wrong_command(text: str, problem: str) -> None:
    found = problem_of(text.split())
    assert found is not None
    assert problem in found


def test_each_shipped_recipe_can_be_named() -> None:
    assert [problem_of(["check", path.stem]) for path in RECIPES.glob("*.toml")].count(None) > 4
