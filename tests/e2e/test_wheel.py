"""The built wheel in an empty environment: it brings one package, and nothing shadows its parts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
EXTRAS = "local,stream,gym,torch"
"""What a recipe with an environment and an agent in Python needs on one machine."""
SHADOWS = ("services", "schemas", "stream_jobs", "trainer", "infra", "tests")


def done(*command: str | Path, cwd: Path) -> str:
    """Runs a command without this project's environment, and returns what it printed."""
    unwanted = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: text for name, text in os.environ.items() if name not in unwanted}
    ended = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.long
def test_the_wheel_trains_in_a_folder_whose_names_are_those_of_its_parts(tmp_path: Path) -> None:
    done(UV, "build", "--quiet", "--wheel", "--out-dir", tmp_path, cwd=ROOT)
    (wheel,) = tmp_path.glob("headrace-*.whl")
    environment = tmp_path / "environment"
    done(UV, "venv", "--quiet", "--python", sys.executable, environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    list_there = (UV, "pip", "list", "--python", python, "--format", "freeze")
    assert done(*list_there, cwd=tmp_path) == ""
    done(
        UV, "pip", "install", "--quiet", "--python", python,
        f"headrace[{EXTRAS}] @ {wheel.as_uri()}", cwd=tmp_path,
    )  # fmt: skip

    (packages,) = (environment / "lib").glob("python*/site-packages")
    (record,) = packages.glob("headrace-*.dist-info/RECORD")
    files = [line.split(",")[0] for line in record.read_text().splitlines()]
    tops = {name.split("/")[0] for name in files if not name.startswith("../")}
    assert tops == {"headrace", record.parent.name}
    assert {name for name in SHADOWS if (packages / name).exists()} == set()

    folder = tmp_path / "trainer"
    headrace = environment / "bin" / "headrace"
    done(headrace, "new", folder, cwd=tmp_path)
    for name in SHADOWS:
        (folder / f"{name}.py").write_text("raise SystemExit(f'{__file__} was imported')\n")
    plugins = [path.read_text() for path in folder.glob("my_*.py")]
    assert all("from headrace import " in text for text in plugins)
    assert not any("headrace." in text for text in plugins)
    done(
        headrace, "run", "recipe.toml", "--set", "stop.versions=3", "--check", "versions>=3",
        "--state", tmp_path / "state", cwd=folder,
    )  # fmt: skip
