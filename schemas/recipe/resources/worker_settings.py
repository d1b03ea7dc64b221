"""How many workers a run has, and what they cost."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from pydantic import Field

from headrace.schemas.recipe.resources.service_names import known_pools
from headrace.schemas.recipe.tables import (
    FALSE_IS_NONE,
    NotNegative,
    Positive,
    PositiveSeconds,
    Settings,
)

Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""What a worker costs in an hour, in any currency."""


class Autoscale(Settings):
    """Lets the number of inference workers follow the share of time that trainers wait for batches.
    `run` starts and drains workers; elsewhere, `headrace autoscale` says how many are wanted."""

    least: Positive = 1
    """Least number of inference workers."""
    most: Positive
    """Largest number of inference workers. At most `pool_partitions`."""
    window_s: PositiveSeconds = 300.0
    """Seconds of training from which a decision follows. After each change of the workers a new
    window begins."""
    start_s: PositiveSeconds = 900.0
    """Most seconds for which a new worker is waited for, which loads its model first. Nothing is
    decided meanwhile."""


class Workers(Settings):
    """How many processes of each kind `run` starts."""

    agent: NotNegative = 1
    """Number of agent workers."""
    env: NotNegative = 1
    """Number of env workers. None is started if every environment is external."""
    inference: NotNegative = 1
    """Number of inference workers."""
    project_turns: NotNegative = 0
    """Number of processes that write the topic `turns`: one row for each turn, with arrays and
    texts, for SQL and sinks of other teams. 0 leaves the topic empty."""
    autoscale: Annotated[Autoscale | None, FALSE_IS_NONE] = None
    """Absent (`autoscale = false` in TOML): the number of workers does not change by itself."""
    drain_s: PositiveSeconds = 300.0
    """Most seconds for which a draining inference worker finishes the prompts that it has begun.
    Then it stops, and others generate what is left again."""
    price_per_hour: dict[str, Price] = {}
    """What a worker of a service costs in an hour, in any currency, for `headrace cost`. A key is
    the name of a service, such as `inference`. If the recipe has several policies, it may also be
    that of a service for one of them, such as `trainer-solver`, which counts instead of `trainer`.
    """


def check_autoscale(workers: Workers, most: int, mode: str) -> None:
    """Raises ValueError if autoscaling can't work with the rest of the recipe. At most `most`
    workers can share the prompts."""
    scale = workers.autoscale
    if scale is None:
        return
    if mode == "sync":
        raise ValueError(
            "workers.autoscale: with mode = 'sync' trainers wait for every batch, however many "
            "workers there are. Remove one of the two"
        )
    if not scale.least <= workers.inference <= scale.most:
        raise ValueError(
            f"workers.inference: {workers.inference} is not between workers.autoscale.least, "
            f"{scale.least}, and workers.autoscale.most, {scale.most}"
        )
    if scale.most > most:
        raise ValueError(
            f"workers.autoscale.most: {scale.most} is more than pool_partitions, {most}, and a "
            "worker without a partition gets no prompts. Raise pool_partitions"
        )


def check_announcing_workers(workers: Workers, announced: Collection[str]) -> None:
    """Raises ValueError if several workers of one machine would announce weights to one server.

    `announced` are the policies of which workers announce versions to a server.
    """
    most = max(workers.inference, 0 if workers.autoscale is None else workers.autoscale.most)
    if announced and most > 1:
        raise ValueError(
            f"policies.{min(announced)}.engine: {most} workers would announce versions to the same "
            "weights_url, and tokens would get the version of a worker that was told last. Set "
            "workers.inference to 1 and remove workers.autoscale. One worker sends the server as "
            "many prompts at once as engine.slots says"
        )


def check_prices(workers: Workers, policies: Collection[str]) -> None:
    """Raises ValueError if a price is that of an unknown service or policy."""
    known = known_pools(policies)
    for pool in workers.price_per_hour:
        if pool not in known:
            raise ValueError(
                f"workers.price_per_hour.{pool}: no such service. Use one of {', '.join(known)}"
            )
