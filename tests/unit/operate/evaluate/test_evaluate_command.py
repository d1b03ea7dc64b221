"""What `headrace evaluate` prints if nothing could be measured."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.services.operate import cli
from headrace.services.operate.evaluate import evaluate
from headrace.services.operate.evaluation import Evaluations
from headrace.services.operate.run.progress import Progress


async def all_failed(
    recipe: Any, cluster: Any, version: Any, weights: Any, *, quiet: bool
) -> Evaluations:
    """No task has ended with a sample that counts."""
    return Progress(evaluate.evaluation_recipe(recipe, {})).evaluations


def test_it_says_so_and_exits_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate, "evaluate", all_failed)
    assert cli._run(["evaluate", "quickstart", "--json"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["default"]["items"] == 0
    assert "nothing was measured, because no sample counts" in shown.err
    assert "`headrace try quickstart` plays one and says why" in shown.err

    assert cli._run(["evaluate", "quickstart"]) == 1
    assert "policy default: 0 items" in capsys.readouterr().out
