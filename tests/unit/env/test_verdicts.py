"""What a program's results are worth, whatever it writes."""

from __future__ import annotations

from typing import Any

from headrace.services.env.sandbox.coding import PASSED, _verdict


def test_results_of_any_depth_are_compared() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert _verdict(["value", deep], []) == "wrong value"
    assert _verdict(["value", [[]]], [[]]) == PASSED
