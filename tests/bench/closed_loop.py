"""`python -m tests.bench.closed_loop [RECIPE...]`: scheduler, episodes, batches, trainer: a loop.

It runs the real `WholeCore` and `BatchAssembler` in virtual time, with episodes of log-normal
length and a trainer that takes a fixed time. It needs no Kafka. For each recipe it prints how full
the batches are, how many samples go stale, whether long episodes are trained on as often as short
ones, and the rate beside that of the same loop in which a batch never waits for a live group: it
waits without limit until it is full, and for nothing else.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections.abc import Callable, Iterator, Mapping
from itertools import count

from headrace.schemas.events import (
    BatchAssembled,
    GroupClosed,
    GroupSample,
    PolicyPublished,
    Ref,
    Sampling,
    TaskSubmitted,
    Use,
)
from headrace.schemas.packed import pack_f32
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.inference.serving import LOAD_WAIT_S
from headrace.services.namespace.cluster_config import read_recipe
from headrace.stream_jobs.batches import BatchAssembler
from tests.bench.loop_world import KEPT, MEDIANS_S, SIGMAS, LoopResult, Sweep, World
from tests.bench.report import Figure, print_figures
from tests.whole_core import WholeCore

POLICY = "default"
RECIPES = (
    "quickstart", "frozen-lake-maps", "reasoning-gym", "qwen3-0-6b-vllm", "mini-swe",
    "openai-agent", "qwen3-8b-8xgpu",
)  # fmt: skip
"""All that ship and train a policy."""
BEGAN_S = 1_000_000.0
LIMIT_MEDIANS = 10
"""After so many medians a limit of turns or tokens ends an episode."""
DEADLINE_MEDIANS = 30
"""The deadline of an episode, in medians: only those that hang reach it."""


class Loop:
    """One run of the loop."""

    def __init__(self, recipe: Recipe, world: World) -> None:
        self._world = world
        self._samples = recipe.tasks.samples
        limits = recipe.scheduler.model_copy(update={"require_reports": False})
        self._core = WholeCore(recipe.model_copy(update={"scheduler": limits}))
        self._assembler = BatchAssembler(recipe, POLICY)
        self._random = random.Random(world.seed)
        long = random.Random(-world.seed - 1)
        self._long = {task for task in range(world.tasks) if long.random() < world.long}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._now = BEGAN_S
        self._offsets = count()
        self._lengths: dict[int, dict[int, float]] = {}
        self._oldest: dict[int, dict[int, int]] = {}
        self._began: dict[int, float] = {}
        self._published = self._loaded = self._given_up = -1
        self._loads_s = 0.0
        self._queue: list[int] = []
        self._training = False
        self._submitted = 0
        self._decided: set[int] = set()
        self._ready = 4 * recipe.policies[POLICY].batches.groups
        self.result = LoopResult()

    def run(self) -> LoopResult:
        """Runs until nothing happens any more."""
        self._publish(0)
        while True:
            self._start()
            self._assemble()
            due = self._assembler.due_at(self._now)
            if self._events and (due is None or self._events[0][0] <= due):
                self._now, _, happens = heapq.heappop(self._events)
                happens()
            elif due is not None:
                self._now = due
            else:
                break
        self.result.closed_s -= BEGAN_S
        self.result.decided_s -= BEGAN_S
        self.result.undecided = self._world.tasks - len(self._decided)
        return self.result

    def _at(self, seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._numbers), happens))

    def _start(self) -> None:
        """Submits what may be needed, and starts what may start."""
        while True:
            while self._core.queued < self._ready and self._submitted < self._world.tasks:
                self._core.on_task(self._submitted, self._task(self._submitted))
                self._submitted += 1
            starts = self._core.next_start(self._now)
            if not starts:
                return
            for start in starts:
                self._core.on_started(start)
                self._assembler.on_start(start, self._now)
                self._began.setdefault(start.task, self._now)
                self._attempt(start.task, start.sample, 0.0)

    def _task(self, number: int) -> TaskSubmitted:
        return TaskSubmitted(
            source="bench", task_id=str(number), item_id=str(number), agent="default",
            roles={"policy": Use(policy=POLICY, sampling=Sampling(max_tokens=1))}, max_turns=1,
            max_tokens=1, samples=self._samples,
            deadline_s=math.ceil(DEADLINE_MEDIANS * self._world.longest_s),
        )  # fmt: skip

    def _attempt(self, task: int, sample: int, spent_s: float) -> None:
        world = self._world
        median_s = world.longest_s if task in self._long else world.median_s
        length_s = median_s * math.exp(world.sigma * self._random.gauss(0, 1))
        overdue_s = self._began[task] + DEADLINE_MEDIANS * world.longest_s - self._now
        version, wait_s = self._catch_up(overdue_s)
        self._oldest.setdefault(task, {})[sample] = version
        left_s = LIMIT_MEDIANS * median_s - spent_s
        lost_s = length_s * self._random.random()
        hangs = world.hung and self._random.random() < world.hung
        dies = not hangs and lost_s < left_s and self._random.random() < world.deaths
        length_s = min(length_s, left_s)
        if hangs or wait_s + (lost_s if dies else length_s) >= overdue_s:
            self._at(overdue_s, lambda: self._end(task, sample, None))
        elif dies:
            self._at(wait_s + lost_s, lambda: self._attempt(task, sample, spent_s + lost_s))
        else:
            self._at(wait_s + length_s, lambda: self._end(task, sample, spent_s + length_s))

    def _catch_up(self, overdue_s: float) -> tuple[int, float]:
        """Returns the version that samples first, and how long the episode waits for it.

        As in an inference worker, prompts wait in vain for a version at most once.
        """
        newest = self._published
        if not self._world.waits or max(self._loaded, self._given_up) >= newest:
            return self._loaded, 0.0
        loads_s, wait_s = self._loads_s - self._now, min(LOAD_WAIT_S, max(0.0, overdue_s) / 4)
        if loads_s <= wait_s:
            return newest, loads_s
        self._at(wait_s, lambda: self._give_up(newest))
        return self._loaded, wait_s

    def _give_up(self, version: int) -> None:
        self._given_up = max(self._given_up, version)

    def _end(self, task: int, sample: int, length_s: float | None) -> None:
        """Ends an episode. `length_s` is None if it hung: then its sample is left out."""
        self._core.on_outcome(task, sample)
        lengths = self._lengths.setdefault(task, {})
        if length_s is None:
            del self._oldest[task][sample]
        lengths[sample] = length_s or 0.0
        if len(lengths) == self._samples:
            self._close(task)

    def _close(self, task: int) -> None:
        self.result.closed_s = self._now
        oldest = self._oldest.pop(task)
        kept = self._random.random() < self._world.kept and bool(oldest)
        seconds = self._now - self._began.pop(task)
        group = _group(task, oldest, self._lengths[task], kept, self._now, seconds)
        self.result.closes.append(self._now)
        if kept:
            self.result.generated += [self._lengths[task][sample] for sample in oldest]
        self._assembler.on_group(group, next(self._offsets))
        tokens = sum(one.tokens for one in group.samples)
        first = min(oldest.values()) if kept else None
        self._core.on_group(POLICY, task, oldest=first, tokens=tokens)

    def _assemble(self) -> None:
        while (batch := self._assembler.next_batch(self._now)) is not None:
            self._assembler.on_batch(batch)
            self._core.on_batch(POLICY, batch.version, batch.frontier(), batch.samples)
            self._note(batch)
            self._queue.append(batch.version)
            self._train()

    def _note(self, batch: BatchAssembled) -> None:
        self.result.decided_s = self._now
        fresh = [sample for sample in batch.samples if sample.use == 0]
        decided = {sample.task for sample in fresh}
        replayed = {sample.task for sample in batch.samples if sample.use > 0}
        if not self._world.hung:
            groups = len(decided) + len(replayed)
            self.result.parts += len(batch.samples) < groups * self._samples
        self.result.trained += [self._lengths[one.task][one.sample] for one in fresh]
        self.result.made.append((self._now, self._published))
        if self._submitted < self._world.tasks:
            self.result.batches.append(len(decided) + len(replayed))
            self.result.replayed.append(len(replayed))
            self.result.tokens.append(batch.sampled_tokens)
            self.result.seconds = self._now - BEGAN_S
            for sample in batch.samples:
                behind = batch.version - 1 - sample.oldest_version
                (self.result.ages if sample.use else self.result.staleness).append(behind)
                self.result.uses[sample.task, sample.sample] = sample.use + 1
            stale = [drop.task for drop in batch.dropped if drop.reason == "stale"]
            self.result.stale += len(stale) * self._samples
            self.result.stale_long += len(self._long.intersection(stale)) * self._samples
            self.result.trained_long += sum(one.task in self._long for one in fresh)
        self._decided |= decided | {drop.task for drop in batch.dropped}

    def _train(self) -> None:
        if self._queue and not self._training:
            self._training = True
            version = self._queue.pop(0)
            self._at(self._world.train_s, lambda: self._trained(version))

    def _trained(self, version: int) -> None:
        self._training = False
        self._publish(version)
        self._train()

    def _publish(self, version: int) -> None:
        self._published = version
        load_s = self._world.load_s if version else 0.0
        self._loads_s = self._now + load_s
        if load_s:
            self._at(load_s, lambda: self._on_loaded(version))
        else:
            self._on_loaded(version)
        self._core.on_policy(POLICY, version)
        self._assembler.on_policy(
            PolicyPublished(
                policy=POLICY, version=version, status="trained", digest=bytes(32),
                full_version=version,
            )
        )  # fmt: skip

    def _on_loaded(self, version: int) -> None:
        self._loaded = version


def changed(recipe: Recipe, **batches: float) -> Recipe:
    """Returns the recipe with other settings of its policy's batches."""
    tree = recipe.model_dump(mode="json")
    tree["policies"][POLICY]["batches"].update(batches)
    return parse_recipe(tree, recipe.name)


def _group(
    task: int,
    oldest: Mapping[int, int],
    lengths: Mapping[int, float],
    kept: bool,
    now_s: float,
    seconds: float,
) -> GroupClosed:
    """A closed group. A second of an episode is a token, so the longest episodes have the most."""
    ended = int(now_s * 1000)
    if not kept:
        return GroupClosed(
            task=task, policy=POLICY, item_id=str(task), verdict="dropped",
            reason="zero_advantage", mean=1.0, ended=ended, seconds=seconds,
        )  # fmt: skip
    samples = tuple(
        GroupSample(
            sample=sample, trajectory=Ref(topic="t", partition=0, offset=0, digest=bytes(16)),
            reward=1.0, advantages=pack_f32([1.0]), tokens=max(1, round(lengths[sample])),
            longest=1, oldest_version=version,
        )
        for sample, version in oldest.items()
    )  # fmt: skip
    return GroupClosed(
        task=task, policy=POLICY, item_id=str(task), verdict="scored", samples=samples,
        mean=1.0, deviation=0.0, ended=ended, seconds=seconds,
    )  # fmt: skip


def compare(recipe: Recipe, world: World) -> tuple[LoopResult, LoopResult]:
    """Returns what the recipe does, and what it does if no batch waits for a live group."""
    patient = Loop(recipe, world).run()
    return patient, Loop(changed(recipe, straggler_wait_s=0), world).run()


def measure(name: str, recipe: Recipe, sweep: Sweep) -> Iterator[Figure]:
    """Yields the worst figures over all worlds of a median length."""
    groups = recipe.policies[POLICY].batches.groups
    for median_s in sweep.medians_s:
        rows = []
        for world in sweep.worlds(median_s, groups):
            result, impatient = compare(recipe, world)
            rows.append(
                (
                    result.full(groups),
                    min(result.batches, default=0),
                    result.stale_share,
                    result.length_ratio,
                    result.rate / impatient.rate,
                    result.undecided,
                )
            )
        full, smallest, stale, ratio, rate, undecided = zip(*rows, strict=True)
        yield Figure(
            f"{name}, median {median_s:g} s",
            f"{min(full):.0%} full, smallest {min(smallest)}, {max(stale):.1%} stale, length "
            f"{min(ratio):.3f}, rate {min(rate):.2f}, undecided {max(undecided)}",
            "95%, > 0, 5%, 0.97, 0.9, 0",
        )


def main() -> None:
    """Prints a table for each recipe that is named, by default for those that ship."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.closed_loop", description=__doc__)
    parser.add_argument("recipes", nargs="*", default=RECIPES, metavar="RECIPE")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--medians", type=float, nargs="+", default=MEDIANS_S, metavar="SECONDS")
    parser.add_argument("--sigmas", type=float, nargs="+", default=SIGMAS, metavar="SIGMA")
    parser.add_argument("--kept", type=float, nargs="+", default=KEPT, metavar="SHARE")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--batches", type=int, default=40, help="that the tasks fill")
    parser.add_argument("--hung", type=float, default=0.0, help="share of attempts that hang")
    parser.add_argument("--long", type=float, default=0.0, help="share of tasks 10 times as long")
    parser.add_argument("--load", type=float, default=0.0, help="medians that engines load for")
    options = parser.parse_args()
    sweep = Sweep(
        options.medians, options.sigmas, options.kept, options.seeds, options.batches,
        options.hung, options.long, options.load,
    )  # fmt: skip
    print_figures(
        [
            figure
            for name in options.recipes
            for figure in measure(name, read_recipe(name, tuple(options.set)), sweep)
        ]
    )


if __name__ == "__main__":
    main()
