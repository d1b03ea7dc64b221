"""The experiments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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

ASYNC_SYNC = Experiment(
    name="async-sync",
    question="How much sooner does a policy learn if generating and training overlap? Episodes of "
    "FrozenLake take a log-normal time with a median of 1 s and sigma 1. Both arms run at most 64 "
    "episodes at the same time, which is one batch.",
    recipe="quickstart",
    arms=(Arm("async"), Arm("sync", ("mode=sync",))),
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

USELESS = Path(__file__).with_name("mostly_useless.toml")
GROUPS = 8
"""Groups of a batch in that recipe. Each is useful: groups without variance are filtered."""


def rollouts_per_useful_group(run: Run) -> float:
    """Episodes that had ended when the last version was published, for each trained group."""
    last = run.points["default"][-1]
    return last["episodes"] / (last["version"] * GROUPS)


def last_evaluation(run: Run) -> float | None:
    """Mean reward of the newest evaluated version, over the items that can be learned."""
    rounds = run.summary["evaluations"].get("default", {})
    return rounds[max(rounds, key=int)]["avg"]["value"] if rounds else None


CURATION = Experiment(
    name="curation",
    question="How many episodes does a useful group cost if 70 % of the items are useless? Half of "
    "these are always solved, half never. Each arm trains 60 versions of 8 groups. The reward is "
    "that of the last version on the other 30 % of the items.",
    recipe=str(USELESS),
    arms=(
        Arm("uniform"),
        Arm("pass-rate", ('tasks.curators=["pass_rate"]',)),
        Arm("greso", ('tasks.curators=["greso"]',)),
    ),
    measurements=(
        Measurement("episodes for a useful group", rollouts_per_useful_group, 1),
        Measurement("reward at the end", last_evaluation, 3),
    ),
    across="episodes",
)
REPLAY = Experiment(
    name="replay",
    question="Does a policy need fewer episodes if a share of each batch is replayed? The "
    "recipe is the quickstart, with batches of 4 groups.",
    recipe="quickstart",
    arms=(
        Arm("fresh"),
        Arm("replay-25", ("policies.default.batches.replay={ share = 0.25 }",)),
        Arm("replay-50", ("policies.default.batches.replay={ share = 0.5 }",)),
    ),
    measurements=(EPISODES, SECONDS, VERSIONS),
    settings=(f"stop.reward={GOAL}", "stop.versions=200"),
    across="episodes",
)

EXPERIMENTS = {one.name: one for one in (ASYNC_SYNC, CURATION, REPLAY, STALENESS)}
