"""Ceilings: what the host of a worker allows containers, whatever the recipe says.

Recipes come from those who train, and ceilings from those who run the hosts. The environment
variable HEADRACE_SANDBOX_CEILINGS names a TOML file with the keys of `Ceilings`. Without it nothing
is limited but by the recipe.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
)

from headrace.errors import UsageError
from headrace.schemas.problems import problems_of
from headrace.services.processes.docker.hardened import Limits, Positive

VARIABLE = "HEADRACE_SANDBOX_CEILINGS"
NUMBERS = ("memory_mb", "cpus", "pids", "disk_mb", "root_mb", "command_s", "lifetime_s")
"""The keys that limit an option of the same name."""
NO_NETWORK = "none"
CLOCKS_S = 60.0
"""Seconds by which the clocks of two hosts may differ."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_REPOSITORY = re.compile(r"([a-z0-9.:-]+/)?([a-z0-9._-]+/)*[a-z0-9._-]*")


def _pattern(text: str) -> str:
    if not text or not (_DIGEST.fullmatch(text) or _REPOSITORY.fullmatch(text)):
        raise ValueError(
            f"{text!r} is not a repository (`docker.io/library/python`), a beginning of one that "
            "ends with `/` (`registry.example.com/team/`), or a digest (`sha256:` and 64 hex "
            "digits)"
        )
    return text


class Ceilings(BaseModel):
    """The keys of the file. A key that is absent sets no ceiling, but without `networks` no sandbox
    has a network."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    memory_mb: Positive | None = None
    """Most memory of a container in MiB."""
    cpus: float | None = Field(default=None, gt=0)
    """Most CPUs of a container."""
    pids: Positive | None = None
    """Most processes and threads of a container."""
    disk_mb: Positive | None = None
    """Largest /workspace in MiB."""
    root_mb: Positive | None = None
    """Most MiB that a container may write to its root file system."""
    command_s: float | None = Field(default=None, gt=0)
    """Most seconds that the recipe may give one command of a sandbox."""
    lifetime_s: Positive | None = None
    """Most seconds that a container lives. So it also limits `tasks.deadline_s`, and the deadlines
    of tasks."""
    networks: tuple[str, ...] | None = ()
    """The networks that a sandbox may have, besides `none`."""
    runtimes: tuple[str, ...] | None = None
    """The engine's runtimes that containers may have, the engine's default included."""
    trusted_runtimes: tuple[str, ...] = ()
    """The engine's runtimes that isolate by themselves, or are known to apply its seccomp filter.
    Headrace does not check what they are."""
    images: tuple[Annotated[str, AfterValidator(_pattern)], ...] | None = None
    """Repositories, beginnings of repositories that end with `/`, and digests of images."""
    digests_only: bool = False
    """Whether the recipe must name each image by its digest."""
    require_user_namespaces: bool = False
    """Whether the engine must give containers user namespaces, in which root is not the host's."""
    _source: str = PrivateAttr("")

    def require(self, settings: Limits, whose: str) -> None:
        """Raises UsageError if settings of `whose` exceed a ceiling."""
        for key in NUMBERS:
            value, ceiling = getattr(settings, key, None), getattr(self, key)
            if value is not None and ceiling is not None and value > ceiling:
                raise self.refusal(whose, f"{key} = {value:.15g}", f"{key} = {ceiling:.15g}")
        network = getattr(settings, "network", NO_NETWORK)
        if self.networks is not None and network not in (NO_NETWORK, *self.networks):
            raise self.refusal(whose, f"network = {network!r}", _listed("networks", self.networks))

    def require_image(self, image: str, whose: str) -> None:
        """Raises UsageError if the recipe may not name an image like this."""
        by_digest = _digest(image)
        if self.digests_only and not by_digest:
            raise self.refusal(whose, f"image {image!r}", "digests_only = true", "Name its digest")
        if self.images is None or by_digest in self.images:
            return
        if _DIGEST.fullmatch(image) or not any(
            _covers(pattern, repository(image)) for pattern in self.images
        ):
            raise self.refusal(whose, f"image {image!r}", _listed("images", self.images))

    def require_found(self, image: str, names: Iterable[str], whose: str) -> None:
        """Raises UsageError if an image was found otherwise than by its repository.

        The engine also finds an image by the first digits of its id, which look like a repository.
        `names` are those that the image has.
        """
        if self.images is None or _digest(image) in self.images:
            return
        if repository(image) not in map(repository, names):
            raise self.refusal(whose, f"image id {image!r}", _listed("images", self.images))

    def require_runtime(self, runtime: str, whose: str) -> None:
        """Raises UsageError if containers may not have this runtime."""
        if self.runtimes is not None and runtime not in self.runtimes:
            raise self.refusal(whose, f"runtime {runtime!r}", _listed("runtimes", self.runtimes))

    def require_deadline(self, deadline_s: int, whose: str) -> None:
        """Raises UsageError if the recipe gives its episodes more time than a container has."""
        if self.lifetime_s is not None and deadline_s > self.lifetime_s:
            ceiling = f"lifetime_s = {self.lifetime_s}"
            raise self.refusal(whose, f"tasks.deadline_s = {deadline_s}", ceiling)

    def lifetime(self, wanted_s: int, whose: str) -> int:
        """Returns the seconds that a container lives, at most those that it may.

        Raises UsageError if a task's deadline is too late, allowing for clocks that differ.
        """
        if self.lifetime_s is None:
            return wanted_s
        if wanted_s > self.lifetime_s + CLOCKS_S:
            ceiling = f"lifetime_s = {self.lifetime_s}"
            remedy = "Submit the task with an earlier one"
            raise self.refusal(whose, f"a deadline in {wanted_s} s", ceiling, remedy)
        return min(wanted_s, self.lifetime_s)

    def refusal(
        self, whose: str, what: str, ceiling: str, remedy: str = "Change it in the recipe"
    ) -> UsageError:
        """Returns the error for something that this host does not allow."""
        return UsageError(
            f"{whose}: {what} is beyond the ceiling {ceiling}, which the operator of this host "
            f"sets in {self._source} ({VARIABLE}). {remedy}, or ask the operator to change the "
            "ceiling"
        )


def read_ceilings() -> Ceilings:
    """Returns the ceilings of this host. Raises UsageError if their file can't be used."""
    path = os.environ.get(VARIABLE)
    if not path:
        return Ceilings(networks=None)
    try:
        ceilings = Ceilings.model_validate(tomllib.loads(Path(path).read_text()))
    except OSError as error:
        raise UsageError(f"{VARIABLE}: can't read {path}: {error.strerror}") from error
    except ValidationError as error:
        raise UsageError(f"{VARIABLE}: {path}: {'; '.join(problems_of(error))}") from error
    except ValueError as error:
        raise UsageError(f"{VARIABLE}: {path} is not TOML: {error}") from error
    ceilings._source = path
    return ceilings


def repository(image: str) -> str:
    """Returns an image's repository in full: `docker.io/library/python` for `python:3.12`."""
    folder, slash, name = image.partition("@")[0].rpartition("/")
    name = folder + slash + name.partition(":")[0]
    first, slash, rest = name.partition("/")
    if not slash:
        return f"docker.io/library/{name}"
    if first in ("docker.io", "index.docker.io"):
        return f"docker.io/{rest if '/' in rest else f'library/{rest}'}"
    if first == first.lower() and not re.search("[.:]", first) and first != "localhost":
        return f"docker.io/{name}"
    return name


def _covers(pattern: str, full: str) -> bool:
    if not pattern.endswith("/"):
        return full == repository(pattern)
    return full.startswith(repository(f"{pattern}x/x").removesuffix("x/x"))


def _digest(image: str) -> str:
    digest = image.rpartition("@")[2]
    return digest if _DIGEST.fullmatch(digest) else ""


def _listed(key: str, values: Iterable[str]) -> str:
    return f"{key} = {list(values)}"
