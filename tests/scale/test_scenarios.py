"""Each scenario in small: what it shows holds, and without a rule of the product it does not."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from headrace.services.agent.routing import prompt_routes
from headrace.services.worker import worker_loads
from tests.scale.catalogue import FAR, SPEEDS, heterogeneous, ramp, regions, spot
from tests.scale.deployment_world import DeploymentWorld, simulate
from tests.scale.fleet import GIGABIT
from tests.scale.measured import Measured, spread


def check_ramp() -> None:
    """A task meets the same with 100 others as alone."""
    for count, fleet in ramp(small=True).items():
        result = simulate(fleet)
        assert result.endings == {"finished": int(count)}
        assert result.most_live == int(count), "all run at the same time"
        assert spread(result.added)[1] < 1.0
        assert result.hits > 0.8
        # The mean episode takes 20 min, and the longest of 100 about three times as long.
        assert result.last_end_s < 3_600 + fleet.work.start_s * 3


def check_shares() -> None:
    """Shares within 10 % of the speeds', and 95 % of what the pools do alone."""
    arms = heterogeneous(small=True)
    together = simulate(arms.pop("together"))
    assert sorted(together.speeds.values()) == sorted(SPEEDS)
    for worker, ratio in together.shares().items():
        assert ratio == pytest.approx(1.0, abs=0.1), worker
    alone = [simulate(fleet).rate for fleet in arms.values()]
    assert together.rate >= 0.95 * sum(alone)


def check_losses() -> None:
    """No task waits for ever, and no worker that is known to be silent gets a prompt."""
    world = DeploymentWorld(spot(small=True)["10%"])
    result = world.run()
    assert result.lost_workers
    assert result.lost_environments
    assert result.live == world._core.live == result.starts - result.endings.total()
    assert result.live <= world.fleet.live
    assert result.endings["failed"] <= 0.02 * result.endings.total()
    assert set(result.endings) <= {"finished", "failed"}
    # A prompt that was lost with its worker waits for the session, and begins again.
    assert result.oldest_wait_s < 300.0
    assert result.to_dead, "those of the first seconds can't be avoided"
    # The last report, and three seconds of silence after it.
    assert max(result.to_dead) < 4.3


def of_regions(name: str, seed: int = 0, gigabits: float = 4.0) -> Measured:
    fleet = regions(small=True)[name]
    slow = replace(FAR, bytes_per_s=gigabits * GIGABIT)
    pools = tuple(
        replace(pool, region=slow) if pool.region is FAR else pool for pool in fleet.pools
    )
    return simulate(replace(fleet, pools=pools, seed=seed))


def test_a_ramp_is_flat() -> None:
    check_ramp()


def test_shares_are_in_proportion() -> None:
    check_shares()


def test_lost_machines_lose_no_task() -> None:
    check_losses()


def test_another_region_makes_the_trainer_wait_no_longer() -> None:
    home, far = (of_regions(name) for name in ("home", "far"))
    assert far.wait_fraction() - home.wait_fraction() <= 0.02
    training = far.fleet.training
    assert training is not None
    assert set(far.batch_groups) == {training.groups}
    assert far.stale_share <= 0.01


@pytest.mark.long
def test_another_region_costs_no_engine_time() -> None:
    """If the engines are the bottleneck, the trainer waits in both, on average as long."""
    home, far = (
        fmean(of_regions(name, seed).wait_fraction() for seed in range(4))
        for name in ("home, scarce", "far, scarce")
    )
    assert home > 0.05
    assert far - home <= 0.02


@pytest.mark.long
def test_a_link_that_is_too_slow_is_seen() -> None:
    near, slow = (of_regions("far", gigabits=one) for one in (4.0, 0.1))
    assert slow.stale_share > near.stale_share + 0.02 or (
        slow.wait_fraction() > near.wait_fraction() + 0.02
    )


def test_a_seed_gives_the_same_run_again() -> None:
    first, second = (simulate(ramp(small=True)["100"]) for _ in range(2))
    assert first.waits == second.waits


@pytest.mark.long
@pytest.mark.parametrize(
    ("check", "module", "constants"),
    [
        (check_ramp, prompt_routes, {"STAY_WAIT": -1e9, "STAY_FREE": -1e9}),
        (check_shares, prompt_routes, {"STAY_WAIT": 1e9, "STAY_FREE": 1e9}),
        (check_losses, worker_loads, {"SUSPECT_AFTER": 1e9, "GONE_AFTER": 1e9}),
    ],
    ids=["a conversation does not stay", "it always stays", "nobody is suspected"],
)
def test_without_a_rule_a_scenario_fails(
    check: object, module: object, constants: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(check)
    for name, value in constants.items():
        monkeypatch.setattr(module, name, value)
    with pytest.raises(AssertionError):
        check()
