"""A mutant: one text of one module, replaced when the module is imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).parents[3]
SCHEDULES = ("barrier schedules",)
"""In place of faults: `barrier_schedules.py` runs, and not the whole simulation."""
FORGERIES = ("forgeries",)
"""In place of faults: `forgeries.py` runs."""


class StaleMutant(Exception):
    """The text that a mutant replaces is not in the code as it was: re-point the mutant."""


@dataclass(frozen=True)
class Mutant:
    """One sentence of the design, taken out of the code."""

    name: str
    sentence: str
    """What the code no longer does."""
    file: str
    old: str
    """Occurs exactly once in the file."""
    new: str
    caught_by: tuple[str, ...]
    """What a complaint must contain, one of them: the invariant that breaks, as `I3: `, or the
    product's own loud error. Else the mutant is broken in another way than it was meant to be."""
    faults: tuple[str, ...] = ("kill",)
    """What must strike for the sentence to matter, and which services: see `draw_only`."""

    @property
    def module(self) -> str:
        """Import path of the module that it changes."""
        name = self.file.removesuffix(".py").replace("/", ".")
        return name if name.startswith("tests.") else f"headrace.{name}"

    def source(self) -> str:
        """The module's text with the bug in it. StaleMutant where the old text is not there."""
        text = (ROOT / self.file).read_text()
        found = text.count(self.old)
        if found != 1:
            raise StaleMutant(
                f"mutant {self.name}: its old text occurs {found} times in {self.file}, not once: "
                f"point it to where the code now says: {self.sentence}"
            )
        return text.replace(self.old, self.new)

    def install(self) -> None:
        """Has this process import the bug. Nothing of the product may be imported before."""
        assert self.module not in sys.modules, f"{self.module} is imported already"
        sys.meta_path.insert(0, _Finder(self.module, str(ROOT / self.file), self.source()))


class _Finder(MetaPathFinder, Loader):
    """Loads one module from a text; all others as ever."""

    def __init__(self, module: str, path: str, source: str) -> None:
        self._module = module
        self._code: CodeType = compile(source, path, "exec")
        self._path = path

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, with this loader."""
        if name != self._module:
            return None
        return importlib.util.spec_from_file_location(name, self._path, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        """Runs the changed text."""
        exec(self._code, module.__dict__)
