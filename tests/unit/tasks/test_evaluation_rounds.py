"""When the next round of an evaluation is due."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from headrace.schemas.events import TaskEnded
from headrace.schemas.recipe.recipe import Evaluation
from headrace.services.tasks import evaluation_source
from headrace.services.tasks.evaluation_source import SOURCE
from tests.unit.scheduler.test_core import recipe


def ended(number: int) -> TaskEnded:
    return TaskEnded.model_construct(task=number, source=SOURCE, task_id="0-0")


def test_a_task_of_somebody_else_does_not_end_a_round() -> None:
    context = cast("Any", SimpleNamespace(recipe=recipe(), blobs=None))
    rounds = evaluation_source._Rounds(context, Evaluation())
    rounds.submitted["0-0"] = 5
    rounds._published["default"] = 0
    rounds.on_ended(ended(9))  # Refused, or of another tenant, with the id of task 5.
    assert rounds.due() == -1
    rounds.on_ended(ended(5))
    assert rounds.due() == 0
