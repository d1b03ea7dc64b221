"""Experiments: their recipes can be read, and their reports compare runs as they say."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest

from headrace.schemas.events import BatchAssembled, BatchSample, Ref
from headrace.services.namespace.cluster_config import read_recipe
from tests.experiments.catalogue import DATA_ALGORITHMS, EXPERIMENTS, drawn_useful
from tests.experiments.composition import SETTLED, composition
from tests.experiments.experiment import (
    Arm,
    Experiment,
    Measurement,
    Run,
    at_once,
    one_after_the_other,
    trials_of,
)
from tests.experiments.report import draw, table
from tests.experiments.timeline import reached
from tests.unit.tasks.test_item_statistics import a_closed_group


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_arms_of_an_experiment_are_recipes_that_differ(name: str) -> None:
    experiment = EXPERIMENTS[name]
    trials = trials_of(experiment, seeds=(0, 1))
    recipes = [
        [read_recipe(experiment.recipe, part) for part in trial.settings()] for trial in trials
    ]
    texts = {"".join(part.canonical() for part in parts) for parts in recipes}
    assert len(texts) >= len(experiment.arms)
    for parts in recipes:
        learn = [name for part in parts for name, one in part.policies.items() if one.training]
        assert sorted(learn) == sorted(experiment.policies), "each policy learns in one part"


def run(*rewards: float, seconds: float = 1.0) -> Run:
    points = [
        {"version": n, "seconds": n * seconds, "reward": reward, "episodes": 8.0 * n}
        for n, reward in enumerate(rewards, 1)
    ]
    return Run({}, {"default": points})


TIMES = Experiment(
    name="x",
    question="?",
    recipe="quickstart",
    arms=(Arm("slow"), Arm("fast")),
    measurements=(
        Measurement("seconds", lambda one: reached(one.points["default"], 0.9, "seconds", 2), 1),
    ),
)


def test_a_goal_is_reached_by_the_mean_of_versions() -> None:
    points = run(1.0, 0.0, 0.7, 1.0, 1.0).points["default"]
    assert reached(points, 0.85, "version", width=2) == 4
    assert reached(points, 0.85, "episodes", width=1) == 8
    assert reached(points, 0.95, "version", width=3) is None


def test_a_table_has_the_ratio_to_the_first_arm_seed_by_seed() -> None:
    slow = [run(0, 1, 1, seconds=scale) for scale in (2.0, 4.0)]
    fast = [run(1, 1, 1, seconds=scale) for scale in (1.0, 4.0)]
    rows = table(TIMES, {"slow": slow, "fast": fast})[2:]
    assert rows[0] == "| slow | 9.0 ± 38.1 | 1 |"
    ratios = (2.0 / 6.0, 8.0 / 12.0)
    middle = math.sqrt(math.prod(ratios))
    assert rows[1].startswith(f"| fast | 5.0 ± 38.1 | {middle:.2f} (")
    alone = table(TIMES, {"slow": slow[:1], "fast": fast[:1]})[2:]
    assert alone == ["| slow | 6.0 | 1 |", "| fast | 2.0 | 0.33 |"]
    never = table(TIMES, {"slow": [run(0, 0)] * 2, "fast": fast})[2:]
    assert never[0] == "| slow | never, in 2 runs | 1 |"
    assert never[1].endswith("| - |")


def test_parts_of_an_arm_follow_one_another_or_run_at_once() -> None:
    first, second = run(0, 1, seconds=3.0), Run({"b": 2}, {"other": run(1, 1, 1).points["default"]})
    both = one_after_the_other([first, second])
    assert both.summary == {"b": 2}
    assert both.points["default"] == first.points["default"]
    assert [point["seconds"] for point in both.points["other"]] == [7.0, 8.0, 9.0]
    assert [point["episodes"] for point in both.points["other"]] == [24.0, 32.0, 40.0]
    assert at_once([first, second]).points == {**first.points, **second.points}


def test_a_plot_shows_each_arm_as_far_as_all_its_seeds_went(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = {"slow": [run(0, 1, 1), run(0, 1)], "fast": [run(1, 1), run(1, 1)]}
    plots = [tmp_path / f"{n}.svg" for n in range(2)]
    for plot in plots:
        draw(TIMES, runs, plot)
    assert all("slow" in plot.read_text() for plot in plots)
    assert all(a.read_bytes() == b.read_bytes() for a, b in pairwise(plots))


def a_batch(version: int, *tasks: int, replayed: tuple[int, ...] = ()) -> BatchAssembled:
    ref = Ref(topic="t", partition=0, offset=0, digest=bytes(16))
    samples = [
        BatchSample(
            task=task, sample=sample, trajectory=ref, advantages=b"", tokens=1, longest=1,
            oldest_version=0, use=int(task in replayed),
        )
        for task in (*tasks, *replayed) for sample in range(2)
    ]  # fmt: skip
    return BatchAssembled(
        policy="default", version=version, recipe=bytes(32), seed=0, samples=tuple(samples),
        low_mark=0, groups_read=0, sampled_tokens=len(samples),
    )  # fmt: skip


def test_the_composition_of_a_run_is_counted() -> None:
    # Task n has equal rewards if n is a multiple of 4. The last batch does not count.
    groups = [a_closed_group(n, f"i{n}", 1.0, float(n % 4 == 0)) for n in range(40)]
    batches = [a_batch(n, 2 * n, 2 * n + 1) for n in range(1, SETTLED + 1)]
    batches += [
        a_batch(SETTLED + 1, 30, replayed=(2,)),
        a_batch(SETTLED + 2, 31, 32),
        a_batch(SETTLED + 3, 33),
    ]
    found = composition([*groups, *batches])
    assert (found["batches"], found["full"]) == (SETTLED + 3, 1.0)
    assert (found["replayed"], found["uses"]) == (0.25, 2)
    trained = {*range(2, 22), 30, 31, 32, 33}
    assert found["equal"] == sum(n % 4 == 0 for n in trained) / len(trained)
    assert found["wasted"] == 0.25
    short = composition([*groups, a_batch(1, 1), *batches[1:]])
    assert short["full"] == 1 - 1 / (SETTLED + 2)


def test_a_table_of_arms_that_stand_alone_has_no_ratio() -> None:
    facts = {"batches": 3.0, "drawn.mixed/useful": 0.2, "drawn.mixed/all": 0.3}
    runs = {arm.name: [Run({}, {}, {})] for arm in DATA_ALGORITHMS.arms}
    runs["all"] = [Run({}, {}, facts)]
    rows = table(DATA_ALGORITHMS, runs)
    assert {row.count("|") for row in rows} == {len(DATA_ALGORITHMS.measurements) + 2}
    assert rows[2].startswith("| none | 0 | 0.000 |")
    assert rows[2].endswith("| - | 0 |")
    assert drawn_useful(runs["all"][0]) == 0.4
