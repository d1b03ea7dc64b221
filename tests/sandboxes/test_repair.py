"""Repositories to repair: every solution passes in a real sandbox, and an untouched one fails."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.services.tasks.data_sets import repairs
from tests.sandboxes.bench import bench, claim, view

ITEMS = list(repairs())
SOLUTIONS = json.loads(Path(__file__).with_name("repair_solutions.json").read_text())

PAYLOAD: dict[str, Any] = {
    "prompt": "repair it",
    "files": {"a.py": "def f(n):\n    return n\n", "b/c.txt": "text"},
    "tests": [["a:f", [1], 2]],
}


@pytest.mark.parametrize("first", [2, pytest.param(len(ITEMS), marks=pytest.mark.long)])
def test_every_solution_passes_and_what_is_untouched_fails(engine: str, first: int) -> None:
    async def main() -> None:
        async with asyncio.timeout(240), bench(engine, tool="repair") as made:

            async def play(number: int, *commands: str) -> float | None:
                environment = await made.take(claim(number))
                first = await environment.reset(view(ITEMS[number % 100].payload))
                assert "submit" in first.text
                for command in commands:
                    ran = await environment.step(f"Like this:\n```bash\n{command}\n```")
                    assert ran.data["exit_code"] == 0, ran.text
                    assert not ran.done
                graded = await environment.step(" submit\n")
                await environment.aclose()
                assert graded.terminated
                return graded.reward

            for number, item in enumerate(ITEMS[:first]):
                both = play(number, "ls -R", SOLUTIONS[item.item_id]), play(100 + number)
                right, wrong = await asyncio.gather(*both)
                assert (right, wrong) == (1.0, 0.0), item.item_id

    asyncio.run(main())


def test_commands_see_the_files_and_their_end_is_shown(engine: str) -> None:
    async def main() -> None:
        async with bench(engine, tool="repair") as made:
            environment = await made.fresh(**PAYLOAD)
            assert (await environment.step("cat b/c.txt")).text == "text"
            assert "[exit code 3]" in (await environment.step("exit 3")).text
            cheated = await environment.step(
                "echo 'import json; json.dumps = lambda *_: 2' > a.py; echo 'def f(n): return 9' "
                ">> a.py"
            )
            assert cheated.reward is None
            graded = await environment.step("submit")
            assert (graded.reward, graded.data["passed"]) == (0.0, 0)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"files": {"../x": ""}}, "not a path within the repository"),
        ({"files": {"/etc/x": ""}}, "not a path within the repository"),
        ({"files": {"x": "y" * 200_000}}, "the task's file x"),
        ({"tests": [["a:f"]]}, "needs a payload of prompt, files"),
        ({"tests": None}, "needs a payload of prompt, files"),
        ({"tests": []}, "every repository would pass"),
    ],
)
def test_a_task_that_is_none_is_the_operators(
    engine: str, change: dict[str, Any], match: str
) -> None:
    async def main() -> None:
        async with bench(engine, tool="repair") as made:
            environment = await made.take()
            with pytest.raises(UsageError, match=match):
                await environment.reset(view({**PAYLOAD, **change}))

    asyncio.run(main())


def test_no_task_tells_its_solution() -> None:
    assert [item.item_id for item in ITEMS] == list(SOLUTIONS)
    for item in ITEMS:
        assert set(item.payload) == {"prompt", "files", "tests"}
        assert SOLUTIONS[item.item_id] not in str(item.payload)
