"""Models of the Hugging Face Hub, as folders: fetched once into its cache, then read from there."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from headrace.errors import DependencyError, UsageError

HUB_ID = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
"""`owner/name`, or `owner/name@revision`: a branch, a tag or a commit."""
DESCRIPTION = ("config.json", "generation_config.json", "tokenizer*", "*.jinja")
"""What makes prompts and an empty model."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
REFUSALS = (400, 401, 403, 404, 410)
"""HTTP statuses by which the hub says that asking again won't help."""


def hub_folder(model: str, *, weights: bool = False) -> Path:
    """The folder of a model named by its `HUB_ID`, with its safetensors where `weights` is set.

    What the cache holds is taken as it is: a revision that moves is fetched once. UsageError where
    the hub has no such model, or none in this form; DependencyError where it is out of reach.
    """
    named = HUB_ID.fullmatch(model)
    if named is None:
        raise UsageError(f"model {model!r} is neither a folder nor owner/name of the hub")
    files = [*DESCRIPTION, *(WEIGHTS if weights else ())]
    folder = _snapshot(named["repository"], named["revision"], files)
    found = [file.name for file in folder.iterdir()]
    missing = [name for name in ("config.json", "tokenizer.json") if name not in found]
    if weights and not any(name.endswith(".safetensors") for name in found):
        missing.append("*.safetensors")
    if missing:
        raise UsageError(f"model {model!r} of the Hugging Face Hub has no {', no '.join(missing)}")
    return folder


def _snapshot(repository: str, revision: str | None, files: list[str]) -> Path:
    """The files of a repository that match, from the cache where it has them all."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise UsageError(
            f"to fetch {repository}, install headrace[torch]; or give the path of a model folder"
        ) from error
    snapshot: Any = partial(
        huggingface_hub.snapshot_download, repository, revision=revision, allow_patterns=files
    )
    at = f" at {revision}" if revision else ""
    try:
        try:
            return Path(snapshot(local_files_only=True))
        except FileNotFoundError:
            return Path(snapshot())
    except HfHubHTTPError as error:
        if error.response.status_code not in REFUSALS:
            raise DependencyError(f"the Hugging Face Hub failed: {error}") from error
        raise UsageError(
            f"the Hugging Face Hub has no model {repository}{at} for you: {error}; what is not "
            "public needs HF_TOKEN"
        ) from error
    except ValueError as error:
        raise UsageError(f"{repository}{at} can't be a model of the hub: {error}") from error
    except OSError as error:
        raise DependencyError(
            f"model {repository}{at} is not in the Hugging Face cache, and the hub is out of "
            f"reach: {error}; bring the model's folder here, and give its path"
        ) from error
