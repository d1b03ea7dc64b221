"""The base of all tables of a recipe: unknown keys are refused, and errors name the keys."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from headrace.errors import UsageError
from headrace.schemas.recipe.secret_references import Options

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
PositiveSeconds = Annotated[float, Field(gt=0)]
FALSE_IS_NONE = BeforeValidator(lambda value: None if value is False else value)
"""TOML has no null: `false` in a recipe means that a table or a value is absent."""


class RecipeError(UsageError, ValueError):
    """A recipe can't be used. The message names each wrong key and what it must be."""


class Settings(BaseModel):
    """A table of a recipe. It refuses unknown keys, and NaN and infinity, which JSON can't hold."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _check_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    if not isinstance(choice.get("use"), str):
        raise ValueError('a table must name what it chooses, as { use = "NAME", … }')
    return choice if len(choice) > 1 else str(choice["use"])


Choice = Annotated[str | dict[str, Any], AfterValidator(_check_choice)]
"""A plug-in by its name, or `{ use = "NAME", OPTION = … }`. The plug-in itself checks its options,
when it is loaded."""


def use_and_options(choice: str | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns what a `Choice` names, and its options."""
    if isinstance(choice, str):
        return choice, {}
    options = dict(choice)
    return options.pop("use"), options


class PlugIn(Settings):
    """A plug-in: a built-in by its name, or one of your own by `package.module:name`."""

    use: str
    """A built-in, or an import path."""
    options: Options = {}
    """Keyword arguments that are given to the plug-in. `{ env = "NAME" }` and `{ file = "/path" }`
    are secrets, which the worker reads."""
