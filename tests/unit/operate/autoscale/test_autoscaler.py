"""When a pool of workers grows and shrinks, and when it does not."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas import packed
from headrace.schemas.events import LoadReported, PolicyPublished, PoolLoad
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.tables import RecipeError
from headrace.services.operate.autoscale.autoscaler import Autoscaler, Scaling
from headrace.services.operate.autoscale.scaling_rule import fill, scale_by_load, scale_by_wait

WINDOW_S, START_S = 100.0, 400.0
SLOTS = 10


@pytest.mark.parametrize(
    ("workers", "wait", "used", "wanted"),
    [
        (6, 0.269, 1.0, 9),  # 6 / 0.731 = 8.2
        (6, 0.25, 1.0, 8),  # exactly
        (8, 0.10, 0.1, 8),  # neither starved nor sated
        (8, 0.05, 0.1, 8),
        (11, 0.021, 0.80, 10),  # 9.68
        (11, 0.0, 1.0, 11),  # a sated pool never grows
        (10, 0.0, 0.5, 6),  # 5.5
        (10, 1.0, 1.0, 1000),  # bounded by the caller
        (1, 0.5, 0.0, 2),
        (5, 0.0, 0.0, 0),  # bounded by the caller
    ],
)
def test_the_rule_is_astraflow_s(workers: int, wait: float, used: float, wanted: int) -> None:
    assert scale_by_wait(workers, wait, used) == wanted


@given(st.integers(1, 1000), st.floats(0, 1), st.floats(0, 1))
def test_the_rule_follows_its_formula(workers: int, wait: float, used: float) -> None:
    wanted = scale_by_wait(workers, wait, used)
    if 0.10 < wait <= 0.99:
        assert wanted == pytest.approx(ceil(workers / (1 - wait)), abs=1)
        assert wanted > workers
    elif wait < 0.05:
        assert wanted <= workers
        assert wanted >= min(workers, workers * used * 1.1 - 1e-6)
    elif wait <= 0.10:
        assert wanted == workers


@given(st.integers(1, 1000), st.floats(0, 10))
def test_a_pool_that_was_sized_for_its_load_stays(workers: int, load: float) -> None:
    sized = max(1, scale_by_load(workers, load))
    assert scale_by_load(sized, load * workers / sized) <= sized + 1
    assert fill(workers, 1.0) == ceil(round(workers * 1.1, 6))


def recipe_of(training: bool = True, **scale: float) -> Recipe:
    return parse_recipe(
        {
            "name": "test",
            "workers": {
                "inference": 4,
                "autoscale": {"most": 12, "window_s": WINDOW_S, "start_s": START_S, **scale},
            },
            "policies": {"p": {"model": "tiny-llama", "training": {} if training else False}},
            "tasks": {
                "roles": {"policy": "p"},
                **({} if training else {"purpose": "evaluate"}),
            },
        },
        "the test",
    )


class Pool:
    """A run that is scaled. Its trainer makes a version each 10 s."""

    def __init__(self, training: bool = True, known: bool = True) -> None:
        recipe = recipe_of(training)
        assert recipe.workers.autoscale is not None
        self.now_s = 1000.0
        self.scaler = Autoscaler(recipe, recipe.workers.autoscale, self.now_s, 4 if known else None)
        self.version = 0

    def run(
        self,
        seconds: int,
        workers: int = 4,
        wait: float | None = 0.0,
        busy: float = 1.0,
        waiting: int = 0,
        leaving: int = 0,
        stale: float = 0.0,
    ) -> list[Scaling]:
        """What is decided in so many seconds. Without `wait`, the trainer publishes nothing."""
        found = []
        for _ in range(seconds):
            self.now_s += 1
            for number in range(workers + leaving):
                self.report(number, busy, waiting, leaving=number >= workers)
            if wait is not None and self.now_s % 10 == 0:
                self.publish(wait, stale)
            found.append(self.scaler.decide(self.now_s))
        return found

    def report(self, number: int, busy: float, waiting: int, *, leaving: bool) -> None:
        load = PoolLoad(
            policy="p",
            partitions=packed.pack_i32([number]),
            slots=SLOTS,
            busy=round(SLOTS * busy),
            waiting=waiting,
            run_ms=1,
        )
        self.scaler.on_report(
            LoadReported(
                worker=str(number), number=0, every_ms=1000, pools=(load,), leaving=leaving
            ),
            self.now_s,
        )

    def publish(self, wait: float, stale: float) -> None:
        self.version += 1
        self.scaler.on_published(
            PolicyPublished(
                policy="p",
                version=self.version,
                status="trained",
                digest=bytes(32),
                full_version=0,
                wait_s=10 * wait,
                step_s=10 * (1 - wait),
                metrics={"groups": 1 - stale, "dropped_groups_stale": stale},
            ),
            self.now_s,
        )


def wanted(found: list[Scaling]) -> list[int]:
    """The different numbers, in their order."""
    return [
        one.wanted for n, one in enumerate(found) if n == 0 or found[n - 1].wanted != one.wanted
    ]


def test_a_starved_trainer_gets_more_workers_after_a_window_and_not_before() -> None:
    pool = Pool()
    assert wanted(pool.run(95, wait=0.5, waiting=20)) == [4]
    assert wanted(pool.run(25, wait=0.5, waiting=20)) == [4, 8]


def test_nothing_is_decided_while_new_workers_load() -> None:
    pool = Pool()
    pool.run(115, wait=0.5, waiting=20)
    assert wanted(pool.run(300, workers=4, wait=0.5, waiting=20)) == [8]
    # With the new workers the trainer hardly waits, whatever was measured before they came.
    assert wanted(pool.run(200, workers=8, wait=0.07)) == [8]


def test_workers_that_never_come_are_given_up() -> None:
    pool = Pool()
    pool.run(115, wait=0.5, waiting=20)
    found = pool.run(int(START_S) + 10, workers=6, wait=0.07)
    assert wanted(found) == [8, 6]
    assert "did not come" in next(one.reason for one in found if one.wanted == 6)


def test_a_pool_that_others_wait_for_grows_only_as_far_as_prompts_wait() -> None:
    pool = Pool()
    # Half of the trainer's time, but of 40 slots 36 are busy and no prompt waits.
    found = pool.run(150, wait=0.5, busy=0.9)
    assert wanted(found) == [4]
    assert any("environments" in one.reason for one in found)


def test_a_sated_pool_shrinks_to_what_is_used_and_stays_there() -> None:
    pool = Pool()
    assert wanted(pool.run(120, wait=0.0, busy=0.5)) == [4, 3]
    # The same work on three workers.
    assert wanted(pool.run(400, workers=3, wait=0.0, busy=0.7, leaving=1)) == [3]


def test_work_that_gets_too_stale_is_not_used() -> None:
    pool = Pool()
    assert wanted(pool.run(120, wait=0.0, busy=1.0, stale=0.5)) == [4, 3]


def test_without_versions_nothing_changes() -> None:
    pool = Pool()
    assert wanted(pool.run(2000, wait=None, waiting=20)) == [4]


def test_versions_from_before_the_window_do_not_count() -> None:
    pool = Pool()
    pool.now_s += 5
    pool.publish(1.0, 0.0)
    assert wanted(pool.run(150, wait=0.07)) == [4]


def test_bounds_hold() -> None:
    pool = Pool()
    assert wanted(pool.run(120, wait=0.95, waiting=500)) == [4, 12]
    pool = Pool()
    found = [pool.run(120, workers=n, wait=0.0, busy=0.0)[-1].wanted for n in (4, 1)]
    assert found == [1, 1]


def test_one_of_many_workers_may_be_missing() -> None:
    pool = Pool()
    pool.run(120, wait=0.95, waiting=500)
    # 11 of 12 report: what they show still counts.
    assert wanted(pool.run(250, workers=11, wait=0.0, busy=0.5)) == [12, 7]


def test_a_run_without_a_trainer_follows_its_prompts() -> None:
    pool = Pool(training=False)
    assert wanted(pool.run(120, wait=None, waiting=10)) == [4, 8]
    pool = Pool(training=False)
    assert wanted(pool.run(120, wait=None, busy=0.5)) == [4, 3]


def test_the_workers_that_report_first_are_the_pool_if_no_number_is_known() -> None:
    pool = Pool(known=False)
    assert wanted(pool.run(60, workers=7, wait=0.07)) == [7]
    pool = Pool(known=False)
    assert wanted(pool.run(60, workers=0, wait=None)) == [4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "sync"}, "trainers wait for every batch"),
        ({"pool_partitions": 4}, "more than pool_partitions"),
        ({"workers": {"inference": 13, "autoscale": {"most": 12}}}, "not between"),
        ({"workers": {"price_per_hour": {"gpu": 1.0}}}, "no such service"),
        ({"workers": {"price_per_hour": {"inference-q": 1.0}}}, "no such service"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    base = {
        "name": "test",
        "policies": {"p": {"model": "tiny-llama", "training": {}}},
        "tasks": {"roles": {"policy": "p"}},
        "workers": {"autoscale": {"most": 12}},
    }
    with pytest.raises(RecipeError, match=message):
        parse_recipe({**base, **change}, "the test")
