"""Problems of reasoning-gym (https://github.com/open-thought/reasoning-gym): one scored step.

Runs only in the child process: the scorers of many data sets evaluate the answer as Python or as an
expression.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from headrace.errors import UsageError
from headrace.services.env.optional_imports import importing

with importing("reasoning-gym"):
    import reasoning_gym

CACHED = 64
"""Most data sets kept in memory."""
MOST_CHARACTERS = 20_000
"""Longest answer that is scored. Some scorers take time that grows with the square of it."""

UNREADABLE = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, SyntaxError,
    TypeError, ValueError,
)  # fmt: skip
"""Exceptions of scorers that can't read an answer."""


class Problems:
    """Each episode is one problem: the reset asks it, the step scores the answer."""

    def __init__(self, suffix: str = "", answer_tag: str | None = None) -> None:
        """`suffix` follows each question, for example an instruction how to answer.

        With `answer_tag`, the answer is the text in the last `<TAG>…</TAG>` of an action, and an
        action without that tag has no answer. Without it, the answer is the whole action.
        """
        self._suffix = suffix
        self._tag = answer_tag
        self._open: dict[str, tuple[Any, Any]] = {}

    def reset(self, name: str, task: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ask the question that the payload names by data set, configuration, seed and index."""
        payload = task["payload"]
        if missing := {"dataset", "seed", "index"} - set(payload):
            raise UsageError(
                f"the task's payload lacks {sorted(missing)}; "
                f"tasks.use = 'reasoning_gym' makes such tasks"
            )
        config = json.dumps(payload.get("config", {}), sort_keys=True)
        dataset = _dataset(payload["dataset"], config, payload["seed"])
        problem = dataset[payload["index"]]
        self._open[name] = dataset, problem
        return {"text": f"{problem['question']}{self._suffix}"}

    def step(self, name: str, action: str) -> Mapping[str, Any]:
        """Score the answer. If the scorer can't read it, it is wrong: the policy wrote it."""
        dataset, problem = self._open.pop(name)
        answer = action if self._tag is None else _last_within(action, self._tag)
        reward, why = 0.0, "no answer" if answer is None else ""
        if answer is not None and len(answer) > MOST_CHARACTERS:
            why = f"the answer has {len(answer)} characters; at most {MOST_CHARACTERS} are read"
        elif answer is not None:
            try:
                reward = float(dataset.score_answer(answer, problem))
            except UNREADABLE as error:
                why = f"{type(error).__name__}: {error}"[:500]
        data = {"unreadable": why} if why else {}
        return {"reward": reward, "data": data, "terminated": True}

    def close(self, name: str) -> None:
        """Forget a problem."""
        self._open.pop(name, None)


def _last_within(text: str, tag: str) -> str | None:
    """Return the text in the last `<TAG>…</TAG>`; None if there is none. Takes linear time."""
    begin, end = f"<{tag}>", f"</{tag}>"
    found, at = None, 0
    while (start := text.find(begin, at)) >= 0:
        start += len(begin)
        if (stop := text.find(end, start)) < 0:
            break
        found, at = text[start:stop].strip(), stop + len(end)
    return found


@lru_cache(CACHED)
def _dataset(name: str, config: str, seed: int) -> Any:
    """Make a data set. `config` is a JSON object."""
    try:
        return reasoning_gym.create_dataset(name, **{**json.loads(config), "seed": seed})
    except (AssertionError, TypeError, ValueError) as error:
        raise UsageError(f"reasoning-gym's data set {name!r}, {config}: {error}") from error
