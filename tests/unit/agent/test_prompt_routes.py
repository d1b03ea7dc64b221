"""Which worker a prompt goes to."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas import packed
from headrace.schemas.events import (
    Failure,
    GenerationCompleted,
    GenerationRequested,
    LoadReported,
    PoolLoad,
    Sampling,
)
from headrace.services.agent.routing.prompt_routes import PromptRoutes
from headrace.services.agent.routing.worker_choice import (
    IN_ONE,
    MOST_FORGOTTEN,
    USED,
    partition_for,
)
from headrace.services.worker.worker_loads import GONE_AFTER

LATER_S = 1.0
"""All workers have reported by then, at 0."""


def prompt(task: int = 0, sample: int = 0, *, pinned: int | None = None) -> GenerationRequested:
    return GenerationRequested(
        task=task,
        sample=sample,
        call="1",
        policy="p",
        pinned=pinned,
        sampling=Sampling(max_tokens=1),
        expires_at=0,
        digest=bytes(16),
    )


def report(
    worker: int, number: int = 0, *, slots: int = 4, busy: int = 0, waiting: int = 0, ms: int = 1000
) -> LoadReported:
    """Worker n has the partitions 10 n to 10 n + 2."""
    load = PoolLoad(
        policy="p",
        partitions=packed.pack_i32([10 * worker + each for each in range(3)]),
        slots=slots,
        busy=busy,
        waiting=waiting,
        run_ms=ms,
    )
    return LoadReported(worker=str(worker), number=number, every_ms=1000, pools=(load,))


def routes(*reports: LoadReported, agents: float = 1.0) -> PromptRoutes:
    made = PromptRoutes(["p"], 10_000, lambda: agents)
    for one in reports:
        made.on_report(one, 0.0)
    return made


def chosen(made: PromptRoutes, request: GenerationRequested, home: int | None = None) -> int | None:
    """The worker that a prompt would go to."""
    with made.route(request, None if home is None else str(home), LATER_S) as partition:
        return None if partition is None else partition // 10


def test_the_key_decides_without_reports_and_for_a_pinned_version() -> None:
    assert chosen(routes(), prompt()) is None
    assert chosen(routes(report(1)), prompt(pinned=3)) is None
    assert chosen(routes(report(1)), prompt()) == 1


def test_a_prompt_goes_to_the_worker_that_answered_the_last_one() -> None:
    made = routes(*(report(worker) for worker in range(4)))
    assert [chosen(made, prompt(task=9), home) for home in range(4)] == [0, 1, 2, 3]


def test_the_samples_of_a_task_begin_at_one_worker_and_the_tasks_at_several() -> None:
    made = routes(*(report(worker) for worker in range(4)))
    begun = [{chosen(made, prompt(task, sample)) for sample in range(8)} for task in range(32)]
    assert all(len(workers) == 1 for workers in begun)
    assert set.union(*begun) == {0, 1, 2, 3}


@pytest.mark.parametrize(("busy", "waiting", "stays"), [(4, 0, True), (4, 7, True), (4, 9, False)])
def test_it_waits_there_for_a_while_if_all_are_busy(busy: int, waiting: int, stays: bool) -> None:
    made = routes(report(0, busy=busy, waiting=waiting), report(1, busy=4))
    assert (chosen(made, prompt(), home=0) == 0) is stays


@pytest.mark.parametrize(("busy", "stays"), [(2, True), (3, False), (4, False)])
def test_it_leaves_a_full_worker_sooner_if_another_one_is_free(busy: int, stays: bool) -> None:
    made = routes(report(0, busy=busy), report(1, busy=0))
    assert (chosen(made, prompt(), home=0) == 0) is stays


def test_the_slow_one_of_two_free_workers_gets_less() -> None:
    made = routes(report(0, slots=8), report(1, slots=8, ms=3000))
    with ExitStack() as sent:
        found = [sent.enter_context(made.route(prompt(n), None, LATER_S)) for n in range(400)]
    slow = [one is not None and one // 10 for one in found].count(1)
    assert 95 <= slow <= 115


def test_own_prompts_count_until_they_are_answered() -> None:
    made = routes(report(0, slots=1), report(1, slots=1))
    with made.route(prompt(), "0", LATER_S), made.route(prompt(), "0", LATER_S) as second:
        assert second is not None
        assert second // 10 == 1
    assert chosen(made, prompt(), home=0) == 0


def test_own_prompts_count_for_other_agents_too_until_the_next_report() -> None:
    both = report(0, slots=8), report(1, slots=8)
    for agents, expected in ((1.0, 0), (8.0, 1)):
        made = routes(*both, agents=agents)
        with made.route(prompt(), "0", LATER_S):
            assert chosen(made, prompt(), home=0) == expected
            made.on_report(report(0, 1, slots=8, busy=1), LATER_S)
            assert chosen(made, prompt(), home=0) == 0, "the report counts those of all"


def test_a_worker_without_answers_counts_as_an_ordinary_one() -> None:
    made = routes(report(0, busy=4, waiting=9), report(1, ms=0))
    assert chosen(made, prompt(), home=0) == 1


def test_workers_that_have_gone_are_forgotten() -> None:
    made = PromptRoutes(["p"], 10_000)
    for worker in range(10 * MOST_FORGOTTEN):
        made.on_report(report(worker), float(2 * GONE_AFTER * worker))
    assert len(made._sent_at_report) <= 2 * MOST_FORGOTTEN
    with made.route(prompt(), None, 2.0 * GONE_AFTER * (worker + 1)) as partition:
        assert partition is None


@given(
    loads=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 40), st.integers(0, 9000)),
        min_size=1,
        max_size=30,
    ),
    prompts=st.lists(st.tuples(st.integers(0, 50), st.integers(-1, 30)), max_size=40),
)
def test_a_prompt_always_goes_to_a_partition_of_a_worker_with_slots(
    loads: list[tuple[int, int, int, int]], prompts: list[tuple[int, int]]
) -> None:
    made = routes(
        *(
            report(worker, slots=slots, busy=min(busy, slots), waiting=waiting, ms=ms)
            for worker, (slots, busy, waiting, ms) in enumerate(loads)
        )
    )
    able = {worker for worker, (slots, *_) in enumerate(loads) if slots}
    with ExitStack() as sent:
        for task, home in prompts:
            found = sent.enter_context(made.route(prompt(task), str(home), LATER_S))
            assert (found is None) is (not able)
            assert found is None or (found // 10 in able and found % 10 < 3)
    assert not made._sent


def answer(worker: int, code: str | None = None, *, retryable: bool = True) -> GenerationCompleted:
    failure = None
    if code is not None:
        failure = Failure(origin="infrastructure", code=code, retryable=retryable)
    return GenerationCompleted(
        task=0,
        sample=0,
        call="1",
        policy="p",
        worker=str(worker),
        digest=bytes(16),
        finish="stop" if failure is None else "failed",
        failure=failure,
    )


def test_a_worker_that_fails_is_passed_over_for_longer_and_longer() -> None:
    made = routes(report(0), report(1))

    def goes_to(now_s: float) -> int | None:
        for worker in range(2):
            made.on_report(report(worker, int(now_s)), now_s)
        with made.route(prompt(), "0", now_s) as partition:
            return None if partition is None else partition // 10

    now_s = 1.0
    for avoided_s in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        assert goes_to(now_s) == 0
        for _ in range(5):  # of prompts that fail together, the first one counts
            made.on_answer(answer(0, "engine_failed"), now_s)
        assert goes_to(now_s + 0.9 * avoided_s) == 1
        now_s += avoided_s
    made.on_answer(answer(0), now_s)
    assert goes_to(now_s) == 0
    made.on_answer(answer(0, "engine_failed"), now_s)
    assert goes_to(now_s + 1.0) == 0, "it begins again with a second"


def test_if_all_workers_fail_all_are_used() -> None:
    made = routes(report(0), report(1))
    for worker in range(2):
        made.on_answer(answer(worker, "engine_failed"), LATER_S)
    assert chosen(made, prompt(), home=1) == 1


def test_what_expired_is_no_failure_of_the_worker() -> None:
    made = routes(report(0), report(1))
    made.on_answer(answer(0, "expired", retryable=False), LATER_S)
    assert chosen(made, prompt(), home=0) == 0


def test_the_key_decides_until_all_workers_had_time_to_report() -> None:
    made = PromptRoutes(["p"], 10_000)
    made.on_report(report(3, waiting=200), 7.0)
    with made.route(prompt(), None, 7.9) as partition:
        assert partition is None
    with made.route(prompt(), None, 8.0) as partition:
        assert partition is not None


def test_failing_of_strangers_take_bounded_memory() -> None:
    made = routes(report(0), report(1))
    made.on_answer(answer(0, "engine_failed"), LATER_S)
    for worker in range(10 * MOST_FORGOTTEN):
        made.on_answer(answer(1000 + worker, "engine_failed"), LATER_S)
    assert len(made._failing) <= 2 * MOST_FORGOTTEN
    assert chosen(made, prompt(), home=0) == 1


@pytest.mark.parametrize(
    ("load", "most"), [(0, 1), (IN_ONE - 1, 1), (IN_ONE, 2), (3 * IN_ONE, 4), (1e6, USED)]
)
def test_the_more_a_worker_has_the_more_of_its_partitions_are_used(load: float, most: int) -> None:
    held = [3, 5, 7, 9, 11, 13]
    used = {partition_for(f"{task}/0", held, load) for task in range(200)}
    assert used == set(held[:most])
    assert {partition_for(f"{task}/0", held[:1], load) for task in range(9)} == {3}
