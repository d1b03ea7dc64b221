"""Which env worker gets a new environment, and where an attempt's actions go."""

from __future__ import annotations

import heapq
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas import packed
from headrace.schemas.events import (
    ActionRequested,
    EnvironmentLoad,
    EnvironmentUse,
    Failure,
    LoadReported,
    ObservationRecorded,
)
from headrace.services.agent.routing.action_routes import ActionRoutes, Location
from headrace.services.agent.routing.episode_locations import EpisodeLocations
from headrace.services.agent.routing.worker_choice import MOST_FORGOTTEN
from headrace.services.worker.worker_loads import GONE_AFTER, SUSPECT_AFTER

LATER_S = 1.0
"""All workers have reported by then, at 0."""


def reset(task: int = 0, sample: int = 0, use: str = "e") -> ActionRequested:
    return ActionRequested(
        task=task,
        sample=sample,
        call="1",
        index=0,
        kind="reset",
        environment=EnvironmentUse(use=use),
        expires_at=0,
        digest=bytes(16),
    )


def report(worker: int, busy: int = 0, *, slots: int = 64, **changes: int) -> LoadReported:
    """Worker n has the partitions 2n and 2n + 1."""
    fields = {"waiting": 0, "run_ms": 10, "open_ms": 1000, **changes}
    load = EnvironmentLoad(
        environment="e",
        partitions=packed.pack_i32([2 * worker, 2 * worker + 1]),
        slots=slots,
        busy=busy,
        **fields,
    )
    return LoadReported(worker=str(worker), number=0, every_ms=1000, pools=(), environments=(load,))


def routes(*reports: LoadReported, agents: float = 1.0) -> ActionRoutes:
    made = ActionRoutes(["e"], 64, lambda: agents)
    for one in reports:
        made.on_report(one, 0.0)
    return made


def chosen(made: ActionRoutes, action: ActionRequested, now_s: float = LATER_S) -> str:
    location = made.choose(action, (), now_s)
    assert location is not None
    assert location.partition // 2 == int(location.worker)
    return location.worker


def answer(
    partition: int, attempt: int = 0, worker: str = "0", code: str | None = None
) -> ObservationRecorded:
    failure = None
    if code is not None:
        failure = Failure(origin="infrastructure", code=code, message="", retryable=True)
    return ObservationRecorded(
        task=0,
        sample=0,
        attempt=attempt,
        call="1",
        index=0,
        digest=bytes(16),
        partition=partition,
        instance=worker,
        failure=failure,
    )


def test_without_reports_there_is_no_choice() -> None:
    assert routes().choose(reset(), (), LATER_S) is None
    assert routes(report(0)).choose(reset(), (), 0.5) is None, "others may not have reported yet"
    assert routes(report(0)).choose(reset(use="external"), (), LATER_S) is None
    assert routes(report(0)).choose(reset(), (), GONE_AFTER + 1.0) is None


def test_a_new_environment_goes_to_whoever_has_the_most_free() -> None:
    made = routes(report(0, 60), report(1, 10), report(2, 40))
    assert {chosen(made, reset(task)) for task in range(20)} == {"1"}


def test_what_was_sent_since_the_report_counts() -> None:
    made = routes(report(0), report(1), report(2), agents=2.0)
    found = Counter(chosen(made, reset(task)) for task in range(90))
    assert all(28 <= count <= 32 for count in found.values())
    made.on_report(report(0, 60), LATER_S)
    made.on_report(report(1, 60), LATER_S)
    made.on_report(report(2, 0), LATER_S)
    assert {chosen(made, reset(task)) for task in range(20)} == {"2"}


def test_if_all_are_full_it_goes_where_a_slot_is_free_first() -> None:
    slow, quick = report(0, 64, waiting=4, open_ms=9000), report(1, 64, waiting=20, open_ms=1000)
    assert chosen(routes(slow, quick), reset()) == "1"


def test_the_samples_of_a_task_share_a_worker_if_it_is_about_as_free_as_the_others() -> None:
    for task in range(12):
        made = routes(*(report(worker, slots=1000) for worker in range(4)))
        assert len({chosen(made, reset(task, sample)) for sample in range(8)}) == 1


def test_a_new_attempt_avoids_the_workers_of_the_earlier_ones() -> None:
    made = routes(report(0), report(1, 60))
    assert made.choose(reset(), {"0"}, LATER_S) in (Location("1", 2), Location("1", 3))
    assert made.choose(reset(), {"0", "1"}, LATER_S) is not None


def test_a_worker_that_fails_is_passed_over_and_one_that_lost_a_sandbox_is_not() -> None:
    made = routes(report(0), report(1, 60))
    made.on_answer(answer(0, worker="0", code="sandbox_lost"), LATER_S)
    assert chosen(made, reset()) == "0"
    made.on_answer(answer(0, worker="0", code="engine_unreachable"), LATER_S)
    assert chosen(made, reset()) == "1"
    assert chosen(made, reset(), LATER_S + 1.1) == "0"


def test_a_silent_worker_is_passed_over() -> None:
    made = routes(report(0), report(1, 60))
    made.on_report(report(1, 60), SUSPECT_AFTER)
    assert chosen(made, reset(), SUSPECT_AFTER + 0.1) == "1"


def test_failures_of_strangers_take_bounded_memory() -> None:
    made = routes(report(0))
    for worker in range(10 * MOST_FORGOTTEN):
        made.on_answer(answer(0, worker=f"s{worker}", code="broken"), LATER_S)
    assert len(made._failing) <= MOST_FORGOTTEN


@pytest.mark.parametrize("live", [60, 190, 300])
def test_workers_get_environments_in_proportion_to_their_speeds(live: int) -> None:
    """A constant number of environments on three workers of 64 slots. The slower the worker, the
    longer an environment is open. Reports come each second."""
    speeds, slots, random = (1.0, 0.6, 0.3), 64, Random(7)
    made = ActionRoutes(["e"], 64)
    busy, waiting, done = Counter[str](), {str(n): list[int]() for n in range(3)}, Counter[str]()
    ends: list[tuple[float, int, str]] = []
    now_s, sent, next_report = 0.0, 0, 0.0

    def start(worker: str) -> None:
        nonlocal sent
        busy[worker] += 1
        seconds = random.uniform(2.0, 6.0) / speeds[int(worker)]
        sent += 1
        heapq.heappush(ends, (now_s + seconds, sent, worker))

    def send(task: int) -> None:
        location = made.choose(reset(task), (), now_s)
        worker = location.worker if location else str(task % 3)
        if busy[worker] < slots:
            start(worker)
        else:
            waiting[worker].append(task)

    for task in range(live):
        send(task)
    while sent < 12_000:
        if next_report <= ends[0][0]:
            now_s = next_report
            next_report += 1.0
            for number, speed in enumerate(speeds):
                mean = int(4000 / speed)
                load = {"waiting": len(waiting[str(number)]), "open_ms": mean}
                made.on_report(report(number, busy[str(number)], **load), now_s)
            continue
        now_s, _, worker = heapq.heappop(ends)
        busy[worker] -= 1
        made.on_close("e", worker)
        done[worker] += now_s > 60.0
        if waiting[worker]:
            waiting[worker].pop()
            start(worker)
        send(live + sent)
    for number, speed in enumerate(speeds):
        share = done[str(number)] / done.total()
        assert abs(share / (speed / sum(speeds)) - 1) < 0.1


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 3)), max_size=12),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=4),
)
def test_every_owner_sends_an_attempts_actions_to_the_same_place(
    log: list[tuple[int, int]], sent: list[tuple[int, int]]
) -> None:
    """Whatever resets an owner has sent itself: the first answer in the log decides."""
    mine, successor = EpisodeLocations(), EpisodeLocations()
    for attempt, partition in sent:
        mine.sent(attempt, Location("w", partition))
    open_at: dict[int, set[int]] = {}
    closed: dict[int, set[int]] = {}
    for attempt, partition in log:
        other = mine.on_answer(answer(partition, attempt))
        assert other == successor.on_answer(answer(partition, attempt))
        if partition >= 0:
            open_at.setdefault(attempt, set()).add(partition)
        if other:
            closed.setdefault(attempt, set()).add(partition)
    for attempt, partitions in open_at.items():
        location = mine.location(attempt)
        assert location is not None
        assert location == successor.location(attempt)
        assert partitions - closed.get(attempt, set()) == {location.partition}


def test_an_environment_that_answers_after_the_close_of_another_one_is_closed() -> None:
    locations = EpisodeLocations()
    locations.sent(0, Location("w", 1))
    locations.closed(0, 1)
    assert locations.on_answer(answer(0, 0))
    assert not locations.on_answer(answer(1, 0))
    assert not locations.on_answer(answer(0, 1))  # Another attempt has another environment.


def test_an_environment_that_answers_once_its_episode_is_over_is_closed() -> None:
    locations = EpisodeLocations()
    locations.sent(0, Location("w", 1))
    locations.end()
    assert locations.on_answer(answer(1, 0))
