"""Plug-ins: built-ins by name, and the user's own objects by `package.module:name`.

Only the local recipe names them, never an event: what another team writes to a topic can't choose
which code runs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import UsageError


def load(kind: str, use: str, builtins: Mapping[str, Any]) -> Any:
    """Returns the built-in or the user's own object that `use` names.

    `kind` is what the recipe calls such an object; error messages contain it. `builtins` maps names
    to objects, or to import paths of objects whose modules are imported only if they are used.
    Raises UsageError if `use` names nothing, or if its module can't be imported.
    """
    target = builtins.get(use, use)
    if not isinstance(target, str):
        return target
    module_name, colon, attribute = target.partition(":")
    if not colon:
        names = ", ".join(sorted(builtins))
        raise UsageError(f"no {kind} {use!r}. Use {names}, or your own as package.module:name")
    if use not in builtins and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except UsageError:
        raise
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{kind} {use!r} needs the module {error.name!r}, which was not found. Install its "
            f"package, or start Headrace in the folder that contains it"
        ) from error
    except Exception as error:  # the module of a user may raise anything while it is imported
        raise UsageError(
            f"{kind} {use!r} can't be imported: {type(error).__name__}: {error}"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise UsageError(f"{kind} {use!r}: module {module_name} has no {attribute!r}") from None
