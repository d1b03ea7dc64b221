"""Loads plug-ins: built-ins by name, and the user's own by `package.module:name`.

The names come from the local recipe, never from an event, so that another team can't choose by an
event what code runs here.
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

    `builtins` maps names to `module:attribute`. `kind` is the recipe's word for the plug-in, for
    error messages. Raises UsageError if `use` is not a built-in, or the module can't be imported
    or lacks the attribute.
    """
    target = builtins.get(use, use)
    module_name, colon, attribute = target.partition(":")
    if not colon:
        names = ", ".join(sorted(builtins))
        raise UsageError(
            f"there is no {kind} {use!r}. Use {names}, or your own as package.module:name"
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{kind} {use!r}: there is no module {error.name!r} in the current folder or among "
            f"the installed packages"
        ) from error
    except Exception as error:  # The user's module may raise anything when it is imported.
        raise UsageError(
            f"{kind} {use!r}: module {module_name} can't be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise UsageError(f"{kind} {use!r}: module {module_name} has no {attribute!r}") from None
