"""One engine under trial, and what the rules share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.services.inference.engine import Engine, EngineOutput, EnginePrompt
from headrace.services.operate.conformance.conformance_report import (
    NotChecked,
    Violation,
    require,
)
from headrace.services.operate.conformance.engine.trial_model import POLICY, TrialModel

PATIENCE_S = 20.0
"""Seconds that a rule waits for a state of the engine."""


@dataclass(eq=False)
class EngineTrial:
    """Makes the engine when the first rule needs it. All rules but the last use the same one."""

    make: Callable[[], Engine]
    """The constructor, which may block."""
    model: TrialModel
    slots: int
    tolerance: float
    """Most nats by which a logprob may differ from the trainer's."""
    frozen: bool = False
    """Whether the engine serves one version for ever."""
    deterministic: bool = False
    """Whether a prompt with a seed must draw the same tokens each time."""
    made: Engine | None = None
    version: int = 0
    """The version that was loaded last."""

    async def engine(self) -> Engine:
        """Returns the engine with weights. If it has none yet, version 0 is loaded."""
        if self.made is None:
            self.made = await asyncio.to_thread(self.make)
            await self.made.load(self.model.weights(0))
        return self.made

    async def load(self, version: int) -> Engine:
        """Loads a version of the policy. Raises NotChecked if the engine is frozen."""
        if self.frozen:
            raise NotChecked("the engine serves one fixed version (--frozen)")
        engine = await self.engine()
        await engine.load(self.model.weights(version))
        self.version = version
        return engine

    def prompt(self, max_tokens: int = 5, **settings: Any) -> EnginePrompt:
        """Returns a prompt of three tokens, unless `settings` say otherwise."""
        given: dict[str, Any] = {"policy": POLICY, "tokens": [1, 2, 3], "max_tokens": max_tokens}
        return EnginePrompt(**(given | settings))

    async def ask(self, *prompts: EnginePrompt) -> list[EngineOutput]:
        """Returns the answers to prompts that the engine gets at once."""
        engine = await self.engine()
        return list(await asyncio.gather(*map(engine.generate, prompts)))

    async def until(self, holds: Callable[[], bool], expected: str) -> None:
        """Waits until a state is there. Raises Violation with what was expected."""
        loop = asyncio.get_running_loop()
        given_up = loop.time() + PATIENCE_S
        while not holds():
            if loop.time() > given_up:
                raise Violation(f"{expected} did not happen within {PATIENCE_S:.0f} s")
            await asyncio.sleep(0.001)

    async def require_right(self, version: int, asked: EnginePrompt, answer: EngineOutput) -> None:
        """Compares an answer's logprobs with those that the trainer computes for a version.

        Raises Violation if the median difference is more than the tolerance.
        """
        ours = await asyncio.to_thread(self.model.logprobs, version, asked, answer.tokens)
        differences = sorted(
            abs(one - other) for one, other in zip(answer.logprobs, ours, strict=True)
        )
        if not differences:
            raise Violation("the answer has no tokens")
        middle, worst = differences[len(differences) // 2], differences[-1]
        # A NaN is not less than anything.
        if not middle <= self.tolerance:
            raise Violation(
                f"logprobs of {len(ours)} tokens differ from those of the trainer by {middle:.4f} "
                f"nats in the median and by {worst:.4f} at most; {self.tolerance:g} is allowed"
            )


def require_whole(asked: Sequence[EnginePrompt], answers: Sequence[EngineOutput]) -> None:
    """Raises Violation unless each answer has the tokens that were asked, and one of each array."""
    for prompt, answer in zip(asked, answers, strict=True):
        wanted, drawn = prompt.max_tokens, len(answer.tokens)
        require(
            drawn == wanted and answer.finish == "length",
            f"max_tokens {wanted}, no stop ids: {drawn} tokens, finish {answer.finish!r}",
        )
        require(
            len(answer.logprobs) == drawn,
            f"{drawn} tokens have {len(answer.logprobs)} logprobs",
        )
        require(
            len(answer.versions) == drawn,
            f"{drawn} tokens have {len(answer.versions)} versions",
        )
