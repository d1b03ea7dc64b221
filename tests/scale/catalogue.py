"""The scenarios. A new one is an entry of SCENARIOS: its arms as fleets, and what is measured.

Each arm is one simulated deployment. `small` makes it so small that a test runs it in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tests.scale.fleet import GIGABIT, HOME, Fleet, Losses, Pool, Region, Training, Work
from tests.scale.measured import Measured, spread

Arms = dict[str, Fleet]
SPEEDS = (1.0, 0.6, 0.3)
"""AstraFlow's pools, whose GPUs have 700, 400 and 250 W."""
FAR = Region("far", 0.3, 4 * GIGABIT)
"""AstraFlow's links. It does not say whether 300 ms is one way: here it is, which is the harder
reading."""
FAR_TOO = Region("farther", 0.3, 4 * GIGABIT)


@dataclass(frozen=True)
class ScaleScenario:
    """A question, its arms, and the columns of its table."""

    question: str
    arms: Callable[[bool], Arms]
    columns: tuple[tuple[str, Callable[[Measured], str]], ...]
    across: str = ""
    """What the arms differ in, for the plot's axis."""


SWE = Work(
    turns=40,
    turns_sigma=0.35,
    most_turns=100,
    generated=400,
    generated_sigma=0.8,
    most_generated=4096,
    observed=300,
    step_s=75.0,
    step_sigma=0.8,
    start_s=60.0,
    shared=4000,
)
"""MegaFlow's tasks: software engineering, at most 100 rounds and 4,096 tokens a turn, 75 to 90
minutes for a task (arXiv 2601.07526, section 3 and appendix D). It does not say how many rounds a
task takes: 40 of 75 s in the environment give its times. Contexts end at 32,000 tokens here."""

START_S = {1: 60.0, 10: 120.0, 100: 240.0, 1_000: 360.0, 10_000: 360.0}
"""MegaFlow's start-up of ephemeral environments: 1 to 6 minutes from 1 to 1,000 tasks. What is
between is interpolated, and 10,000 is assumed to be as 1,000."""


def ramp(small: bool) -> Arms:
    """MegaFlow's ramp: n tasks are submitted at once, and each has an instance of its own.

    The inference workers grow with the tasks: one for each 100. Not modelled: the registry of
    images, the network of the instances, failures.
    """
    counts = (1, 10, 100) if small else (1, 10, 100, 1_000, 10_000)
    return {
        f"{count:,}": Fleet(
            pools=(Pool(max(1, count // (25 if small else 100))),),
            work=replace(SWE, start_s=START_S[count], turns=10.0 if small else SWE.turns),
            live=count,
            tasks=count,
            seconds=24 * 3600.0,
            slots=64,
            agents=2,
            partitions=128,
            deadline_s=12 * 3600.0,
        )
        for count in counts
    }


MATH = Work(
    samples=8,
    generated=4000,
    generated_sigma=0.7,
    most_generated=30_000,
    observed=0,
    shared=300,
)
"""AstraFlow's mathematics: one long answer. It takes minutes; its length is assumed."""


def _training(groups: int, train_s: float) -> Training:
    return Training(groups=groups, train_s=train_s, full_bytes=28e9, delta_bytes=1.5e9)


def heterogeneous(small: bool) -> Arms:
    """AstraFlow's three pools of 100, 60 and 30 % of the speed, against each pool alone.

    The trainer takes a second, so the pools are never short of work. Not modelled: that a GPU with
    less power reads prompts about as fast, so that 60 % of the speed is not 60 % everywhere.
    """
    each, groups = (1, 24) if small else (5, 640)
    live = 2 * groups * MATH.samples
    fleet = Fleet(
        pools=(),
        work=replace(MATH, generated=1000.0 if small else MATH.generated),
        live=live,
        seconds=900.0 if small else 1800.0,
        slots=64 if small else 256,
        training=_training(groups, 1.0),
        agents=2,
    )
    mixed = {"together": replace(fleet, pools=tuple(Pool(each, speed) for speed in SPEEDS))}
    return mixed | {
        f"{speed:.0%} alone": replace(fleet, pools=(Pool(each, speed),), live=live)
        for speed in SPEEDS
    }


def regions(small: bool) -> Arms:
    """AstraFlow's regions: the trainer at home, and workers behind links of 4 Gbit/s and 300 ms.

    A version has 28 GB, and a delta 1.5 GB. `far` has all of the rollout side there: agents,
    environments and engines. `mixed` is AstraFlow's own: one pool at home, two in regions of their
    own. The workers of a pool are on one host. The trainer of the first arms is the slower part,
    and that of the arms `scarce` is so fast that the engines are. Not modelled: lost packets, and
    the window of one TCP connection: the link is full.
    """
    each, groups = (1, 24) if small else (10, 640)
    train_s, scarce_s = (55.0, 40.0) if small else (140.0, 100.0)
    home = Fleet(
        pools=tuple(Pool(each, speed, HOME) for speed in SPEEDS),
        work=MATH,
        live=(4 if small else 2) * groups * MATH.samples,
        seconds=48 * 3600.0,
        versions=24,
        slots=256,
        training=_training(groups, train_s),
        agents=2,
    )
    mixed = (
        Pool(each, SPEEDS[0], HOME),
        Pool(each, SPEEDS[1], FAR, hosts=1),
        Pool(each, SPEEDS[2], FAR_TOO, hosts=1),
    )
    far = replace(
        home, pools=tuple(Pool(each, speed, FAR, hosts=1) for speed in SPEEDS), agents_region=FAR
    )
    arms = {"home": home, "far": far, "mixed": replace(home, pools=mixed)}
    scarce = _training(groups, scarce_s)
    return arms | {
        f"{name}, scarce": replace(arm, training=scarce)
        for name, arm in arms.items()
        if name != "mixed"
    }


def spot(small: bool) -> Arms:
    """MegaFlow's training on machines of which a share is lost in each hour, engines and
    environments alike. Tasks have 16 episodes, and two batches are live. A batch has 4 tasks, not
    the 64 of MegaFlow.

    A lost environment costs its attempt, and an episode has three of them. A lost engine is
    replaced after five minutes. Not modelled: warnings before a loss, losses of many machines at
    one moment, losses of agents.
    """
    workers, groups, batches, hours = (4, 4, 2, 4.0) if small else (100, 64, 10, 5.0)
    work = replace(SWE, samples=16, start_s=240.0)
    fleet = Fleet(
        pools=(Pool(workers),),
        work=work,
        live=batches * groups * work.samples,
        seconds=hours * 3600.0,
        training=_training(groups, 120.0),
        slots=64,
        agents=2,
        partitions=64 if small else 256,
        deadline_s=8 * 3600.0,
    )
    rates = (0.0, 0.1) if small else (0.0, 0.1, 0.2)
    return {
        f"{rate:.0%}": replace(fleet, losses=Losses(3 * rate if small else rate, rate))
        for rate in rates
    }


def _range(values: list[float], unit: str = "s") -> str:
    middle, most = spread(values)
    return f"{middle:,.1f} / {most:,.1f} {unit}"


def _shares(result: Measured) -> str:
    found = result.shares()
    by_speed: dict[float, list[float]] = {}
    for name, ratio in found.items():
        by_speed.setdefault(result.speeds[name], []).append(ratio)
    texts = (f"{speed:.0%}: {sum(v) / len(v):.3f}" for speed, v in sorted(by_speed.items())[::-1])
    return ", ".join(texts)


def _minutes(result: Measured) -> str:
    return _range([seconds / 60 for seconds in result.episodes], "min")


def _cpu(result: Measured) -> str:
    return f"{result.cpu_us('start'):.0f}, {result.cpu_us('route'):.0f} µs"


def _failed(result: Measured) -> str:
    return f"{result.endings['failed'] / max(1, result.endings.total()):.2%}"


def _lost(result: Measured) -> str:
    return f"{len(result.lost_workers)}, {result.lost_environments}"


def _to_dead(result: Measured) -> str:
    return f"{len(result.to_dead)}, {max(result.to_dead, default=0.0):.1f} s"


def _far(result: Measured) -> str:
    return f"{8 * result.far_bytes / result.seconds / 1e6:.1f} Mbit/s"


SCENARIOS: Mapping[str, ScaleScenario] = {
    "ramp": ScaleScenario(
        "Does a task take longer if 10,000 run than if one runs?",
        ramp,
        (
            ("minutes until all have ended", lambda one: f"{one.last_end_s / 60:.0f}"),
            ("an episode, p50 / p99", _minutes),
            ("added to a turn, p50 / p99", lambda one: _range(one.added)),
            ("last start", lambda one: f"{one.last_start_s:.1f} s"),
            ("turns/s", lambda one: f"{len(one.waits) / one.seconds:.1f}"),
            ("cached", lambda one: f"{one.hits:.2f}"),
            ("CPU of a start, of a route", _cpu),
        ),
        "tasks",
    ),
    "heterogeneous": ScaleScenario(
        "Do workers of 100, 60 and 30 % of the speed do work in proportion?",
        heterogeneous,
        (
            ("tokens/s", lambda one: f"{one.rate:,.0f}"),
            ("share, as a multiple of the speed's", _shares),
            ("a turn, p50 / p99", lambda one: _range(one.waits)),
        ),
        "pools",
    ),
    "regions": ScaleScenario(
        "Does the trainer wait longer if the rollout side is in another region?",
        regions,
        (
            ("trainer's wait fraction", lambda one: f"{one.wait_fraction():.3f}"),
            ("a version", lambda one: f"{one.iteration_s():.1f} s"),
            ("tokens/s", lambda one: f"{one.rate:,.0f}"),
            ("staleness, mean", lambda one: f"{sum(one.staleness) / len(one.staleness):.2f}"),
            ("stale groups", lambda one: f"{one.stale_share:.1%}"),
            ("records over links", _far),
        ),
        "where the rollout side is",
    ),
    "spot": ScaleScenario(
        "What do machines cost that are lost?",
        spot,
        (
            ("versions/h", lambda one: f"{3600 / one.iteration_s():.2f}"),
            ("lost engines, environments", _lost),
            ("failed episodes", _failed),
            ("turns in vain", lambda one: f"{one.lost_turns / max(1, len(one.waits)):.1%}"),
            ("a turn, p50 / p99", lambda one: _range(one.waits)),
            ("stale groups", lambda one: f"{one.stale_share:.1%}"),
            ("sent to the dead, longest after", _to_dead),
        ),
        "machines lost in an hour",
    ),
}
