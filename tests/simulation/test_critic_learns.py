"""A policy with a critic learns the shipped recipe `frozen-lake-maps`, without Kafka.

The recipe's own agent, environment, engine, groups and trainer are used.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from tests.bench.learning import Curve, learn

VERSIONS = 60
"""7,680 episodes: a few minutes on a free core."""


@pytest.mark.long
def test_ppo_with_a_critic_learns_to_cross_random_frozen_lakes(tmp_path: Path) -> None:
    """A random policy crosses 1 map in 50, and the best fixed sequence of moves 1 in 5."""
    curve = Curve("frozen-lake-maps", "ppo", staleness=1, seed=0, versions=VERSIONS)
    learn(curve, tmp_path)
    rewards = json.loads((tmp_path / curve.file).read_text())
    assert fmean(rewards[:5]) < 0.15
    assert fmean(rewards[-10:]) > 0.4
