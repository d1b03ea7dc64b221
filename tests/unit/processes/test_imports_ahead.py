"""Which imports of a program are done ahead."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.services.processes.imports_ahead import imports_ahead


def found(folder: Path, program: str, **modules: str) -> list[str]:
    """The names of the modules that are imported ahead, with what is imported from them."""
    for name, text in modules.items():
        path = folder / f"{name.replace('__in__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (folder / "program.py").write_text(program)
    return shown(folder / "program.py")


def shown(target: Path | str, *, is_module: bool = False) -> list[str]:
    return [
        " ".join((name, *names)) for name, names in imports_ahead(str(target), is_module=is_module)
    ]


@pytest.fixture(autouse=True)
def own_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import json, email.message as m", ["json", "email.message"]),
        ("from json import loads, dumps as d", ["json loads dumps"]),
        ("from __future__ import annotations\nimport json", ["json"]),
        ("'''Text.'''\nA = [1]\nB: int = 2\nlog = f()\nimport json", ["json"]),
        ("import no_such_package_at_all\nimport json", ["json"]),
        ("def f():\n    import json\nclass C:\n    import json", []),
        ("try:\n    import json\nexcept ImportError:\n    import csv", ["json"]),
        ("if True:\n    import json\nelse:\n    import csv", ["json", "csv"]),
        ("import typing\nif typing.TYPE_CHECKING:\n    import json", ["typing"]),
        ("with a():\n    import json", ["json"]),
        ("from .. import beyond\nimport json", ["json"]),
        ("import json\nthis is no Python", []),
    ],
)
def test_imports_at_the_top_are_found(tmp_path: Path, program: str, expected: list[str]) -> None:
    assert found(tmp_path, program) == expected


@pytest.mark.parametrize(
    "statement",
    [
        "os.environ['A'] = 'b'",
        "load_dotenv()",
        "a.b: int = 1",
        "sys.path += ['x']",
        "del os.environ['A']",
        "for a in b:\n    a()",
        "if a:\n    patch_all()",
        "try:\n    patch_all()\nexcept ImportError:\n    pass",
        "import own_module_that_acts",
    ],
)
def test_nothing_is_imported_after_what_may_change_an_import(
    tmp_path: Path, statement: str
) -> None:
    program = f"import json\n{statement}\nimport csv"
    own = {"own_module_that_acts": "import email\nload_dotenv()\nimport zipfile"}
    assert [name for name in found(tmp_path, program, **own) if name != "email"] == ["json"]


def test_own_modules_are_read_and_not_imported(tmp_path: Path) -> None:
    program = "import tools.search\nfrom tools import add as a\nimport csv"
    modules = {
        "tools__in____init__": "import json",
        "tools__in__search": "from . import add\nfrom .deep import x\nimport email",
        "tools__in__add": "import zipfile\nimport tools.search",
        "tools__in__deep": "import wave",
    }
    assert found(tmp_path, program, **modules) == ["json", "zipfile", "wave", "email", "csv"]
    assert "tools" not in sys.modules


def test_a_module_is_read_with_its_parents(tmp_path: Path) -> None:
    found(
        tmp_path, "", **{"package__in____init__": "import json", "package__in__run": "import csv"}
    )
    (tmp_path / "package" / "__main__.py").write_text("from . import run")
    assert shown("package.run", is_module=True) == ["json", "csv"]
    assert shown("package", is_module=True) == ["json", "csv"]
    assert shown("no_such_package.run", is_module=True) == []


def test_an_installed_program_s_own_imports_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages"
    (installed / "server").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(installed), *sys.path])
    (installed / "server" / "__init__.py").write_text("import json")
    (installed / "server" / "__main__.py").write_text("from .deep import serve")
    (installed / "server" / "deep.py").write_text("import csv")
    assert shown("server", is_module=True) == ["json", "server.deep serve"]
