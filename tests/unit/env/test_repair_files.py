"""Who is responsible if a repair task's files can't be written."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.errors import InfrastructureError, UsageError
from headrace.services.base.types import TaskView
from headrace.services.env.sandbox.repair import Repair
from headrace.services.env.sandbox.sandbox import Result

PAYLOAD = {"prompt": "Repair it.", "files": {"a.py": ""}, "tests": [["a:f", [], 1]]}


class AnsweringSandbox:
    """Ends every command in the same way."""

    def __init__(self, result: Result) -> None:
        self.result = result

    async def run(self, command: object) -> Result:
        return self.result


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (Result("", None, "it ran for 4 s"), InfrastructureError),
        (Result("is a directory", 1), UsageError),
    ],
)
def test_a_slow_host_gets_another_attempt_and_a_wrong_task_does_not(
    result: Result, error: type[Exception]
) -> None:
    sandbox: Any = AnsweringSandbox(result)
    view = TaskView(number=1, sample=0, payload=PAYLOAD, options={}, seed=0)
    with pytest.raises(error, match=result.ended or result.output):
        asyncio.run(Repair(sandbox, view).prepare())
