"""Models that are versions of runs: `run:NAMESPACE/POLICY@VERSION` in a recipe.

Before a run starts, the reference is resolved: it then ends in `#SHA256-SIZE`, the name of a blob
that lists the files of the version (docs/decisions/0022). So the recipe's digest depends on the
exact weights, and the blob store is enough to make the version's folder on any host. The folder is
in a cache outside the state folder, as models of the Hugging Face Hub are. This module knows where;
`services/operate/run_references.py` fills it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import UsageError
from headrace.schemas.events import Blob

PREFIX = "run:"
CACHE_VARIABLE = "HEADRACE_MODELS"
"""Environment variable that names the folder of the cache."""
_REFERENCE = re.compile(
    r"run:(?P<namespace>[a-z0-9_-]+)/(?P<policy>[a-z0-9_-]+)"
    r"(@(?P<version>[0-9]{1,18})(#(?P<sha256>[0-9a-f]{64})-(?P<size>[0-9]{1,18}))?)?"
)


@dataclass(frozen=True, slots=True)
class RunModel:
    """A reference to a version of a run."""

    namespace: str
    policy: str
    version: int | None = None
    """None means the newest one."""
    files: Blob | None = None
    """The blob that lists the version's files. None if the reference is not resolved."""

    def __str__(self) -> str:
        text = f"{PREFIX}{self.namespace}/{self.policy}"
        if self.version is not None:
            text += f"@{self.version}"
        if self.files is not None:
            text += f"#{self.files.sha256.hex()}-{self.files.size}"
        return text

    @classmethod
    def parse(cls, model: str) -> RunModel | None:
        """Returns the reference that a recipe's `model` is, or None if it is another model.

        Raises UsageError if it starts as a reference but is not one.
        """
        if not model.startswith(PREFIX):
            return None
        found = _REFERENCE.fullmatch(model)
        if found is None:
            raise UsageError(
                f"model {model!r} is not a version of a run: write run:NAMESPACE/POLICY@VERSION, "
                "or run:NAMESPACE/POLICY for the newest version"
            )
        version, sha256 = found["version"], found["sha256"]
        return cls(
            found["namespace"],
            found["policy"],
            None if version is None else int(version),
            None if sha256 is None else Blob(sha256=bytes.fromhex(sha256), size=int(found["size"])),
        )

    def covers(self, other: RunModel) -> bool:
        """Whether `other` is a version that this reference may stand for."""
        return (
            (self.namespace, self.policy) == (other.namespace, other.policy)
            and self.version in (None, other.version)
            and self.files in (None, other.files)
        )

    def folder(self, *, weights: bool) -> Path:
        """Returns the version's folder in the cache, which may not exist yet.

        Without `weights` it is a folder that has only the configuration and the tokenizer, unless
        the whole one exists. Raises UsageError if the reference is not resolved.
        """
        if self.files is None:
            raise UsageError(
                f"model {self} is not resolved to an exact version: `headrace run` and `headrace "
                "apply` do that when they start a run"
            )
        whole = cache_folder() / self.files.sha256.hex()
        if weights or whole.is_dir():
            return whole
        return whole.with_name(f"{whole.name}-described")


def cache_folder() -> Path:
    """Returns the folder in which this user's processes keep models that come from runs."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    general = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(general).expanduser().absolute() / "headrace" / "models"
