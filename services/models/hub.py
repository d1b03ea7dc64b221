"""Models of the Hugging Face Hub as local folders, which the Hub's own cache keeps; and back."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from headrace.errors import DependencyError, UsageError

HUB_ID = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
"""`owner/name`, or `owner/name@revision`. A revision is a branch, a tag or a commit."""
DESCRIPTION = (
    *("config.json", "generation_config.json", "*.jinja"),
    *("tokenizer*", "*token*.json", "vocab*", "merges.txt"),
)
"""The files of a model folder besides its weights. They are enough to make prompts, and a model
without weights."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
REFUSALS = (400, 401, 403, 404, 410)
"""HTTP statuses after which a second request to the Hub can't succeed."""


def hub_folder(model: str, *, weights: bool = False) -> Path:
    """Returns the folder of a model named by its `HUB_ID`, with safetensors if `weights` is set.

    A model in the cache is used as it is, even if its branch has moved since. Raises UsageError if
    the Hub has no such model or the model lacks files, and DependencyError if the Hub can't be
    reached.
    """
    named = HUB_ID.fullmatch(model)
    if named is None:
        raise UsageError(f"model {model!r} is neither a folder nor owner/name of the Hub")
    files = [*DESCRIPTION, *(WEIGHTS if weights else ())]
    folder = _snapshot(named["repository"], named["revision"], files)
    found = [file.name for file in folder.iterdir()]
    missing = [name for name in ("config.json", "tokenizer.json") if name not in found]
    if weights and not any(name.endswith(".safetensors") for name in found):
        missing.append("*.safetensors")
    if missing:
        raise UsageError(
            f"model {model!r} of the Hugging Face Hub has no {', no '.join(missing)}. Choose a "
            "model or a revision that has these files"
        )
    return folder


def _snapshot(repository: str, revision: str | None, files: list[str]) -> Path:
    """Fetches the files of a repository that match, unless the cache has all of them."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise UsageError(
            f"can't fetch model {repository}: pip install 'headrace[torch]', or give the path of "
            "a model folder"
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
            raise DependencyError(
                f"the Hugging Face Hub failed to send model {repository}{at}: {error}. Try again"
            ) from error
        raise UsageError(
            f"the Hugging Face Hub has no model {repository}{at} that you may read: {error}. Check "
            "its name, or set HF_TOKEN if it is not public"
        ) from error
    except ValueError as error:
        raise UsageError(f"{repository}{at} can't be a model of the Hub: {error}") from error
    except OSError as error:
        raise DependencyError(
            f"model {repository}{at} is not in the Hugging Face cache, and the Hub can't be "
            f"reached: {error}. Copy the model's folder to this machine, and give its path"
        ) from error


def push_folder(folder: Path, repository: str, message: str) -> str:
    """Uploads a folder's files to a repository of the Hub, and returns its address. Blocks.

    A repository that does not exist is created as a private one. Raises UsageError if the Hub
    refuses, and DependencyError if it can't be reached or fails.
    """
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise UsageError(f"can't push {repository}: pip install 'headrace[torch]'") from error
    try:
        api = HfApi()
        created = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=created.repo_id, folder_path=folder, commit_message=message)
        return str(created)
    except HfHubHTTPError as error:
        if error.response.status_code not in REFUSALS:
            raise DependencyError(
                f"the Hugging Face Hub failed to take {repository}: {error}. Try again"
            ) from error
        raise UsageError(
            f"the Hugging Face Hub refuses {repository}: {error}. Check its name, and set HF_TOKEN "
            "to a token that may write"
        ) from error
    except ValueError as error:
        raise UsageError(f"{repository} can't be a repository of the Hub: {error}") from error
    except Exception as error:
        # The client lets errors of its HTTP library through, which differ between its versions.
        raise DependencyError(
            f"can't push to {repository}: {error}. Check that the Hub can be reached, and that "
            "HF_TOKEN is set"
        ) from error
