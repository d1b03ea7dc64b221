"""Problems of reasoning-gym (https://github.com/open-thought/reasoning-gym): one scored step.

Runs only in the child process: the scorers of many data sets evaluate the answer as Python or as an
expression.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import UsageError
from headrace.services.env.optional_imports import importing

CACHED = 64
"""Most data sets kept in memory."""

UNREADABLE = (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError)
"""Exceptions of scorers that can't read an answer."""


class Problems:
    """Each episode is one problem: the reset asks it, the step scores the answer."""

    def __init__(self, suffix: str = "", answer_tag: str | None = None) -> None:
        """`suffix` follows each question, for example an instruction how to answer.

        With `answer_tag`, the answer is the text in the last `<TAG>…</TAG>` of an action, and an
        action without that tag has no answer. Without it, the answer is the whole action. Raises
        UsageError if the library isn't installed.
        """
        with importing("reasoning-gym"):
            import reasoning_gym
            from reasoning_gym.utils import extract_answer
        self._library: Any = reasoning_gym
        self._extract: Any = extract_answer
        self._suffix = suffix
        self._tag = answer_tag
        self._sets: dict[str, Any] = {}
        self._open: dict[str, tuple[Any, Any]] = {}

    def reset(self, name: str, task: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ask the question that the payload names by data set, configuration, seed and index."""
        payload = task["payload"]
        if missing := {"dataset", "seed", "index"} - set(payload):
            raise UsageError(
                f"the task's payload lacks {sorted(missing)}; "
                f"tasks.use = 'reasoning_gym' makes such tasks"
            )
        dataset = self._dataset(payload["dataset"], payload.get("config", {}), payload["seed"])
        problem = dataset[payload["index"]]
        self._open[name] = dataset, problem
        return {"text": f"{problem['question']}{self._suffix}"}

    def step(self, name: str, action: str) -> Mapping[str, Any]:
        """Score the answer. If the scorer can't read it, it is wrong: the policy wrote it."""
        dataset, problem = self._open.pop(name)
        answer = action if self._tag is None else self._extract(action, tag_name=self._tag)
        if answer is None:
            return {"reward": 0.0, "data": {"unreadable": "no answer"}, "terminated": True}
        try:
            reward, data = float(dataset.score_answer(answer, problem)), {}
        except UNREADABLE as error:
            reward, data = 0.0, {"unreadable": f"{type(error).__name__}: {error}"[:500]}
        return {"reward": reward, "data": data, "terminated": True}

    def close(self, name: str) -> None:
        """Forget a problem."""
        self._open.pop(name, None)

    def _dataset(self, name: str, config: Mapping[str, Any], seed: int) -> Any:
        key = repr((name, sorted(config.items()), seed))
        if key not in self._sets:
            if len(self._sets) >= CACHED:
                self._sets.pop(next(iter(self._sets)))
            try:
                made = self._library.create_dataset(name, **{**config, "seed": seed})
            except (AssertionError, TypeError, ValueError) as error:
                message = f"reasoning-gym's data set {name!r}, {dict(config)}: {error}"
                raise UsageError(message) from error
            self._sets[key] = made
        return self._sets[key]
