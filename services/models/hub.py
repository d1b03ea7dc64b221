"""Models of the Hugging Face Hub as local folders, which the Hub's own cache keeps; and back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
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
    model = f"model {repository}" + (f" at {revision}" if revision else "")
    with _hub_errors(
        f"fetch {model}",
        refused="Check its name and its revision, or set HF_TOKEN if it is not public",
        unreachable="The cache lacks it, too: copy the model's folder here, and give its path",
    ):
        import huggingface_hub

        snapshot: Any = partial(
            huggingface_hub.snapshot_download, repository, revision=revision, allow_patterns=files
        )
        try:
            return Path(snapshot(local_files_only=True))
        except FileNotFoundError:
            return Path(snapshot())


def push_folder(folder: Path, repository: str, message: str) -> str:
    """Uploads a folder's files to a repository of the Hub, and returns its address. Blocks.

    A repository that does not exist is created as a private one. Raises UsageError if the Hub
    refuses, and DependencyError if it can't be reached or fails.
    """
    with _hub_errors(
        f"push {repository}",
        refused="Check its name, and set HF_TOKEN to a token that may write",
        unreachable="Check that HF_TOKEN is set",
    ):
        from huggingface_hub import HfApi

        api = HfApi()
        created = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=created.repo_id, folder_path=folder, commit_message=message)
        return str(created)


@contextmanager
def _hub_errors(what: str, refused: str, unreachable: str) -> Iterator[None]:
    """Makes errors of the Hub's client ours: can't `what`, why, and what to do."""
    try:
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise UsageError(f"can't {what}: pip install 'headrace[torch]'. {unreachable}") from error
    try:
        yield
    except HfHubHTTPError as error:
        if error.response.status_code not in REFUSALS:
            raise DependencyError(
                f"can't {what}: the Hugging Face Hub failed: {error}. Try again"
            ) from error
        raise UsageError(
            f"can't {what}: the Hugging Face Hub refuses it: {error}. {refused}"
        ) from error
    except ValueError as error:
        raise UsageError(f"can't {what}: the Hub can't have it: {error}") from error
    except Exception as error:
        # The client lets errors of its HTTP library through, which differ between its versions.
        raise DependencyError(
            f"can't {what}: the Hugging Face Hub can't be reached: {error}. {unreachable}"
        ) from error
