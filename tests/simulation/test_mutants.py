"""Each mutant is caught, by what it breaks, on its recorded seed or one of the first few; the sound
code passes there."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from tests.simulation.mutants.catalogue import MUTANTS
from tests.simulation.mutants.mutant import Mutant, StaleMutant
from tests.simulation.mutants.trial import Trial, read_recorded, simulated, try_apart, workers

RECORDED = read_recorded()
MORE = range(8)
"""Seeds that are tried after the recorded one: every change of the code moves what a seed does."""
SOUND = sorted({(trial.faults, trial.seed) for trial in RECORDED.values()})


@pytest.fixture(scope="module")
def trials(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Trial]]]:
    """A trial of each mutant that is asked for, under way: as many at once as there are cores."""
    wanted = [one.callspec.params for one in request.session.items if hasattr(one, "callspec")]
    with workers() as pool:
        yield {
            name: pool.submit(
                try_apart, MUTANTS[name], RECORDED[name].faults, [RECORDED[name].seed, *MORE]
            )
            for name in [params["name"] for params in wanted if "name" in params]
            if name in RECORDED and name in MUTANTS
        }
        pool.shutdown(cancel_futures=True)


def test_every_mutant_is_recorded_and_there_are_enough() -> None:
    assert RECORDED.keys() == MUTANTS.keys(), "run: python -m tests.simulation.mutants --record"
    assert len(MUTANTS) >= 30


@pytest.mark.parametrize("name", MUTANTS)
def test_the_text_that_a_mutant_replaces_is_in_the_code(name: str) -> None:
    MUTANTS[name].source()


@pytest.mark.long
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str, trials: dict[str, Future[Trial]]) -> None:
    trial = trials[name].result()
    assert trial.caught(MUTANTS[name]), (
        f"{name} slips through: without it the code no longer keeps this: "
        f"{MUTANTS[name].sentence} What complained: {trial.complaint or 'nothing'}. "
        f"Repeat: {trial.repeat}. Hunt anew: python -m tests.simulation.mutants {name} --record"
    )


@pytest.mark.long
@pytest.mark.parametrize(("faults", "seed"), SOUND)
def test_the_sound_code_passes_where_mutants_are_caught(faults: tuple[str, ...], seed: int) -> None:
    assert simulated(seed, faults) == []


def test_a_mutant_whose_text_is_gone_says_so() -> None:
    lost = Mutant("lost", "It is so.", "services/base/clock.py", "not there", "", ("I1: ",))
    with pytest.raises(StaleMutant, match="occurs 0 times"):
        lost.source()
