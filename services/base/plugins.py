"""Plug-ins: built-ins by name, and the user's own objects by `package.module:name`.

Only the local recipe names them, never an event: what another team writes to a topic can't choose
which code runs.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from headrace.errors import UsageError
from headrace.schemas.problems import problems_of
from headrace.schemas.recipe.tables import Choice, use_and_options

Model = TypeVar("Model", bound=BaseModel)


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


def load_with_options(kind: str, choice: Choice, builtins: Mapping[str, Any]) -> Any:
    """Returns the plug-in of a `Choice`: a function, or an instance of a class with its options.

    Such a class is a pydantic model, whose fields are the options. Raises UsageError as `load`, and
    for options that are wrong or that a function can't have.
    """
    use, options = use_and_options(choice)
    found = load(kind, use, builtins)
    if inspect.isclass(found) and issubclass(found, BaseModel):
        return with_options(kind, use, found, options)
    if options:
        raise UsageError(
            f"{kind} {use!r} has no options, but the recipe gives it {', '.join(options)}. Remove "
            "them, or make it a class whose fields are its options"
        )
    return found


def with_options(kind: str, use: str, model: type[Model], options: Mapping[str, Any]) -> Model:
    """Returns an instance with these options. Raises UsageError, which names each wrong option."""
    try:
        return model.model_validate(options)
    except ValidationError as error:
        problems = "; ".join(problems_of(error, use))
        names = ", ".join(model.model_fields) or "none"
        raise UsageError(f"{kind} {use!r}: {problems}. Its options are {names}") from error
