"""`python -m tests.bench [NAME...] [--scale S]`: runs benchmarks, prints one table."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from headrace.services.namespace.cluster_config import ClusterConfig
from tests.bench.dashboard import dashboard
from tests.bench.deployment import a_stack
from tests.bench.env_pools import env_pools
from tests.bench.episodes import live_episodes, null_episodes
from tests.bench.floor import floor
from tests.bench.head import head_costs
from tests.bench.hostile import hostile
from tests.bench.item_recovery import item_recovery
from tests.bench.items import item_statistics
from tests.bench.pools import pools
from tests.bench.programs import programs
from tests.bench.quotas import quotas
from tests.bench.ramp import ramp, short_ramp
from tests.bench.report import Figure, print_figures, stoppable
from tests.bench.trajectories import durable_trajectories
from tests.bench.turn_trace.trace import traced_turns
from tests.bench.weights import weight_deltas

BENCHMARKS: dict[str, Callable[[ClusterConfig, float], Coroutine[Any, Any, list[Figure]]]] = {
    "episodes": null_episodes,
    "floor": floor,
    "trace": traced_turns,
    "trajectories": durable_trajectories,
    "live": live_episodes,
    "weights": weight_deltas,
    "programs": programs,
    "items": item_statistics,
    "item_recovery": item_recovery,
    "head": head_costs,
    "hostile": hostile,
    "pools": pools,
    "ramp": ramp,
    "short-ramp": short_ramp,
    "env_pools": env_pools,
    "dashboard": dashboard,
    "quotas": quotas,
}


@stoppable()
def main() -> None:
    """Runs what was asked for, all without a name."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--scale", type=float, default=1.0, help="of the counts; default 1")
    parser.add_argument("--repeat", type=int, default=1, help="times that each is run")
    parser.add_argument(
        "--lasting", action="store_true",
        help="with a Kafka that optimizes its code, as `headrace run` has it; repeat to warm it",
    )  # fmt: skip
    options = parser.parse_args()
    if unknown := set(options.names) - BENCHMARKS.keys():
        parser.error(
            f"no benchmark {', '.join(sorted(unknown))}: choose from {', '.join(BENCHMARKS)}"
        )
    figures: list[Figure] = []
    with a_stack(lasting=options.lasting) as cluster:
        for name in options.names or BENCHMARKS:
            for _ in range(options.repeat):
                figures += asyncio.run(BENCHMARKS[name](cluster, options.scale))
    print_figures(figures)


if __name__ == "__main__":
    main()
