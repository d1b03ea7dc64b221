"""The import law, the limits of the tree, and a light `--help`. It lists folders, never modules.

`docs/architecture.md` explains the order of the folders to people; a test keeps the two equal.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

ORDER = (
    "errors",
    "schemas",
    "services.base",
    "infra",
    "services.kafka",
    "services.models",
    "services.log",
    "services.processes",
    "services.namespace",
    "services.worker",
    "services.tasks",
    (
        "services.scheduler",
        "services.agent",
        "services.env",
        "services.inference",
        "stream_jobs",
        "trainer",
    ),
    "services.operate",
    "conformance",
    "trajectories",
    "async_client",
    "loop_thread",
    "client",
    "trainer_client",
    "",
)
"""Below `headrace`, lowest first: each imports only what stands before it. Services that stand side
by side share topics and never import each other. The last is the façade, `headrace` itself."""

SOLE_IMPORTERS = {
    "aiokafka": ("services.kafka", "stream_jobs"),
    "confluent_kafka": ("services.kafka",),
    "docker": ("services.processes.docker",),
    "faust": ("stream_jobs",),
    "kubernetes": ("services.processes.kubernetes",),
    "marshal": (),
    "inspect_ai": ("services.operate.trajectories",),
    "matplotlib": ("services.operate.compare", "services.operate.plot"),
    "mcp": ("services.env.mcp",),
    "mlflow": ("services.operate.track",),
    "mode": ("stream_jobs",),
    "opentelemetry": ("services.operate.trajectories",),
    "pickle": (),
    "pyarrow": ("services.operate.trajectories",),
    "reasoning_gym": ("services.env.libraries",),
    "tensorboard": ("services.operate.track",),
    "textarena": ("services.env.libraries",),
    "torch": ("services.inference.engines", "services.models", "trainer"),
    "transformers": ("services.inference.engines", "services.models", "trainer"),
    "wandb": ("services.operate.track",),
    "vllm": ("services.inference.engines",),
    "xgrammar": ("services.models",),
    "yaml": (),
}
"""The folders that may import a package."""

ROLES = frozenset({"__init__", "__main__", "command", "service", "shard"})
"""Names of modules that say which role a module has in its folder. All other names are unique."""
MAX_FILES = 15
MAX_LINES = 350
MAX_FUNCTION_LINES = 50
"""A function from its `def` to its end. Its docstring does not count, and neither do decorators,
since a command of click has one for each option."""
CONTRACT = "schemas/events.py"
"""All events in the order of the flow: the one file that may be longer."""
MAX_SERVICES = 13
"""Folders in `services/`, and no loose file."""

HEAVY = ("confluent_kafka", "fastavro", "numpy", "pydantic", "rich", "torch", "transformers")


class Import(NamedTuple):
    """One import, anywhere in a file: in functions, under `TYPE_CHECKING`, and as a string."""

    importer: str
    imported: str
    location: str

    def __str__(self) -> str:
        return f"{self.location} imports {self.imported}"


def product_files() -> dict[str, Path]:
    """Module name to its file, relative to the root, for all modules of the product."""
    found = {}
    for folder in sorted((ROOT / "headrace").iterdir()):
        paths = [folder] if folder.suffix == ".py" else sorted(folder.resolve().rglob("*.py"))
        for path in paths:
            inside = path.relative_to(ROOT)
            parts = inside.with_suffix("").parts
            name = ".".join(parts if parts[0] == "headrace" else ("headrace", *parts))
            found[name.removesuffix(".__init__")] = inside
    return found


FILES = product_files()


def module_of(name: str) -> str:
    """The module that a dotted name leads to: `headrace.a.b.Class` is in `headrace.a.b`."""
    while name not in FILES and "." in name:
        name = name.rpartition(".")[0]
    return name


def read_imports(text: str, importer: str, location: str) -> Iterator[Import]:
    """All imports in a module's text. A string that names one of our modules counts as one."""
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{location}:{node.lineno}: import by full names"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and re.fullmatch(
            r"headrace(\.\w+)+(:\w+)?", str(node.value)
        ):
            names = [str(node.value).partition(":")[0]]
        for name in names:
            ours = name.partition(".")[0] == "headrace"
            found = module_of(name) if ours else name
            if found == "headrace" and isinstance(node, ast.Constant):
                continue  # A label or a header, for example `headrace.agent`.
            if found != importer:
                yield Import(importer, found, f"{location}:{getattr(node, 'lineno', 0)}")


@cache
def all_imports() -> list[Import]:
    return [
        each
        for name, path in FILES.items()
        for each in read_imports((ROOT / path).read_text(), name, str(path))
    ]


def within(module: str, *folders: str) -> bool:
    """Whether a module is one of these, or inside one."""
    return any(module == folder or module.startswith(f"{folder}.") for folder in folders)


def rank(module: str) -> tuple[int, str]:
    """A module's position in the order, and the folder that gives it."""
    for position, entry in enumerate(ORDER):
        for folder in (entry,) if isinstance(entry, str) else entry:
            if within(module, f"headrace.{folder}" if folder else "headrace"):
                return position, folder
    raise AssertionError(f"{module} has no position: give its folder one in ORDER")


def test_imports_point_one_way() -> None:
    wrong = []
    for each in all_imports():
        if each.imported in FILES:
            (above, own), (below, other) = rank(each.importer), rank(each.imported)
            if below > above or (below == above and own != other):
                wrong.append(str(each))
    assert not wrong, "\n".join(wrong)


def cycles(imported: dict[str, set[str]]) -> dict[str, list[str]]:
    """What imports itself by way of others. Takes out, again and again, what imports nothing."""
    left = dict(imported)
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    return {name: sorted(others & left.keys()) for name, others in left.items()}


def test_no_module_imports_itself_by_way_of_others() -> None:
    imported: dict[str, set[str]] = {name: set() for name in FILES}
    for each in all_imports():
        if each.imported in FILES:
            imported[each.importer].add(each.imported)
    assert not cycles(imported)


def test_no_command_imports_itself_by_way_of_others() -> None:
    """The folders of commands import each other in one direction."""
    imported: dict[str, set[str]] = {}
    for each in all_imports():
        importer, other = (command_of(one) for one in (each.importer, each.imported))
        if importer and other and importer != other:
            imported.setdefault(importer, set()).add(other)
            imported.setdefault(other, set())
    assert imported
    assert not cycles(imported)


def command_of(module: str) -> str | None:
    """The folder of the command that a module belongs to."""
    found = re.match(r"headrace\.services\.operate\.(\w+)\.", module)
    return found[1] if found else None


@pytest.mark.parametrize("package", SOLE_IMPORTERS)
def test_each_package_has_its_sole_importers(package: str) -> None:
    allowed = [f"headrace.{folder}" for folder in SOLE_IMPORTERS[package]]
    users = [each for each in all_imports() if within(each.imported, package)]
    wrong = [str(each) for each in users if not within(each.importer, *allowed)]
    assert not wrong, "\n".join(wrong)


def test_everything_is_imported_as_headrace() -> None:
    folders = {path.name for path in (ROOT / "headrace").iterdir() if path.is_symlink()}
    assert folders == {"infra", "schemas", "services", "stream_jobs", "trainer"}
    wrong = [str(each) for each in all_imports() if each.imported.partition(".")[0] in folders]
    assert not wrong, "\n".join(wrong)


def test_no_import_escapes() -> None:
    text = """
import torch.nn as nn
from headrace import errors
from headrace.services.kafka import broker as b, kafka_broker
ENTRY = "headrace.trainer.loop:run"
def late():
    from faust import App
if TYPE_CHECKING:
    import docker
"""
    found = [each.imported for each in read_imports(text, "headrace.x", "x")]
    assert sorted(found) == [
        "docker",
        "faust.App",
        "headrace.errors",
        "headrace.services.kafka.broker",
        "headrace.services.kafka.kafka_broker",
        "headrace.trainer.loop",
        "torch.nn",
    ]


def test_a_module_is_found_by_its_name() -> None:
    names = Counter(path.stem for path in FILES.values() if path.stem not in ROLES)
    assert [name for name, times in names.items() if times > 1] == []


def test_a_class_is_found_by_its_name() -> None:
    where: dict[str, list[str]] = {}
    for path in FILES.values():
        for node in ast.parse((ROOT / path).read_text()).body:
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(str(path))
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


def test_folders_and_files_stay_small() -> None:
    sizes = Counter(path.parent for path in FILES.values())
    assert {str(folder): n for folder, n in sizes.items() if n > MAX_FILES} == {}
    lengths = {str(path): (ROOT / path).read_text().count("\n") for path in FILES.values()}
    assert {p: n for p, n in lengths.items() if n > MAX_LINES and p != CONTRACT} == {}
    entries = {path.name for path in (ROOT / "services").iterdir()} - {"__pycache__"}
    assert "__init__.py" in entries
    assert len(entries - {"__init__.py"}) <= MAX_SERVICES
    assert not {name for name in entries if name.endswith(".py")} - {"__init__.py"}


def function_lines(text: str) -> dict[str, int]:
    """The lines of each function of a module, methods and nested ones included, by its position."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or 0) - node.lineno + 1
            first = node.body[0]
            if ast.get_docstring(node) is not None:
                lines -= (first.end_lineno or 0) - first.lineno + 1
            found[f"{node.lineno} {node.name}"] = lines
    return found


def test_functions_stay_small() -> None:
    long = [
        f"{path}:{name}: {lines} lines"
        for path in FILES.values()
        for name, lines in function_lines((ROOT / path).read_text()).items()
        if lines > MAX_FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


def test_decorators_and_docstrings_are_no_lines_of_a_function() -> None:
    text = """
@option("--a")
@option("--b")
def outer(
    a: int,
) -> int:
    '''Says.

    More.
    '''
    async def inner() -> int:
        return a
    return 1
"""
    assert function_lines(text) == {"4 outer": 6, "11 inner": 2}


def test_the_architecture_page_has_the_same_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page[page.index("<!-- folders -->") : page.index("<!-- end of folders -->")]
    described = re.findall(r"^\| `([\w./]+)`", table, re.MULTILINE)
    found = [name.removesuffix(".py").strip("/").replace("/", ".") for name in described]
    expected = [name for entry in ORDER for name in ((entry,) if isinstance(entry, str) else entry)]
    facade = {path.stem for path in (ROOT / "headrace").glob("*.py")}
    assert found == [
        f"headrace.{name}" if name in facade else name or "headrace" for name in expected
    ]


def test_help_is_light() -> None:
    script = f"""
import sys
sys.argv = ["headrace", "--help"]
from headrace.services.operate.cli import main
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


def test_the_invariants_are_checked_apart_from_the_code_that_keeps_them() -> None:
    """No service, worker or trainer is imported; jobs and sources only for names and plug-ins."""
    own = "headrace.services.operate.verify"
    services = ("agent", "env", "inference", "kafka", "models", "scheduler", "worker")
    banned = [f"headrace.services.{one}" for one in services] + ["headrace.trainer"]
    found = [each for each in all_imports() if within(each.importer, f"{own}.invariants")]
    assert found
    assert not [str(each) for each in found if within(each.imported, *banned)]
    ours = [each for each in found if within(each.imported, "headrace.services.operate")]
    assert not [str(each) for each in ours if not within(each.imported, f"{own}.invariants")]
