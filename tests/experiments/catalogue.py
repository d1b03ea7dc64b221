"""The experiments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from tests.experiments.composition import read_composition
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


def seconds_a_version(run: Run) -> float:
    """Mean time from one version to the next. It does not depend on what was learned."""
    last = run.points["default"][-1]
    return last["seconds"] / last["version"]


SECONDS_A_VERSION = Measurement("seconds a version", seconds_a_version, 1)
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
    measurements=(SECONDS, EPISODES, VERSIONS, SECONDS_A_VERSION),
    settings=SKEWED_LAKE,
)
ASYNC_SYNC_SLOW = replace(
    ASYNC_SYNC,
    name="async-sync-slow",
    question="The same with a median of 3 s: episodes take more of the time, and the machine less.",
    settings=(*SKEWED_LAKE, "environments.default.options.median_s=3.0"),
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


EVALUATED = 60
"""The version that is evaluated. The run goes on for some versions, until that has ended."""


def rollouts_per_useful_group(run: Run) -> float:
    """Training episodes that had ended when that version was published, for each trained group."""
    (point,) = (one for one in run.points["default"] if one["version"] == EVALUATED)
    return point["episodes"] / (EVALUATED * GROUPS)


def evaluation(run: Run) -> float | None:
    """Mean reward of version EVALUATED, over the items that can be learned."""
    found = run.summary["evaluations"].get("default", {}).get(str(EVALUATED))
    return found["avg"]["value"] if found is not None else None


CURATION = Experiment(
    name="curation",
    question="How many episodes does a useful group cost if 70 % of the items are useless? Half of "
    "these are always solved, half never. Both figures are of version 60, of 8 groups each. The "
    "reward is that on the other 30 % of the items.",
    recipe=str(USELESS),
    arms=(
        Arm("uniform"),
        Arm("pass-rate", ('tasks.curators=["pass_rate"]',)),
        Arm("greso", ('tasks.curators=["greso"]',)),
    ),
    measurements=(
        Measurement("episodes for a useful group", rollouts_per_useful_group, 1),
        Measurement("reward of version 60", evaluation, 3),
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

SOLVER, VERIFIER = "solver", "verifier"
LAST = 40
"""The version at which both policies have learned as much as is compared."""


def until_both(run: Run) -> float:
    """Seconds until the later of the two policies has published version LAST."""
    return max(
        point["seconds"] for points in run.points.values() for point in points
        if point["version"] == LAST
    )  # fmt: skip


def reward_at_the_end(policy: str) -> Callable[[Run], float]:
    """Returns a measure: the mean reward of a policy's last ten versions up to LAST."""
    return lambda run: fmean(
        point["reward"] for point in run.points[policy] if LAST - 10 < point["version"] <= LAST
    )


def alone(policy: str) -> tuple[str, ...]:
    """Settings with which only one policy learns."""
    (other,) = {SOLVER, VERIFIER} - {policy}
    return (f"policies.{other}.training=false", "barrier=false")


POLICIES = Experiment(
    name="policies",
    question="How much sooner have two policies learned if they learn in one run? A solver and a "
    "verifier play in the same episodes, which take a log-normal time with a median of 1 s and "
    f"sigma 1. Each policy makes {LAST} versions: both in one run, one after the other while the "
    "other one is frozen, or each in a run of its own at the same time.",
    recipe="examples/workflows/solver-verifier.toml",
    arms=(
        Arm("together"),
        Arm("one-after-the-other", parts=(alone(SOLVER), alone(VERIFIER))),
        Arm("two-runs", parts=(alone(SOLVER), alone(VERIFIER)), at_once=True),
    ),
    measurements=(
        Measurement(f"seconds until both have version {LAST}", until_both),
        Measurement("reward of the solver", reward_at_the_end(SOLVER), 2),
        Measurement("reward of the verifier", reward_at_the_end(VERIFIER), 2),
    ),
    settings=(
        "environments.default.use=tests.experiments.skewed_sums:SkewedSums",
        f"stop.versions={LAST}",
        "stop.reward=2",
    ),
    policies=(SOLVER, VERIFIER),
)


def fact(name: str, key: str, digits: int = 3) -> Measurement:
    """Returns a measurement of the composition of a run. What it lacks is 0."""
    return Measurement(name, lambda run: run.facts.get(key, 0.0), digits)


def drawn_useful(run: Run) -> float | None:
    """Of the tasks of the mixture, the share of its part `useful`, which has a third."""
    useful, other = (run.facts.get(f"drawn.mixed/{part}", 0.0) for part in ("useful", "all"))
    return useful / (useful + other) if useful + other else None


DATA = "tests.experiments.mostly_useless:items"
USEFUL = f'use = "{DATA}", options = {{ useful = true }}'
MIXTURE = (
    f'{{ parts = [{{ name = "useful", {USEFUL}, weight = 1 }}, '
    f'{{ name = "all", use = "{DATA}", weight = 2 }}] }}'
)
STAGES = (
    f'{{ stages = [{{ name = "useful", {USEFUL}, pass_rate = 0.4, groups = 32, passes = 2 }}, '
    f'{{ name = "mixed", use = "mixture", options = {MIXTURE} }}] }}'
)
DYNAMIC = 'policies.default.groups.filters=["zero_advantage"]'
REPLAYED = "policies.default.batches.replay={ share = 0.3, max_uses = 2, max_age = 16 }"
PASS_RATE = '"pass_rate"'
GRESO = '{ use = "greso", window = 16, warmup_epochs = 0 }'
CURRICULUM = ("tasks.use=curriculum", f"tasks.options={STAGES}")

DATA_ALGORITHMS = Experiment(
    name="data-algorithms",
    question="What is recorded if a recipe asks for a data algorithm? 40 batches of 10 groups of "
    "the quiz of which 70 % is useless. Each arm adds settings to one recipe. Replayed groups are "
    "counted from batch 11 on.",
    recipe=str(USELESS),
    arms=(
        Arm("none"),
        Arm("dynamic-sampling", (DYNAMIC,)),
        Arm("replay", (REPLAYED,)),
        Arm("pass-rate", (f"tasks.curators=[{PASS_RATE}]",)),
        Arm("greso", (f"tasks.curators=[{GRESO}]",)),
        Arm("curriculum", CURRICULUM),
        Arm("all", (DYNAMIC, REPLAYED, f"tasks.curators=[{PASS_RATE}, {GRESO}]", *CURRICULUM)),
    ),
    measurements=(
        fact("batches", "batches", 0),
        fact("full batches", "full"),
        fact("replayed groups", "replayed"),
        fact("most batches of a sample", "uses", 0),
        fact("trained groups with equal rewards", "equal"),
        fact("played groups with equal rewards", "wasted"),
        fact("skipped by pass_rate", "skipped.pass_rate", 0),
        fact("skipped by greso", "skipped.greso", 0),
        Measurement("part of the mixture with a third", drawn_useful, 3, "-"),
        fact("violations", "violations", 0),
    ),
    settings=(
        "evaluation=false",
        "stop.versions=40",
        "policies.default.batches.groups=10",
        "policies.default.groups.filters=[]",
    ),
    facts=read_composition,
    compared=False,
)

EXPERIMENTS = {
    one.name: one
    for one in (
        ASYNC_SYNC,
        ASYNC_SYNC_SLOW,
        CURATION,
        DATA_ALGORITHMS,
        POLICIES,
        REPLAY,
        STALENESS,
    )
}
