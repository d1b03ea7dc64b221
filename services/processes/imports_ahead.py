"""Finds the packages that a Python program imports before it does anything else.

Only installed packages and the standard library count. The program's own modules are read, and
what they import counts, too, but they are never imported here: they belong to the attempt. The
search ends at the first statement that may change what a later import sees, such as
`os.environ["HF_HOME"] = …` or `load_dotenv()`.

The fork server runs this with the program's interpreter, so it needs only a standard library of
Python 3.9 or newer.
"""

from __future__ import annotations

import ast
import os
import sysconfig
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import resolve_name

Names = tuple[str, ...]
Found = tuple[str, Names]
"""The full name of a module, and the names that are imported from it."""
HARMLESS = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass),
    *(ast.If, ast.Try, ast.With, ast.Import, ast.ImportFrom),
)
"""Statements that don't end the search. It goes on in the parts of blocks."""


def imports_ahead(target: str, *, is_module: bool) -> Iterator[Found]:
    """Yields what a program imports, in its order. `target` is its path, or the name for `-m`.

    `sys.path` must be that of the program. Nothing is imported.
    """
    seen: set[str] = set()
    if not is_module:
        yield from _of_file(target, "", seen)
        return
    spec = _find(target)
    if spec is not None and spec.submodule_search_locations is not None:
        target += ".__main__"
    yield from _of_modules(target, (), seen, own=True)


def _of_file(path: str, package: str, seen: set[str]) -> Generator[Found, None, bool]:
    """Yields what a file imports. Returns whether the search goes on after it."""
    seen.add(path)
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):  # the program itself will report it
        return False
    return (yield from _of_statements(tree.body, package, seen))


def _of_statements(
    statements: Iterable[ast.stmt], package: str, seen: set[str]
) -> Generator[Found, None, bool]:
    for statement in statements:
        if _may_change_imports(statement):
            return False
        if not (yield from _of_statements(_parts(statement), package, seen)):
            return False
        for name, names in _imported_by(statement, package):
            if not (yield from _of_modules(name, names, seen)):
                return False
    return True


def _imported_by(statement: ast.stmt, package: str) -> list[Found]:
    if isinstance(statement, ast.Import):
        return [(alias.name, ()) for alias in statement.names]
    if not isinstance(statement, ast.ImportFrom) or statement.module == "__future__":
        return []
    name = "." * statement.level + (statement.module or "")
    with suppress(ImportError):  # the program itself will report it
        return [(resolve_name(name, package), tuple(alias.name for alias in statement.names))]
    return []


def _parts(statement: ast.stmt) -> list[ast.stmt]:
    """Returns the statements in a block that are executed if nothing fails."""
    if isinstance(statement, ast.Try):
        return [*statement.body, *statement.orelse, *statement.finalbody]
    if isinstance(statement, ast.With):
        return statement.body
    if isinstance(statement, ast.If) and "TYPE_CHECKING" not in ast.dump(statement.test):
        return [*statement.body, *statement.orelse]
    return []


def _may_change_imports(statement: ast.stmt) -> bool:
    """Whether a statement is more than a definition, a constant or an assignment to a name."""
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        parts = (part for target in targets for part in ast.walk(target))
        return any(isinstance(part, (ast.Attribute, ast.Subscript)) for part in parts)
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)
    return not isinstance(statement, HARMLESS)


def _of_modules(
    name: str, names: Names, seen: set[str], *, own: bool = False
) -> Generator[Found, None, bool]:
    """Yields a module that is imported, or what it imports if it is the program's own.

    `own` says that it is the program itself, even if it is installed.
    """
    root = _find(name.partition(".")[0])
    if root is None:
        return True
    if _is_installed(root) and not own:
        yield name, names
        return True
    parts = name.split(".")
    parents = [".".join(parts[:end]) for end in range(1, len(parts))]
    for module in (*parents, name, *(f"{name}.{one}" for one in names)):
        spec = _find(module)
        path = spec.origin if spec is not None else None
        if spec is None or path is None or path in seen or not path.endswith(".py"):
            continue
        is_package = spec.submodule_search_locations is not None
        package = module if is_package else module.rpartition(".")[0]
        if not (yield from _of_file(path, package, seen)):
            return False
    return True


def _find(name: str) -> ModuleSpec | None:
    """Finds a module without an import of its parents."""
    path = None
    spec: ModuleSpec | None = None
    for end, letter in enumerate(f"{name}."):
        if letter == ".":
            spec = PathFinder.find_spec(name[:end], path)
            if spec is None:
                return None
            path = spec.submodule_search_locations
            if path is None and end < len(name):
                return None
    return spec


def _is_installed(spec: ModuleSpec) -> bool:
    location = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
    parts = location.split(os.sep)
    library = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    return (
        "site-packages" in parts
        or "dist-packages" in parts
        or any(location.startswith(folder + os.sep) for folder in library)
    )
