"""The coding tasks: every solution passes in a real sandbox, and what is wrong or cheats fails."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.services.tasks.data_sets import coding
from tests.sandboxes.bench import bench, claim, view

ITEMS = list(coding())
SOLUTIONS = json.loads(Path(__file__).with_name("coding_solutions.json").read_text())
WRONG = "def solve(*arguments):\n    return None\n"
PAYLOAD: dict[str, Any] = {"prompt": "p", "entry": "solve", "cases": [[[1], 2], [[5], 6]]}
CHEATS = {
    "ends early": "import os\nos._exit(0)",
    "says so itself": (
        "import os\nfor fd in range(20):\n    try:\n"
        '        os.write(fd, b\'[["value", true], ["value", true]]\\n\')\n'
        "    except OSError:\n        pass\nos._exit(0)"
    ),
    "is equal to all": (
        "class Equal(int):\n    __eq__ = lambda self, other: True\n"
        "def solve(n):\n    return Equal(0)"
    ),
    "looks for what is expected": (
        "import sys, os, gc\n"
        "def solve(n):\n"
        "    text = open('/proc/self/cmdline').read() + str(os.environ) + str(gc.get_objects())\n"
        "    return len(text)"
    ),
    "turns json around": "import json\njson.dumps = lambda *_: 'true'\ndef solve(n):\n    return n",
    "is no program": "def solve(",
    "is half a character": "\ud800",
    "runs on": "while True: pass",
}


def test_every_solution_passes_and_a_wrong_one_fails(engine: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(240), bench(engine, tool="coding") as made:

            async def grade(number: int, program: str) -> float | None:
                environment = await made.take(claim(number))
                first = await environment.reset(view(ITEMS[number % 100].payload))
                assert "solve" in first.text
                graded = await environment.step(f"```python\n{program}```")
                await environment.aclose()
                assert graded.terminated
                return graded.reward

            for number, item in enumerate(ITEMS):
                both = grade(number, SOLUTIONS[item.item_id]), grade(100 + number, WRONG)
                right, wrong = await asyncio.gather(*both)
                assert (right, wrong) == (1.0, 0.0), item.item_id

    asyncio.run(main())


def test_no_cheat_is_rewarded(engine: str) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(120),
            bench(engine, tool="coding", command_s=3, tool_options={"tries": 20}) as made,
        ):
            environment = await made.take()
            await environment.reset(view(PAYLOAD))
            for name, program in CHEATS.items():
                graded = await environment.step(program)
                assert graded.reward == 0.0, (name, graded)
            right = await environment.step("def solve(n):\n    print('x' * 9)\n    return n + 1")
            assert (right.reward, right.terminated) == (1.0, True)

    asyncio.run(main())


def test_a_share_of_the_tests_is_a_reward_where_asked_for(engine: str) -> None:
    async def main() -> None:
        async with bench(engine, tool="coding", tool_options={"partial": True}) as made:
            environment = await made.take()
            await environment.reset(view(PAYLOAD))
            graded = await environment.step("def solve(n):\n    return 2 if n == 1 else 1 / 0")
            assert graded.reward == 0.5
            assert graded.text == "1 of 2 tests passed: ZeroDivisionError"

    asyncio.run(main())


def test_a_task_that_is_none_is_the_operators(engine: str) -> None:
    async def main() -> None:
        async with bench(engine, tool="coding") as made:
            environment = await made.take()
            with pytest.raises(UsageError, match="needs a payload of prompt, entry and cases"):
                await environment.reset(view({"prompt": "x"}))
            with pytest.raises(UsageError, match="every program would pass"):
                await environment.reset(view({**PAYLOAD, "cases": []}))

    asyncio.run(main())


def test_no_task_tells_its_solution() -> None:
    assert [item.item_id for item in ITEMS] == list(SOLUTIONS)
    for item in ITEMS:
        assert set(item.payload) == {"prompt", "entry", "cases"}
        assert SOLUTIONS[item.item_id] not in str(item.payload)
