"""Texts as JSON values. A long text is cut, with the address at which all of it is."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from headrace.schemas.events import Blob, Failure
from headrace.services.base.texts import encodable

INLINE = 20_000
"""Most characters of a text within another answer."""
WHOLE = 8 << 20
"""Most characters of a text by itself."""

Tree = dict[str, Any]


def text_tree(text: str | None, location: str = "", field: str = "") -> Tree | None:
    """Returns a text as a JSON value; None for None.

    `location` and `field` say where all of it is: a record, and the path of a field of its event.
    """
    if text is None:
        return None
    text = encodable(text)
    if len(text) <= INLINE:
        return {"text": text, "length": len(text), "more": None}
    more = f"/api/text?{urlencode({'at': location, 'field': field})}" if location else None
    return {"text": text[:INLINE], "length": len(text), "more": more}


def failure_tree(failure: Failure | None) -> Tree | None:
    """Returns a failure as a JSON value."""
    if failure is None:
        return None
    return {
        "origin": failure.origin,
        "code": encodable(failure.code),
        "message": encodable(failure.message[:INLINE]),
        "retryable": failure.retryable,
    }


def artifact_tree(blob: Blob, task: int, sample: int | None) -> Tree:
    """Returns a file as a JSON value, with the address of its bytes."""
    sha256 = blob.sha256.hex()
    where: Tree = {"task": task} if sample is None else {"task": task, "sample": sample}
    return {
        "name": encodable(blob.name),
        "bytes": blob.size,
        "media": encodable(blob.media),
        "sha256": sha256,
        "url": f"/api/artifacts/{sha256}?{urlencode(where)}",
    }
