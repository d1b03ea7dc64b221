"""Imports point one way, each heavy dependency has its own few importers, and `--help` is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("schemas", "services", "stream_jobs", "trainer", "infra")

BASE = ("services.errors", "services.clock")
"""Below all else of `services`: they know only `schemas`."""
WORKERS = (
    "services.agent",
    "services.env",
    "services.inference",
    "services.scheduler",
    "services.source",
    "stream_jobs",
    "trainer",
)
"""They share topics, and never import each other."""
OPERATING = (
    "services.apply",
    "services.cli",
    "services.commands",
    "services.connect",
    "services.dead_letters",
    "services.namespaces",
    "services.prune",
    "services.replay",
    "services.run",
    "services.serve",
    "services.show",
    "services.tailing",
)
"""What puts the parts together, starts them and looks at them. Nothing below knows of it."""

TORCH = (
    "services.json_schema",
    "services.inference.torch_*",
    "services.inference.vllm_engine",
    "services.inference.vllm_masks",
    "services.lora",
    "trainer",
)

SOLE_IMPORTERS = {
    "aiokafka": ("stream_jobs.assemble_groups",),
    "confluent_kafka": ("services.kafka",),
    "aiohttp": (
        "services.env.http",
        "services.agent.gateway.server",
    ),
    "docker": ("services.docker",),
    "faust": ("stream_jobs.assemble_groups",),
    "infra": OPERATING,
    "marshal": (),
    "mcp": ("services.env.mcp",),
    "mode": ("stream_jobs.assemble_groups",),
    "pickle": (),
    "services.kafka.client": ("services.connect",),
    "reasoning_gym": ("services.env.libraries.reasoning_gym",),
    "requests": ("services.docker",),
    "textarena": ("services.env.libraries.textarena",),
    "torch": TORCH,
    "transformers": TORCH,
    "urllib3": ("services.docker",),
    "vllm": ("services.inference.vllm_engine", "services.inference.vllm_masks"),
    "xgrammar": ("services.json_schema",),
    "yaml": (),
}
"""Who may import what, beside the package itself. `*` ends a prefix."""

HEAVY = (
    "confluent_kafka",
    "docker",
    "fastavro",
    "numpy",
    "pydantic",
    "rich",
    "torch",
    "transformers",
)


class Import(NamedTuple):
    """One import, wherever in a file: in functions and under `TYPE_CHECKING` too."""

    importer: str
    imported: str
    where: str

    def __str__(self) -> str:
        return f"{self.where} imports {self.imported}"


def read_imports(text: str, importer: str, where: str, *, package: bool) -> Iterator[Import]:
    """All imports in a module's text. `from package import module` counts as the module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = importer.split(".")
            above = parents[: len(parents) - node.level + package] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            names = [source if is_module(source) else f"{source}.{a.name}" for a in node.names]
        else:
            continue
        for name in dict.fromkeys(names):
            yield Import(importer, name, f"{where}:{node.lineno}")


def is_module(name: str) -> bool:
    """Whether a name is a module of ours, or none of our packages: then its parts don't matter."""
    path = ROOT.joinpath(*name.split("."))
    return name.split(".")[0] not in PACKAGES or path.with_suffix(".py").exists()


def all_imports() -> list[Import]:
    found: list[Import] = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            inside = path.relative_to(ROOT)
            name = ".".join(inside.with_suffix("").parts).removesuffix(".__init__")
            is_package = path.name == "__init__.py"
            found += read_imports(path.read_text(), name, str(inside), package=is_package)
    return found


IMPORTS = all_imports()


def within(module: str, *places: str) -> bool:
    """Whether a module is one of these, or inside one. `*` ends a prefix."""
    return any(
        module.startswith(place[:-1])
        if place.endswith("*")
        else module == place or module.startswith(f"{place}.")
        for place in places
    )


def layer(module: str) -> int:
    """How far up a module of ours stands: it may import what stands below."""
    if within(module, "schemas"):
        return 0
    if within(module, *BASE):
        return 1
    if within(module, "services.kafka"):
        return 2
    if within(module, *OPERATING):
        return 5
    if within(module, *WORKERS):
        return 4
    if within(module, "services.docker"):
        return 2
    parts = module.split(".")
    shared = parts[0] == "services" and len(parts) <= 2 and not (ROOT.joinpath(*parts)).is_dir()
    assert shared or module == "services", f"{module} has no place: give it one in this test"
    return 3


def is_ours(module: str) -> bool:
    return within(module, *PACKAGES) and not within(module, "infra")


def test_imports_point_one_way() -> None:
    between = [each for each in IMPORTS if is_ours(each.importer) and is_ours(each.imported)]
    wrong = [each for each in between if layer(each.imported) > layer(each.importer)]
    assert not wrong, "\n".join(map(str, wrong))
    assert {layer(each.importer) for each in between} == set(range(6))


def test_schemas_stand_alone() -> None:
    wrong = [
        each
        for each in IMPORTS
        if within(each.importer, "schemas")
        and within(each.imported, *PACKAGES)
        and not within(each.imported, "schemas")
    ]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("worker", WORKERS)
def test_workers_never_import_each_other(worker: str) -> None:
    others = [other for other in WORKERS if other != worker]
    own = [each for each in IMPORTS if within(each.importer, worker)]
    wrong = [each for each in own if within(each.imported, *others)]
    assert own
    assert not wrong, "\n".join(map(str, wrong))


def test_the_local_stack_knows_only_the_errors() -> None:
    wrong = [
        each
        for each in IMPORTS
        if within(each.importer, "infra")
        and within(each.imported, *PACKAGES)
        and not within(each.imported, "infra", "services.errors")
    ]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("imported", SOLE_IMPORTERS)
def test_each_has_its_sole_importers(imported: str) -> None:
    wrong = [
        each
        for each in IMPORTS
        if within(each.imported, imported)
        and not within(each.importer, imported, *SOLE_IMPORTERS[imported])
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_no_import_escapes() -> None:
    text = """
import torch.nn as nn
from services import clock
from services.kafka import broker as b, client
def late():
    from faust import App
    from .. import errors
    from .codec import encode
if TYPE_CHECKING:
    import docker
"""
    found = [each.imported for each in read_imports(text, "services.kafka.x", "x", package=False)]
    assert sorted(found) == [
        "docker",
        "faust",
        "services.clock",
        "services.errors",
        "services.kafka.broker",
        "services.kafka.client",
        "services.kafka.codec.encode",
        "torch.nn",
    ]
    (inside,) = read_imports("from . import log", "services", "x", package=True)
    assert inside.imported == "services.log"


def test_help_is_light() -> None:
    script = f"""
import sys
sys.argv = ["headrace", "--help"]
from services.cli import main
try:
    main()
finally:
    print("loaded:", *sorted(set({HEAVY!r}) & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: headrace" in done.stdout
    assert done.stdout.splitlines()[-1] == "loaded:"
