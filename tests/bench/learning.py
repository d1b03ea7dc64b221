"""`python -m tests.bench.learning [RECIPE...]`: how algorithms learn, at a fixed staleness.

It runs a recipe's own agent, environment, engine, advantages and trainer in one process, without
Kafka, in lockstep: batch n is sampled by version n - 1 - `staleness`, so algorithms are compared on
data of exactly the same age. A seed decides the first weights and the tasks. The curve of each run
is kept in the folder of the results, so a command that was interrupted goes on. Then the curves are
drawn, with the mean of the seeds and its interval of 95 % (Student's t).
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory

from headrace.schemas.events import (
    BatchAssembled,
    BatchSample,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    GenerationCompleted,
    GenerationRequested,
    TaskEnded,
    TaskSubmitted,
    TrajectoryRecorded,
)
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.agent.agents import load_agents
from headrace.services.base.clock import now
from headrace.services.env.instances import Instances
from headrace.services.env.service import load_environments
from headrace.services.env.setup import Opening
from headrace.services.inference.engine import Weights
from headrace.services.inference.engine_slots import Slots
from headrace.services.inference.service import make_engines
from headrace.services.inference.serving import ServedPolicy
from headrace.services.inference.tokenizer import Tokenizer
from headrace.services.models.weights import model_folder
from headrace.services.namespace.cluster_config import read_recipe
from headrace.services.operate.try_episode.local_episode import LocalEpisode
from headrace.services.tasks.data_sets import items_by_epoch
from headrace.services.tasks.task_maker import TaskMaker
from headrace.stream_jobs.groups import GroupAssembler
from headrace.trainer.learner import Learner
from headrace.trainer.loader import build_updates
from tests.bench.report import stoppable

POLICY = "default"
NAME = "learning"
RECIPES = ("frozen-lake-maps", "reasoning-gym")
STALENESS = (1, 8)
SEEDS = 3
VERSIONS = 100
TRAINING = f"policies.{POLICY}.training"
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "grpo": (f"{TRAINING}.loss=grpo",),
    "gspo": (f'{TRAINING}.loss={{"use": "gspo", "clip_low": 0.2, "clip_high": 0.2}}',),
    "cispo": (f"{TRAINING}.loss=cispo",),
    "m2po": (f'{TRAINING}.loss={{"use": "m2po", "threshold": 0.3}}',),
    "behaviour_clip": (f"{TRAINING}.loss=tests.bench.losses:BehaviourClip",),
    "ppo": (
        f"policies.{POLICY}.groups.advantage=rewards",
        f'{TRAINING}.critic={{"gae_lambda": 0.95}}',
    ),
}
"""Each algorithm as settings of the recipe. GSPO's published bounds of 3e-4 and 4e-4 are for long
answers: on episodes of ten tokens they clip nearly everything. M2PO's published threshold of 0.04
is for large models. Versions of a tiny one with a learning rate of 1e-3 differ more."""
T_975 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
"""Student's t for an interval of 95 %, by the number of seeds."""


@dataclass(frozen=True)
class Curve:
    """One run: its recipe, what was changed, and the mean reward of each batch."""

    recipe: str
    algorithm: str
    staleness: int
    seed: int
    versions: int
    sets: tuple[str, ...] = ()
    """What differs from the recipe in all curves, as for `--set`."""

    @property
    def file(self) -> str:
        """The name of the file that keeps it. Other settings have another file."""
        settings = hashlib.sha256("\n".join(self.settings()).encode()).hexdigest()[:8]
        parts = self.recipe, self.algorithm, self.staleness, self.seed, self.versions, settings
        return "-".join(map(str, parts)) + ".json"

    def settings(self) -> list[str]:
        """What differs from the recipe."""
        seeds = (f"policies.{POLICY}.seed={self.seed}", f"tasks.seed={self.seed}")
        return [*self.sets, *ALGORITHMS[self.algorithm], *seeds]


class _Learning:
    """A policy that is sampled and trained."""

    def __init__(self, recipe: Recipe, name: str, scratch: Path) -> None:
        self.name = name
        self.settings = recipe.policies[name]
        self._scratch = scratch
        self.learner = Learner(model_folder(self.settings.model), self.settings)
        [(self.engine, _)] = make_engines(recipe, [name])
        tokenizer = Tokenizer(model_folder(self.settings.model))
        self.served = ServedPolicy(name, self.engine, Slots(self.engine), tokenizer, NAME)

    async def serve(self, newest: int, sampled_by: int) -> None:
        """Keeps the weights of the newest version, and loads those of the version that samples."""
        self._path(newest).write_bytes(self.learner.weights())
        await self.engine.load(Weights(self.name, sampled_by, self._path(sampled_by)))
        self.served.version = sampled_by
        self._path(sampled_by - 1).unlink(missing_ok=True)

    def train(self, batch: BatchAssembled, trajectories: Sequence[Event]) -> None:
        settings = self.settings.training
        assert settings is not None
        if not batch.samples:
            return
        vocabulary = self.learner.vocabulary
        critic = settings.critic is not None
        updates, _ = build_updates(
            batch, trajectories, vocabulary, settings.minibatches, critic=critic
        )
        self.learner.train(updates)

    def _path(self, version: int) -> Path:
        return self._scratch / f"{self.name}-{version}.safetensors"


class LockstepLoop:
    """Samples a batch with one version of each policy, trains, and so on."""

    def __init__(self, recipe: Recipe, scratch: Path, staleness: int) -> None:
        self._recipe = recipe
        self._staleness = staleness
        trained = [name for name, one in recipe.policies.items() if one.training is not None]
        self._policies = {name: _Learning(recipe, name, scratch) for name in trained}
        self._agents = load_agents(recipe)
        self._environments = load_environments(recipe, NAME, Instances(_drop, NAME))
        self._groups = GroupAssembler(recipe)
        self._tasks = self._make_tasks()

    async def run(
        self, versions: int, enough: Callable[[list[dict[str, float]]], bool] = lambda _: False
    ) -> list[dict[str, float]]:
        """Makes versions, until it is `enough`. Returns the mean rewards of each, by policy."""
        for environment in self._environments.values():
            if isinstance(environment, Opening):
                await environment.open()
        try:
            rewards: list[dict[str, float]] = []
            for version in range(1, versions + 1):
                if enough(rewards):
                    break
                sampled_by = max(0, version - 1 - self._staleness)
                for policy in self._policies.values():
                    await policy.serve(version - 1, sampled_by)
                rewards.append(await self._train(version))
            return rewards
        finally:
            for environment in self._environments.values():
                await environment.close_pool()
            for policy in self._policies.values():
                await policy.engine.close(drain_s=0.0)

    async def _train(self, version: int) -> dict[str, float]:
        """Samples and trains batch `version` of each policy. Returns the mean rewards."""
        count = max(policy.settings.batches.groups for policy in self._policies.values())
        tasks = list(itertools.islice(self._tasks, count))
        numbers = range((version - 1) * count, version * count)
        ended = await asyncio.gather(*map(self._play, numbers, tasks))
        samples: dict[str, list[BatchSample]] = {name: [] for name in self._policies}
        trajectories: dict[str, list[Event]] = {name: [] for name in self._policies}
        means: dict[str, list[float]] = {name: [] for name in self._policies}
        for task, by_sample in ended:
            for group in self._groups.on_task(task, 0):
                means[group.policy].append(group.mean or 0.0)
                for sample in group.samples:
                    samples[group.policy].append(
                        BatchSample(
                            task=task.task, sample=sample.sample, trajectory=sample.trajectory,
                            advantages=sample.advantages, tokens=sample.tokens,
                            longest=sample.longest, oldest_version=sample.oldest_version,
                        )
                    )  # fmt: skip
                    trajectories[group.policy].append(by_sample[sample.sample])
        for name, policy in self._policies.items():
            batch = BatchAssembled(
                policy=name, version=version, recipe=self._recipe.digest, seed=0,
                samples=tuple(samples[name]), low_mark=0, groups_read=0,
                sampled_tokens=sum(one.tokens for one in samples[name]),
            )  # fmt: skip
            policy.train(batch, trajectories[name])
        return {name: fmean(rewards) for name, rewards in means.items()}

    async def _play(
        self, number: int, submitted: TaskSubmitted
    ) -> tuple[TaskEnded, list[TrajectoryRecorded]]:
        """Plays all samples of a task."""
        played = await asyncio.gather(
            *(self._play_sample(number, submitted, one) for one in range(submitted.samples))
        )
        ended = TaskEnded(
            task=number, source=submitted.source, task_id=submitted.task_id,
            item_id=submitted.item_id, closed_by="all",
            outcomes=tuple(outcome for outcome, _ in played),
        )  # fmt: skip
        return ended, [trajectory for _, trajectory in played]

    async def _play_sample(
        self, number: int, submitted: TaskSubmitted, sample: int
    ) -> tuple[EpisodeEnded, TrajectoryRecorded]:
        started = EpisodeStarted(
            task=number, sample=sample, submitted=submitted, seed=submitted.seed + sample,
            deadline=int((now() + submitted.deadline_s) * 1000),
        )  # fmt: skip
        recorded: list[TrajectoryRecorded] = []

        def on_event(event: Event) -> None:
            if isinstance(event, TrajectoryRecorded):
                recorded.append(event)

        episode = LocalEpisode(self._environments, self._answer, on_event)
        outcome = await episode.play(started, self._agents[submitted.agent])
        return outcome, recorded[-1]

    async def _answer(self, request: GenerationRequested) -> GenerationCompleted | None:
        served = self._policies[request.policy].served
        slot = await served.slots.take()
        try:
            return await served.complete(request, slot, queue_s=0.0)
        finally:
            slot.free()

    def _make_tasks(self) -> Iterator[TaskSubmitted]:
        tasks, maker = self._recipe.tasks, TaskMaker(self._recipe, NAME)
        for task_id, epoch, item in items_by_epoch(tasks.use, tasks.options, tasks.epochs):
            yield maker.make(item, task_id, epoch)


async def _drop(event: object) -> None:
    """Drops an event about an instance."""


def learn(curve: Curve, folder: Path) -> None:
    """Runs a curve and writes its file, unless it is there."""
    path = folder / curve.file
    if path.exists():
        return
    recipe = read_recipe(curve.recipe, curve.settings())
    with TemporaryDirectory(prefix="headrace-learning-") as scratch:
        loop = LockstepLoop(recipe, Path(scratch), curve.staleness)
        rewards = [one[POLICY] for one in asyncio.run(loop.run(curve.versions))]
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(rewards))
    temporary.replace(path)
    print(f"{path.stem}: {fmean(rewards[-LAST:]):.3f} over the last {LAST} versions", flush=True)


LAST = 10
"""Versions at the end of a curve whose mean reward is printed."""


def interval(values: Sequence[float]) -> float:
    """Half the width of the interval of 95 % of the mean; 0 for one value."""
    if len(values) < 2:
        return 0.0
    return T_975[len(values)] * stdev(values) / math.sqrt(len(values))


def draw(curves: Sequence[Curve], folder: Path, path: Path) -> None:
    """Draws a panel for each recipe and staleness. Rewards are means over five versions."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    recipes = sorted({one.recipe for one in curves})
    ages = sorted({one.staleness for one in curves})
    figure = Figure(figsize=(5.0 * len(ages), 3.2 * len(recipes)), layout="constrained")
    for number, (recipe, age) in enumerate(itertools.product(recipes, ages), 1):
        axes = figure.add_subplot(len(recipes), len(ages), number)
        axes.set_title(f"{recipe}, staleness {age}", fontsize="medium")
        axes.set_xlabel("version", fontsize="small")
        axes.set_ylabel("mean reward", fontsize="small")
        for algorithm in ALGORITHMS:
            runs = [
                _smooth(json.loads((folder / one.file).read_text()))
                for one in curves
                if (one.recipe, one.staleness, one.algorithm) == (recipe, age, algorithm)
            ]
            if not runs:
                continue
            points = list(zip(*runs, strict=True))
            means, errors = [fmean(point) for point in points], [interval(one) for one in points]
            versions = range(1, len(means) + 1)
            [line] = axes.plot(versions, means, label=algorithm)
            low = [mean - error for mean, error in zip(means, errors, strict=True)]
            high = [mean + error for mean, error in zip(means, errors, strict=True)]
            axes.fill_between(versions, low, high, color=line.get_color(), alpha=0.15)
        axes.set_ylim(0, 1)
        axes.legend(fontsize="small")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "headrace"}):
        figure.savefig(path, metadata={"Date": None})


def _smooth(rewards: Sequence[float], width: int = 5) -> list[float]:
    return [fmean(rewards[max(0, end - width) : end]) for end in range(1, len(rewards) + 1)]


def report(curves: Sequence[Curve], folder: Path) -> None:
    """Prints a table of the rewards at the end, as Markdown."""
    print(f"| recipe | staleness | algorithm | reward over the last {LAST} versions |")
    print("|---|---|---|---|")
    key = lambda one: (one.recipe, one.staleness, one.algorithm)  # noqa: E731
    for (recipe, age, algorithm), found in itertools.groupby(sorted(curves, key=key), key):
        ends = [fmean(json.loads((folder / one.file).read_text())[-LAST:]) for one in found]
        error = interval(ends)
        print(f"| {recipe} | {age} | {algorithm} | {fmean(ends):.3f} ± {error:.3f} |")


@stoppable()
def main() -> None:
    """Runs what is missing, and draws."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.learning", description=__doc__)
    parser.add_argument("recipes", nargs="*", default=RECIPES, metavar="RECIPE")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    parser.add_argument("--staleness", nargs="+", type=int, default=STALENESS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--versions", type=int, default=VERSIONS)
    parser.add_argument("--set", action="append", default=[], help="a setting of all curves")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1)))
    parser.add_argument("--results", type=Path, default=Path(".headrace/learning"))
    parser.add_argument("--plot", type=Path, default=Path("docs/learning.svg"))
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    curves = [
        Curve(recipe, algorithm, age, seed, options.versions, tuple(options.set))
        for recipe, age, algorithm, seed in itertools.product(
            options.recipes, options.staleness, options.algorithms, range(options.seeds)
        )
    ]
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=1) as pool:
        pool.starmap(learn, [(one, options.results) for one in curves], chunksize=1)
    draw(curves, options.results, options.plot)
    report(curves, options.results)


if __name__ == "__main__":
    main()
