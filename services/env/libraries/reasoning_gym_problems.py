"""Problems of reasoning-gym (https://github.com/open-thought/reasoning-gym): one step, its score.

Runs in the child process alone: of many data sets the scorer evaluates the answer as Python or as
an expression.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from headrace.errors import UsageError

CACHED = 64
"""Data sets kept ready."""

UNREADABLE = (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError)
"""What scorers raise over an answer that they can't take."""


class Problems:
    """Episodes of one problem each: the reset asks it, the step scores the answer."""

    def __init__(self, suffix: str = "", answer_tag: str | None = None) -> None:
        """`suffix` follows each question, as an instruction how to answer.

        With `answer_tag` what stands in the last `<TAG>…</TAG>` of an action is its answer, and an
        action without has none; else all of it is. UsageError where the library isn't installed.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the libraries that it imports
                import reasoning_gym
                from reasoning_gym.utils import extract_answer
        except ImportError as error:
            raise UsageError(
                f"reasoning-gym is not installed ({error}): pip install 'headrace[reasoning-gym]'"
            ) from None
        self._library: Any = reasoning_gym
        self._extract: Any = extract_answer
        self._suffix = suffix
        self._tag = answer_tag
        self._sets: dict[str, Any] = {}
        self._open: dict[str, tuple[Any, Any]] = {}

    def reset(self, name: str, task: Mapping[str, Any]) -> Mapping[str, Any]:
        """The question that the payload names by data set, configuration, seed and index."""
        payload = task["payload"]
        if missing := {"dataset", "seed", "index"} - set(payload):
            raise UsageError(
                f"a task of reasoning_gym needs {sorted(missing)} in its payload, as "
                f"tasks.use = 'reasoning_gym' writes"
            )
        dataset = self._dataset(payload["dataset"], payload.get("config", {}), payload["seed"])
        problem = dataset[payload["index"]]
        self._open[name] = dataset, problem
        return {"text": f"{problem['question']}{self._suffix}"}

    def step(self, name: str, action: str) -> Mapping[str, Any]:
        """The answer's score. One that the scorer can't take is wrong: it is the policy's doing."""
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
        """Forgets a problem."""
        self._open.pop(name, None)

    def _dataset(self, name: str, config: Mapping[str, Any], seed: int) -> Any:
        key = repr((name, sorted(config.items()), seed))
        if key not in self._sets:
            if len(self._sets) >= CACHED:
                self._sets.pop(next(iter(self._sets)))
            try:
                made = self._library.create_dataset(name, **{**config, "seed": seed})
            except (AssertionError, TypeError, ValueError) as error:
                said = f"reasoning-gym's data set {name!r}, {dict(config)}: {error}"
                raise UsageError(said) from error
            self._sets[key] = made
        return self._sets[key]
