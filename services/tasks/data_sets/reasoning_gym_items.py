"""Problems of reasoning-gym as tasks: named by data set, configuration, seed and index.

The environment `reasoning_gym` makes them; here nothing is installed and nothing computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.errors import UsageError
from headrace.services.tasks.task_maker import Item


def items(
    dataset: str, size: int = 500, seed: int = 0, config: Mapping[str, Any] | None = None
) -> Iterator[Item]:
    """The first `size` problems of a data set, made with `config` and `seed`."""
    if size < 1:
        raise UsageError(f"size {size}: a data set has at least one problem")
    whole = {"dataset": dataset, "seed": seed, "config": {**(config or {}), "size": size}}
    for index in range(size):
        yield Item(f"{dataset}-{seed}-{index}", {**whole, "index": index})
