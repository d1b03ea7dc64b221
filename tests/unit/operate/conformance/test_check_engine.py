"""The rules for engines: a good engine keeps them, and each fault breaks one by its name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.services.inference.engine import EngineOutput, EnginePrompt, Weights
from headrace.services.inference.engines.torch_engine import TorchEngine
from headrace.services.operate.conformance.engine.check_engine import check_engine

pytestmark = pytest.mark.slow

OnToken = Callable[[int], None] | None


class Changed(TorchEngine):
    """An engine that is wrong in what a subclass says."""

    def answer(self, prompt: EnginePrompt, answer: EngineOutput) -> EngineOutput:
        return answer

    async def generate(self, prompt: EnginePrompt, on_token: OnToken = None) -> EngineOutput:
        return self.answer(prompt, await super().generate(prompt, on_token))


class WrongLogprob(Changed):
    def answer(self, prompt: EnginePrompt, answer: EngineOutput) -> EngineOutput:
        return replace(answer, logprobs=[one - 0.1 for one in answer.logprobs])


class LogprobBeforeMasks(Changed):
    async def generate(self, prompt: EnginePrompt, on_token: OnToken = None) -> EngineOutput:
        free = await super().generate(prompt, on_token)
        return (
            replace(free, logprobs=[one - 1 for one in free.logprobs]) if prompt.allowed else free
        )


class PositiveLogprob(Changed):
    def answer(self, prompt: EnginePrompt, answer: EngineOutput) -> EngineOutput:
        return replace(answer, logprobs=[-one for one in answer.logprobs])


class NoVersion(Changed):
    def answer(self, prompt: EnginePrompt, answer: EngineOutput) -> EngineOutput:
        return replace(answer, versions=answer.versions[:-1])


class NoStop(Changed):
    async def generate(self, prompt: EnginePrompt, on_token: OnToken = None) -> EngineOutput:
        return await super().generate(replace(prompt, max_tokens=prompt.max_tokens + 1), on_token)


class IgnoresAllowed(Changed):
    async def generate(self, prompt: EnginePrompt, on_token: OnToken = None) -> EngineOutput:
        return await super().generate(replace(prompt, allowed=()), on_token)


class DropsTheStopId(Changed):
    def answer(self, prompt: EnginePrompt, answer: EngineOutput) -> EngineOutput:
        return replace(answer, tokens=answer.tokens[:-1]) if prompt.stop_ids else answer


class NoOverflow(Changed):
    def answer(self, prompt: EnginePrompt, answer: EngineOutput) -> EngineOutput:
        return replace(answer, finish="length")


class IgnoresSeeds(Changed):
    async def generate(self, prompt: EnginePrompt, on_token: OnToken = None) -> EngineOutput:
        return await super().generate(replace(prompt, seed=None), on_token)


class TakesAnything(Changed):
    async def generate(self, prompt: EnginePrompt, on_token: OnToken = None) -> EngineOutput:
        try:
            return await super().generate(prompt, on_token)
        except ValueError:
            return EngineOutput([], [], [], "stop")


class IgnoresNewWeights(Changed):
    """It takes the number of the new version, and serves the first weights for ever."""

    async def load(self, weights: Weights) -> None:
        await super().load(replace(weights, path=weights.path.with_name("0.safetensors")))


class KeepsTheOldVersion(Changed):
    async def load(self, weights: Weights) -> None:
        await super().load(replace(weights, version=0))


class LosesAtASwap(Changed):
    """What runs when weights change is never answered."""

    swaps = 0

    async def generate(self, prompt: EnginePrompt, on_token: OnToken = None) -> EngineOutput:
        before = self.swaps
        answer = await super().generate(prompt, on_token)
        if self.swaps != before:
            raise RuntimeError("the request is unknown")
        return answer

    async def load(self, weights: Weights) -> None:
        self.swaps += 1
        await super().load(weights)


class OneVersionForAll(Changed):
    """It tags all tokens with the version that drew the first one, and swaps the order."""

    def answer(self, prompt: EnginePrompt, answer: EngineOutput) -> EngineOutput:
        return replace(answer, versions=answer.versions[::-1])


class TakesDamagedWeights(Changed):
    async def load(self, weights: Weights) -> None:
        if "damaged" not in weights.path.name:
            await super().load(weights)


class KeepsTheSlot(Changed):
    """A cancelled prompt goes on."""

    async def generate(self, prompt: EnginePrompt, on_token: OnToken = None) -> EngineOutput:
        self.left = getattr(self, "left", [])
        self.left.append(
            asyncio.create_task(super().generate(replace(prompt, max_tokens=500), on_token))
        )
        return await asyncio.shield(self.left[-1])


class HangsWhenItCloses(Changed):
    async def close(self, drain_s: float) -> None:
        pass


class ServesEverybody(Changed):
    async def generate(self, prompt: EnginePrompt, on_token: OnToken = None) -> EngineOutput:
        return await super().generate(replace(prompt, policy="default"), on_token)


class Exits(Changed):
    async def generate(self, prompt: EnginePrompt, on_token: OnToken = None) -> EngineOutput:
        raise SystemExit(3)


FAULTS: list[tuple[type[Changed], str]] = [
    (WrongLogprob, "logprobs_are_right"),
    (LogprobBeforeMasks, "masked_logprobs_are_right"),
    (PositiveLogprob, "one_logprob_for_each_token"),
    (NoVersion, "one_version_for_each_token"),
    (NoStop, "stops_at_max_tokens"),
    (IgnoresAllowed, "draws_allowed_ids_alone"),
    (DropsTheStopId, "a_stop_id_ends_the_answer"),
    (NoOverflow, "a_full_context_is_overflow"),
    (IgnoresSeeds, "a_seed_repeats"),
    (TakesAnything, "refuses_impossible_prompts"),
    (IgnoresNewWeights, "new_weights_are_used"),
    (KeepsTheOldVersion, "new_weights_are_used"),
    (LosesAtASwap, "no_prompt_is_lost_at_a_change"),
    (OneVersionForAll, "weights_change_during_an_answer"),
    (TakesDamagedWeights, "damaged_weights_leave_the_old_ones"),
    (HangsWhenItCloses, "closing_ends_all"),
    (ServesEverybody, "a_policy_without_weights_is_refused"),
    (Exits, "stops_at_max_tokens"),
]


@pytest.mark.parametrize(("engine", "rule"), FAULTS, ids=lambda one: getattr(one, "__name__", one))
def test_a_fault_breaks_its_rule(engine: type[Changed], rule: str) -> None:
    report = check_engine("mine:Engine", {}, engine=engine, deterministic=True, rules=[rule])
    [found] = report.findings
    assert (found.rule, found.verdict) == (rule, "fail"), found
    assert found.happened
    assert found.expected
    assert found.advice
    assert "FAIL" in "\n".join(report.lines()).upper()
    assert report.as_json()["ok"] is False


def test_the_torch_engine_keeps_every_rule() -> None:
    report = check_engine("torch", {}, deterministic=True)
    assert report.failed == (), "\n".join(report.lines())
    assert {one.verdict for one in report.findings} == {"pass"}, "\n".join(report.lines())
    assert {rule for _, rule in FAULTS} <= {one.rule for one in report.findings}


def test_the_scripted_engine_breaks_only_what_it_says() -> None:
    """Its logprobs are 0 and its tokens follow no model."""
    report = check_engine("scripted", {"tokens": [3, 5], "delay_ms": 1})
    assert set(report.failed) == {
        "logprobs_are_right",
        "masked_logprobs_are_right",
        "new_weights_are_used",
        "scores_are_right",
    }


def test_a_frozen_engine_is_not_asked_to_change() -> None:
    rules = ["new_weights_are_used", "weights_change_during_an_answer"]
    report = check_engine("torch", {}, frozen=True, rules=rules)
    assert [one.verdict for one in report.findings] == ["not checked", "not checked"]


def test_an_unknown_rule_or_engine_is_refused() -> None:
    call: Callable[..., Any] = check_engine
    with pytest.raises(UsageError, match="no rule 'speed'"):
        call("scripted", {}, rules=["speed"])
    with pytest.raises(UsageError, match="no engine 'speed'"):
        call("speed", {})
