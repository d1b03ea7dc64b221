"""Plug-ins: a built-in by its name, the user's own by `package.module:name` from the local recipe.

Never from an event: what another team writes to a topic can't choose code to run.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import UsageError


def load(kind: str, use: str, builtins: Mapping[str, str]) -> Any:
    """The object that `use` names.

    `builtins` maps names to `module:attribute`. `kind` is what the recipe calls it, for messages.
    UsageError says which names there are, or what is missing in the module.
    """
    target = builtins.get(use, use)
    module_name, colon, attribute = target.partition(":")
    if not colon:
        names = ", ".join(sorted(builtins))
        raise UsageError(f"no {kind} {use!r}: use {names}, or your own as package.module:name")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{kind} {use!r}: no module {error.name!r}; modules are looked for in the current "
            f"folder and among the installed packages"
        ) from error
    except Exception as error:  # whatever a module of the user's own raises as it is imported
        raise UsageError(
            f"{kind} {use!r}: module {module_name} can't be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise UsageError(f"{kind} {use!r}: module {module_name} has no {attribute!r}") from None
