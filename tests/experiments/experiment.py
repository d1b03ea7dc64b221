"""What an experiment is, and how one run of it is made: a whole `headrace run`, kept as a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from headrace.services.namespace.cluster_config import ClusterConfig
from tests.experiments.timeline import Point, timeline

RUN_S = 3_600.0
"""A bound for one run."""


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    summary: dict[str, Any]
    """What `headrace run --json` printed."""
    points: dict[str, list[Point]]
    """Policy to its versions."""
    facts: dict[str, float] = field(default_factory=dict)
    """What the experiment's `facts` returned."""


@dataclass(frozen=True)
class Measurement:
    """A number of a run."""

    name: str
    of: Callable[[Run], float | None]
    """None if the run never got there."""
    digits: int = 0
    absent: str = ""
    """What the table says if no run has it. Empty: that it was never reached."""


@dataclass(frozen=True)
class Arm:
    """One of the things that an experiment compares: a name, and what differs from the recipe."""

    name: str
    settings: tuple[str, ...] = ()
    """As for `--set`."""
    parts: tuple[tuple[str, ...], ...] = ((),)
    """The settings of each run that it takes. Each policy learns in one of them."""
    at_once: bool = False
    """Whether the parts run at the same time, and not one after the other."""


@dataclass(frozen=True)
class Experiment:
    """A question, the arms that are compared, and what is measured."""

    name: str
    question: str
    recipe: str
    """Name or path of the recipe."""
    arms: tuple[Arm, ...]
    """The others are compared with the first one."""
    measurements: tuple[Measurement, ...]
    """The first one is the one that decides."""
    settings: tuple[str, ...] = ()
    """Settings of all arms."""
    across: str = "seconds"
    """The x-axis of the plot: `seconds`, `episodes` or `version`."""
    policies: tuple[str, ...] = ("default",)
    facts: Callable[[ClusterConfig], dict[str, float]] = lambda _: {}
    """What else is read from the log of each run that has ended."""
    compared: bool = True
    """Whether the arms are compared, by a ratio and a plot. Otherwise each stands alone."""


@dataclass(frozen=True)
class Trial:
    """An arm with a seed: one run, or one for each part of the arm."""

    experiment: Experiment
    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        """The namespace of the run."""
        return f"{self.experiment.name}-{self.arm.name}-{self.seed}"

    def settings(self) -> list[list[str]]:
        """What differs from the recipe, for each part. Each policy has a seed of its own."""
        policies = enumerate(self.experiment.policies)
        seeds = [f"policies.{policy}.seed={self.seed + 1000 * n}" for n, policy in policies]
        common = [*self.experiment.settings, *self.arm.settings]
        return [[*common, *part, *seeds, f"tasks.seed={self.seed}"] for part in self.arm.parts]


def trials_of(experiment: Experiment, seeds: Sequence[int]) -> list[Trial]:
    """All trials, seed by seed, so that the arms of a seed meet the machine at about one time."""
    return [Trial(experiment, arm, seed) for seed in seeds for arm in experiment.arms]


def read_run(trial: Trial, results: Path) -> Run | None:
    """Returns a run that was made; None if it was not."""
    path = results / f"{trial.name}.json"
    return Run(**json.loads(path.read_text())) if path.exists() else None


def make_run(trial: Trial, results: Path, cluster: ClusterConfig) -> Run:
    """Makes the runs of a trial and keeps them as one file. Raises RuntimeError if one fails."""
    settings = trial.settings()
    names = [
        trial.name if len(settings) == 1 else f"{trial.name}-{n}" for n in range(len(settings))
    ]
    clusters = [replace(cluster, namespace=name) for name in names]
    with ThreadPoolExecutor(len(settings) if trial.arm.at_once else 1) as threads:
        runs = list(threads.map(partial(_make_part, trial.experiment), settings, clusters))
    run = one_after_the_other(runs) if not trial.arm.at_once else at_once(runs)
    path = results / f"{trial.name}.json"
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(asdict(run)))
    temporary.replace(path)
    return run


def at_once(runs: Sequence[Run]) -> Run:
    """Returns the parts of an arm as one run. Summary and facts are those of the last one."""
    points = {name: one for run in runs for name, one in run.points.items()}
    return Run(runs[-1].summary, points, runs[-1].facts)


def one_after_the_other(runs: Sequence[Run]) -> Run:
    """Returns parts as one run in which each begins with the last version of the one before."""
    began = {"seconds": 0.0, "episodes": 0.0}
    shifted = []
    for run in runs:
        points = {
            name: [{**point, **{key: point[key] + began[key] for key in began}} for point in all_]
            for name, all_ in run.points.items()
        }
        last = [all_[-1] for all_ in points.values()]
        began = {key: max(point[key] for point in last) for key in began}
        shifted.append(Run(run.summary, points, run.facts))
    return at_once(shifted)


def _make_part(experiment: Experiment, settings: Sequence[str], cluster: ClusterConfig) -> Run:
    command = [sys.executable, "-m", "headrace", "run", experiment.recipe, "--json"]
    command += ["--quiet", *(word for one in settings for word in ("--set", one))]
    variables = {
        **os.environ,
        "HEADRACE_BOOTSTRAP_SERVERS": str(cluster.bootstrap_servers),
        "HEADRACE_REGISTRY_URL": str(cluster.registry_url),
        "HEADRACE_NAMESPACE": str(cluster.namespace),
        "HEADRACE_STATE": str(cluster.state),
    }
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    if done.returncode != 0:
        name = cluster.namespace
        raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr[-2000:]}")
    return Run(json.loads(done.stdout), timeline(cluster), experiment.facts(cluster))
