"""What an experiment is, and how one run of it is made: a whole `headrace run`, kept as a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Measurement:
    """A number of a run."""

    name: str
    of: Callable[[Run], float | None]
    """None if the run never got there."""
    digits: int = 0


@dataclass(frozen=True)
class Arm:
    """One of the things that an experiment compares: a name, and what differs from the recipe."""

    name: str
    settings: tuple[str, ...] = ()
    """As for `--set`."""


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


@dataclass(frozen=True)
class Trial:
    """An arm with a seed: one run."""

    experiment: Experiment
    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        """The namespace of the run."""
        return f"{self.experiment.name}-{self.arm.name}-{self.seed}"

    def settings(self) -> list[str]:
        """What differs from the recipe."""
        seeds = [f"policies.{policy}.seed={self.seed}" for policy in self.experiment.policies]
        return [*self.experiment.settings, *self.arm.settings, *seeds, f"tasks.seed={self.seed}"]


def trials_of(experiment: Experiment, seeds: Sequence[int]) -> list[Trial]:
    """All trials, seed by seed, so that the arms of a seed meet the machine at about one time."""
    return [Trial(experiment, arm, seed) for seed in seeds for arm in experiment.arms]


def read_run(trial: Trial, results: Path) -> Run | None:
    """Returns a run that was made; None if it was not."""
    path = results / f"{trial.name}.json"
    return Run(**json.loads(path.read_text())) if path.exists() else None


def make_run(trial: Trial, results: Path, cluster: ClusterConfig) -> Run:
    """Makes a run and keeps it as a file. Raises RuntimeError if it fails."""
    cluster = replace(cluster, namespace=trial.name)
    command = [sys.executable, "-m", "headrace", "run", trial.experiment.recipe, "--json"]
    command += ["--quiet", *(word for one in trial.settings() for word in ("--set", one))]
    variables = {
        **os.environ,
        "HEADRACE_BOOTSTRAP_SERVERS": str(cluster.bootstrap_servers),
        "HEADRACE_REGISTRY_URL": str(cluster.registry_url),
        "HEADRACE_NAMESPACE": trial.name,
        "HEADRACE_STATE": str(cluster.state),
    }
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{trial.name} ended with {done.returncode}: {done.stderr[-2000:]}")
    run = Run(json.loads(done.stdout), timeline(cluster))
    path = results / f"{trial.name}.json"
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({"summary": run.summary, "points": run.points}))
    temporary.replace(path)
    return run
