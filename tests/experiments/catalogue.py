"""The experiments."""

from __future__ import annotations

from collections.abc import Callable

from tests.experiments.experiment import Arm, Experiment, Measurement, Run
from tests.experiments.timeline import reached

GOAL = 0.9
"""The reward that decides how fast a run was."""


def until_goal(what: str, policy: str = "default") -> Callable[[Run], float | None]:
    """Returns a measure: seconds, episodes or versions until the reward is GOAL."""
    return lambda run: reached(run.points[policy], GOAL, what)


SECONDS = Measurement(f"seconds to reward {GOAL}", until_goal("seconds"))
EPISODES = Measurement(f"episodes to reward {GOAL}", until_goal("episodes"))
VERSIONS = Measurement(f"versions to reward {GOAL}", until_goal("version"))
SKEWED_LAKE = (
    "environments.default.use=tests.experiments.skewed_lake:SkewedLake",
    f"stop.reward={GOAL}",
    "stop.versions=200",
    "tasks.deadline_s=600",
)
"""FrozenLake, with the quickstart's policy, whose episodes take 1 s in the median and sigma = 1."""

SYNC = ("policies.default.batches.max_staleness=0", "policies.default.batches.prefetch=0")

ASYNC_SYNC = Experiment(
    name="async-sync",
    question="How much sooner does a policy learn if generating and training overlap? Episodes of "
    "FrozenLake take a log-normal time with a median of 1 s and sigma 1. Both arms run at most 64 "
    "episodes at the same time, which is one batch.",
    recipe="quickstart",
    arms=(Arm("async"), Arm("sync", SYNC)),
    measurements=(SECONDS, EPISODES, VERSIONS),
    settings=SKEWED_LAKE,
)
STALENESS = Experiment(
    name="staleness",
    question="What does old data cost, and what does it gain? With staleness k, so many episodes "
    "run at the same time as k + 1 batches have, and no token is older than k versions.",
    recipe="quickstart",
    arms=tuple(
        Arm(
            f"staleness-{age}",
            (
                f"policies.default.batches.max_staleness={age}",
                f"policies.default.batches.prefetch={min(1, age)}",
                f"scheduler.live_episodes={64 * (age + 1)}",
            ),
        )
        for age in (0, 1, 2, 4, 8)
    ),
    measurements=(EPISODES, SECONDS, VERSIONS),
    settings=SKEWED_LAKE,
    across="episodes",
)

EXPERIMENTS = {one.name: one for one in (ASYNC_SYNC, STALENESS)}
