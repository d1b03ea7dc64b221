"""Which workers may get prompts, as their reports say."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas import packed
from headrace.schemas.events import LoadReported, PoolLoad
from headrace.services.worker.worker_loads import LONGEST_S, MOST_WORKERS, WorkerLoads


def report(worker: str, number: int = 0, **changes: object) -> LoadReported:
    fields: dict[str, object] = {
        "policy": "p",
        "partitions": packed.pack_i32([1, 2]),
        "slots": 8,
        "busy": 2,
        "waiting": 0,
        "run_ms": 100,
    }
    leaving = bool(changes.pop("leaving", False))
    pools = (PoolLoad.model_validate(fields | changes),)
    return LoadReported(worker=worker, number=number, every_ms=1000, pools=pools, leaving=leaving)


def names(loads: WorkerLoads, now_s: float, policy: str = "p") -> list[str]:
    return sorted(one.worker for one in loads.of(policy, now_s))


def test_a_missed_report_changes_nothing_and_several_end_a_worker() -> None:
    loads = WorkerLoads(["p"], 16)
    for worker in "ab":
        loads.on_report(report(worker), 0.0)
    assert names(loads, 2.9) == ["a", "b"], "one or two reports are late"
    loads.on_report(report("a", 1), 2.9)
    assert names(loads, 3.0) == ["a"], "b is suspected"
    assert loads.is_served("p", 3.0)
    loads.on_report(report("b", 1), 4.0)
    assert names(loads, 4.0) == ["a", "b"]
    assert names(loads, 9.0) == ["a", "b"], "all are suspected, so they are all there is"
    assert not loads.is_served("p", 9.0)
    assert names(loads, 13.0) == ["b"]
    assert names(loads, 14.0) == []


def test_who_leaves_or_has_no_slots_or_partitions_gets_nothing() -> None:
    loads = WorkerLoads(["p"], 16)
    loads.on_report(report("a", partitions=b""), 0.0)
    loads.on_report(report("b", slots=0), 0.0)
    loads.on_report(report("c"), 0.0)
    assert names(loads, 0.0) == ["c"]
    loads.on_report(report("c", 1, leaving=True), 0.5)
    assert names(loads, 0.5) == []
    assert not loads.is_served("p", 0.5)
    assert loads.waiting_per_slot("p", 0.5) == 0


def test_a_worker_that_no_longer_serves_a_policy_gets_nothing_for_it() -> None:
    loads = WorkerLoads(["p", "q"], 16)
    loads.on_report(report("a"), 0.0)
    loads.on_report(report("a", 1, policy="q"), 0.5)
    assert (names(loads, 0.5), names(loads, 0.5, "q")) == ([], ["a"])


def test_waiting_prompts_are_counted_for_each_slot_of_the_pool() -> None:
    loads = WorkerLoads(["p"], 16)
    loads.on_report(report("a", slots=6, waiting=10), 0.0)
    loads.on_report(report("b", slots=2, waiting=6), 0.0)
    assert loads.waiting_per_slot("p", 0.0) == 2.0
    assert loads.waiting_per_slot("p", 0.0, 4) == 2.0, "four slots are free"
    assert loads.waiting_per_slot("p", 0.0, 12) == 3.0


def test_reports_of_strangers_take_bounded_memory() -> None:
    loads = WorkerLoads(["p"], 16)
    for number in range(MOST_WORKERS + 5):
        loads.on_report(report(f"w{number}", policy="unknown" if number % 2 else "p"), 0.0)
        loads.on_report(report(f"v{number}"), 0.0)
    assert len(loads.of("p", 0.0)) == MOST_WORKERS
    assert not loads.of("unknown", 0.0)
    loads.on_report(report("w0", 1, slots=3), 1.0)
    assert next(one for one in loads.of("p", 1.0) if one.worker == "w0").load.slots == 3
    silent = report("x").model_copy(update={"every_ms": 2**31 - 1})
    loads = WorkerLoads(["p"], 16)
    loads.on_report(silent, 0.0)
    assert names(loads, 49.0) == ["x"]
    assert names(loads, 50.0) == []


def test_partitions_that_do_not_exist_are_never_used() -> None:
    loads = WorkerLoads(["p"], 16)
    loads.on_report(report("a", partitions=packed.pack_i32([-1, 16, 15, 3, 3, 2**31 - 1])), 0.0)
    loads.on_report(report("b", partitions=b"odd"), 0.0)
    (known,) = loads.of("p", 0.0)
    assert (known.worker, known.partitions) == ("a", [3, 15])


def test_a_worker_may_report_more_often_than_before() -> None:
    loads = WorkerLoads(["p"], 16)
    for worker in "ab":
        loads.on_report(report(worker), 0.0)
    assert names(loads, 0.0) == ["a", "b"]
    loads.on_report(report("b", 1).model_copy(update={"every_ms": 300}), 0.1)
    assert names(loads, 1.5) == ["a"]


def test_the_longest_time_between_reports_is_that_of_workers_in_use() -> None:
    loads = WorkerLoads(["p"], 16)
    assert loads.longest_s("p", 0.0) == 0
    loads.on_report(report("a"), 0.0)
    loads.on_report(report("b").model_copy(update={"every_ms": 9000}), 0.0)
    assert loads.longest_s("p", 0.0) == LONGEST_S
    loads.on_report(report("b", 1, leaving=True), 0.5)
    assert loads.longest_s("p", 0.5) == 1


reports = st.tuples(
    st.sampled_from("abc"),
    st.sampled_from("pppppq"),
    st.sampled_from([4, 4, 4, 0]),
    st.sampled_from([packed.pack_i32([1]), packed.pack_i32([2, 99]), b""]),
    st.sampled_from([False] * 5 + [True]),
    st.sampled_from([300, 1000]),
    st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.5, 11.0]),
)


@settings(max_examples=200)
@given(st.lists(reports, max_size=30))
def test_who_is_usable_follows_from_the_newest_reports_alone(found: list[Any]) -> None:
    """What is kept between two questions changes no answer."""
    asked, now_s = WorkerLoads(["p", "q"], 16), 100.0
    seen: list[tuple[LoadReported, float]] = []
    for number, (worker, policy, slots, partitions, leaving, every_ms, after_s) in enumerate(found):
        now_s += after_s
        fields = {"policy": policy, "slots": slots, "partitions": partitions, "busy": number}
        made = report(worker, number, leaving=leaving, **fields)
        seen.append((made.model_copy(update={"every_ms": every_ms}), now_s))
        asked.of("p", now_s)
        asked.on_report(*seen[-1])
        fresh = WorkerLoads(["p", "q"], 16)
        for one in seen:
            fresh.on_report(*one)
        for name in "pq":
            assert sorted(asked.of(name, now_s), key=lambda one: one.worker) == sorted(
                fresh.of(name, now_s), key=lambda one: one.worker
            )
