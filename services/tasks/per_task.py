"""What one task may set for itself: the same keys in data sets, in `headrace submit` and clients.

What a task leaves out comes from the recipe. A flag of `headrace submit` overrides the task's key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from headrace.errors import UsageError
from headrace.schemas.events import Blob, EnvironmentUse, TaskSubmitted
from headrace.schemas.problems import problems_of
from headrace.schemas.untrusted.artifact_names import check_patterns
from headrace.services.tasks.artifact_store import Content

Count = Annotated[int, Field(gt=0, lt=2**31)]
StoreFiles = Callable[[Mapping[str, Content | Blob]], tuple[Blob, ...]]
"""Stores the files of a task, by name, and returns what the task's event says of them. Blocks."""


class StoredFile(BaseModel):
    """A file that is in the blob store already, such as one that an episode gave out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of its bytes, in hex."""
    size: Annotated[int, Field(ge=0, lt=2**63)]
    """Size in bytes."""

    def blob(self) -> Blob:
        """Returns the reference to the file."""
        return Blob(sha256=bytes.fromhex(self.sha256), size=self.size)


class TaskSettings(BaseModel):
    """The keys of one task. What is None comes from the recipe."""

    model_config = ConfigDict(extra="forbid", strict=True)

    agent: str | None = None
    """Key of the recipe's `agents`."""
    options: dict[str, Any] | None = None
    """Options of the task for its agent. They override the recipe's options."""
    environment: str | Literal[False] | None = None
    """Key of the recipe's `environments`. False: the task has no environment."""
    mode: Literal["ephemeral", "persistent"] | None = None
    image: str | None = None
    """Container image. The options of the environment in the recipe must list it."""
    environment_options: dict[str, Any] | None = None
    """Options of the task for its environment. They override the recipe's options."""
    collect: Annotated[
        tuple[str, ...] | None,
        BeforeValidator(lambda one: tuple(one) if type(one) is list else one),
    ] = None
    """Which files of the environment are kept as artifacts at the end of each attempt."""
    artifacts: dict[str, str | StoredFile] | None = None
    """Files that go in with the task: name to a local path, or to a file of the blob store."""
    samples: Count | None = None
    minimum: Count | None = None
    max_turns: Count | None = None
    max_tokens: Count | None = None
    deadline_s: Count | None = None
    attempts: Count | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    tenant: Annotated[str, Field(min_length=1)] | None = None
    purpose: Literal["train", "evaluate"] | None = None
    labels: dict[str, str] | None = None
    """Labels of the task, in addition to those of the recipe."""

    def over(self, earlier: TaskSettings) -> dict[str, Any]:
        """Returns the keys of both, as JSON values. Those of `earlier` come first."""
        keys = earlier.model_dump(exclude_none=True)
        for name, value in self.model_dump(exclude_none=True).items():
            both = name in MERGED and isinstance(value, dict)
            keys[name] = {**keys.get(name, {}), **value} if both else value
        return keys


MERGED = frozenset({"labels", "artifacts", "options", "environment_options"})
"""Keys whose entries are merged, one by one."""
_PLAIN = (
    "agent",
    "samples",
    "minimum",
    "max_turns",
    "max_tokens",
    "deadline_s",
    "attempts",
    "priority",
    "tenant",
    "purpose",
)
"""Keys that are fields of the event, with the same meaning."""


def read_settings(keys: Mapping[str, Any], whose: str) -> TaskSettings:
    """Checks the keys of a task. Raises UsageError if one is unknown or wrong."""
    try:
        settings = TaskSettings.model_validate(dict(keys))
        check_patterns(settings.collect or ())
    except ValidationError as error:
        raise UsageError(f"{whose}: {problems_of(error)[0]}") from error
    except ValueError as error:
        raise UsageError(f"{whose}: {error}") from error
    return settings


def with_settings(
    task: TaskSubmitted,
    settings: TaskSettings,
    collect_of: Callable[[str], tuple[str, ...]],
) -> TaskSubmitted:
    """Returns a task of the recipe with its own settings, but without its files.

    `collect_of` returns what the recipe collects of an environment. Raises UsageError if a task
    without an environment sets something of it.
    """
    changes: dict[str, Any] = {
        name: value for name in _PLAIN if (value := getattr(settings, name)) is not None
    }
    if settings.options is not None:
        changes["options"] = _json(settings.options)
    if settings.labels is not None:
        changes["labels"] = {**task.labels, **settings.labels}
    if (environment := _environment(task.environment, settings, collect_of)) is not _SAME:
        changes["environment"] = environment
    return task.model_copy(update=changes)


_SAME = object()


def _environment(
    of_recipe: EnvironmentUse | None,
    settings: TaskSettings,
    collect_of: Callable[[str], tuple[str, ...]],
) -> object:
    """Returns the environment of a task: None if it has none, or _SAME if it is the recipe's."""
    changes: dict[str, Any] = {
        name: value
        for name in ("mode", "image", "collect")
        if (value := getattr(settings, name)) is not None
    }
    if settings.environment_options is not None:
        changes["options"] = _json(settings.environment_options)
    base: EnvironmentUse | None = of_recipe
    if settings.environment is False:
        base = None
    elif settings.environment is not None:
        mode = of_recipe.mode if of_recipe is not None else "ephemeral"
        use = settings.environment
        base = EnvironmentUse(use=use, mode=mode, collect=collect_of(use))
    elif not changes:
        return _SAME
    if base is None:
        if changes:
            raise UsageError(f"{sorted(changes)}: the task has no environment")
        return None
    return base.model_copy(update=changes)


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True)


def paths_below(
    artifacts: Mapping[str, str | StoredFile], folder: Path
) -> dict[str, Content | Blob]:
    """Returns what the key `artifacts` names. Relative paths are in `folder`."""
    return {
        name: folder / one if isinstance(one, str) else one.blob()
        for name, one in artifacts.items()
    }
