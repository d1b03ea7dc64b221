"""How long the dashboard's reader rests, on machines whose load is known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from headrace.schemas.recipe.recipe import Recipe
from headrace.services.log.event_log import EventLog
from headrace.services.operate.dashboard.index import spare_time
from headrace.services.operate.dashboard.index.index_follower import IndexFollower
from headrace.services.operate.dashboard.index.spare_time import SHARE, SpareTime, idle_seconds
from headrace.services.operate.dashboard.views.run_views import run_tree

TURN_S = 0.02
RECIPE = Recipe.model_validate({"name": "spare", "policies": {"default": {"model": "tiny-llama"}}})


class Machine:
    """Processors that others use for a share of the time, and a reader that always has work."""

    def __init__(self, others: Callable[[float], float], processors: int = 2) -> None:
        """`others` says how many processors are in use by others at a time."""
        self.others, self.processors = others, processors
        self.at = self.took = self.was_idle = 0.0
        self.spare = SpareTime(
            processors, lambda: self.at, lambda: self.took, lambda: self.was_idle
        )

    def pass_time(self, seconds: float, mine: float) -> None:
        self.at += seconds
        self.took += mine
        used = min(self.processors, self.others(self.at)) * seconds + mine
        self.was_idle += max(0.0, self.processors * seconds - used)

    def read_until(self, at: float) -> float:
        """Returns the processor time that the reader took per second."""
        began, before = self.at, self.took
        while self.at < at:
            self.pass_time(TURN_S, TURN_S)
            while rest_s := self.spare.rest_s():
                assert rest_s <= 0.25
                self.pass_time(rest_s, 0.0)
        return (self.took - before) / (self.at - began)


@pytest.mark.parametrize("processors", [1, 2, 8])
def test_a_busy_machine_loses_no_more_than_a_share(processors: int) -> None:
    machine = Machine(lambda _: processors, processors)
    machine.read_until(5)
    assert machine.read_until(65) <= SHARE * processors * 1.1


def test_a_machine_with_an_idle_processor_besides_is_read_without_rests() -> None:
    assert Machine(lambda _: 2.5, 4).read_until(30) == pytest.approx(1.0)


def test_a_reader_that_itself_makes_the_machine_busy_reads_half_of_the_time() -> None:
    assert Machine(lambda _: 1.0, 2).read_until(30) > 0.45
    assert Machine(lambda _: 0.0, 1).read_until(30) > 0.45


def test_a_large_machine_is_read_without_rests_even_if_it_is_busy() -> None:
    assert Machine(lambda _: 128, 128).read_until(30) == pytest.approx(1.0)


def test_reading_goes_on_as_soon_as_the_machine_is_idle_again() -> None:
    machine = Machine(lambda at: 2.0 if at < 60 else 0.0)
    machine.read_until(60)
    before = machine.took
    machine.read_until(62)
    assert machine.took - before > 1.4, "it goes on half a second later"


def test_a_few_records_a_second_need_no_rest() -> None:
    machine = Machine(lambda _: 2.0)
    machine.read_until(5)
    for _ in range(1_000):
        machine.pass_time(0.1, 0.1 * SHARE)
        machine.spare.rest_s()
    for _ in range(200):
        machine.pass_time(0.1, 0.1 * SHARE)
        assert machine.spare.rest_s() < 0.02


def test_what_a_page_took_delays_the_reader_for_ten_seconds_at_most() -> None:
    machine = Machine(lambda _: 2.0)
    machine.read_until(5)
    machine.pass_time(3.0, 3.0)
    began = machine.at
    while rest_s := machine.spare.rest_s():
        machine.pass_time(rest_s, 0.0)
    assert machine.at - began == pytest.approx(10.0, abs=0.01)


def test_a_machine_that_tells_nothing_counts_as_busy() -> None:
    machine = Machine(lambda _: 0.0)
    machine.spare = SpareTime(2, lambda: machine.at, lambda: machine.took, lambda: None)
    machine.read_until(5)
    assert machine.read_until(65) <= SHARE * 2 * 1.1


def test_idle_seconds_are_read_from_linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(spare_time, "STAT", stat)
    assert idle_seconds() is None
    stat.write_text("cpu  100 20 300 4000 500 0 0 0 0 0\ncpu0 1 1 1 1 1\n")
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    assert idle_seconds() == 45.0
    stat.write_text("nonsense")
    assert idle_seconds() is None


class Rests(SpareTime):
    def __init__(self, rests: list[float]) -> None:
        super().__init__()
        self.rests = rests

    def rest_s(self) -> float:
        return self.rests.pop(0)


def test_a_follower_rests_once_it_has_caught_up_and_says_so() -> None:
    async def scenario() -> None:
        spare = Rests([0.001, 60.0])
        follower = IndexFollower(cast("EventLog", None), RECIPE, spare)
        follower.newest_at = 1_000.0
        await follower._give_way()
        assert len(spare.rests) == 2, "the first reading does not rest"
        follower.caught_up.set()
        resting = asyncio.create_task(follower._give_way())
        while spare.rests:
            await asyncio.sleep(0.001)
        assert run_tree("name", follower)["index"]["as_of"] == 1_000.0
        resting.cancel()
        spare.rests = [0.001, 0.0]
        await follower._give_way()
        assert run_tree("name", follower)["index"]["as_of"] is None

    asyncio.run(scenario())
