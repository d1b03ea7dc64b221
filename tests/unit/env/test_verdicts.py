"""What a program's results are worth, whatever it writes."""

from __future__ import annotations

from headrace.services.env.sandbox.coding import PASSED, _results, _verdict


def test_results_of_any_depth_are_read_and_compared() -> None:
    assert _results(f'[["value", {"[" * 100_000}{"]" * 100_000}]]') == []
    (answer,) = _results('[["value", [[]]]]')
    assert _verdict(answer, [[]]) == PASSED
    assert _verdict(answer, []) == "wrong value"
