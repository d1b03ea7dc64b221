"""Opens the blob store that a URL names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from headrace.errors import UsageError
from headrace.services.models.blobs import BlobStore, LocalBlobStore
from headrace.services.models.remote_blobs import RemoteBlobStore


def open_blob_store(url: str, cache: Path) -> BlobStore:
    """Opens the store at a path, a `file://` URL, or any URL that fsspec serves.

    `cache` is a local folder for the blobs that a remote store sent. Raises UsageError if no store
    serves the URL.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return LocalBlobStore(Path(unquote(parts.path)))
    if not url or parts.scheme == "file":
        raise UsageError(f"blob store {url!r}: give a folder, as a path or as file:///path")
    if "://" in url:
        return RemoteBlobStore(url, cache)
    return LocalBlobStore(Path(url).expanduser())
