"""Whether a file of weights fits a model: by name and shape, before any of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.errors import BlobError


def check_fit(model: Any, given: Mapping[str, Sequence[int]]) -> None:
    """BlobError where tensors of these names and shapes are not the model's.

    `model` is a transformers model, on whatever device. Of names that share one tensor (tied
    embeddings), one is enough.
    """
    own = model.state_dict(keep_vars=True)
    strange = sorted(set(given) - set(own))
    there = {id(own[name]) for name in given if name in own}
    missing = sorted(name for name, value in own.items() if id(value) not in there)
    shaped = [
        f"{name} {list(shape)}, not {list(own[name].shape)}"
        for name, shape in given.items()
        if name in own and tuple(shape) != tuple(own[name].shape)
    ]
    for what, names in (("unknown", strange), ("missing", missing), ("shaped", shaped)):
        if names:
            raise BlobError(
                f"the weights don't fit the model: {what}: {', '.join(names[:3])}"
                f"{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
            )
