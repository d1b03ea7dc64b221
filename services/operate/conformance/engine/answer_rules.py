"""Rules about one answer: its tokens, logprobs, versions, and how it ends."""

from __future__ import annotations

from math import isfinite
from typing import Any

from headrace.errors import InfrastructureError
from headrace.services.inference.engine import ScoredRun, ScorePrompt, ScoringEngine
from headrace.services.operate.conformance.conformance_report import NotChecked, Rule, require
from headrace.services.operate.conformance.engine.trial import EngineTrial
from headrace.services.operate.conformance.engine.trial_model import POLICY

LONG = 12
"""Tokens of an answer that is compared."""


def answer_rules(trial: EngineTrial) -> list[Rule]:
    """Returns the rules, in the order in which they are tried."""
    checks = _AnswerChecks(trial)
    return [*_token_rules(checks), *_logprob_rules(checks), *_limit_rules(checks)]


def _token_rules(checks: _AnswerChecks) -> list[Rule]:
    return [
        Rule(
            "starts", "The constructor returns, load() takes version 0, and all slots are free.",
            "Return Capacity(free_slots=setup.slots, context=…) from capacity() after load().",
            checks.starts, limit_s=600,
        ),
        Rule(
            "stops_at_max_tokens", "An answer has max_tokens tokens and finish 'length'.",
            "Stop at EnginePrompt.max_tokens, and ignore the model's own end tokens.",
            checks.stops_at_max_tokens,
        ),
        Rule(
            "one_logprob_for_each_token", "Each token has one finite logprob, at most 0.",
            "Return the logprob of each drawn token in nats, after temperature and masks.",
            checks.one_logprob_for_each_token,
        ),
        Rule(
            "one_version_for_each_token", "Each token has the version that drew it.",
            "Return Weights.version once for each token in EngineOutput.versions.",
            checks.one_version_for_each_token,
        ),
    ]  # fmt: skip


def _limit_rules(checks: _AnswerChecks) -> list[Rule]:
    return [
        Rule(
            "draws_allowed_ids_alone", "With `allowed`, no other id is drawn.",
            "Mask the logits of all ids outside EnginePrompt.allowed.",
            checks.draws_allowed_ids_alone,
        ),
        Rule(
            "a_stop_id_ends_the_answer", "A stop id ends the answer and is its last token.",
            "Keep the stop id as the last token, and return finish 'stop'.",
            checks.a_stop_id_ends_the_answer,
        ),
        Rule(
            "a_full_context_is_overflow", "An answer that the context cuts has finish 'overflow'.",
            "Stop at capacity().context tokens of prompt and answer, and return 'overflow'.",
            checks.a_full_context_is_overflow, limit_s=120,
        ),
        Rule(
            "a_seed_repeats", "The same prompt with the same seed draws the same tokens.",
            "Draw from a generator of EnginePrompt.seed, or leave --deterministic away.",
            checks.a_seed_repeats,
        ),
        Rule(
            "refuses_impossible_prompts", "A prompt that no engine can continue: ValueError.",
            "Call headrace.check_prompt(prompt, vocabulary) at the beginning of generate().",
            checks.refuses_impossible_prompts,
        ),
        Rule(
            "scores_are_right", "score() returns the trainer's logprobs of the given tokens.",
            "Return one logprob and one version for each token of the runs, and no tokens.",
            checks.scores_are_right, limit_s=300,
        ),
    ]  # fmt: skip


def _logprob_rules(checks: _AnswerChecks) -> list[Rule]:
    return [
        Rule(
            "logprobs_are_right", "Logprobs equal those of the trainer's forward pass.",
            "Divide logits by the temperature and mask them before the log-softmax. If only the "
            "rounding differs, raise --tolerance.",
            checks.logprobs_are_right, limit_s=300,
        ),
        Rule(
            "masked_logprobs_are_right", "Logprobs are those among the allowed ids alone.",
            "Mask the logits of all other ids before the log-softmax.",
            checks.masked_logprobs_are_right, limit_s=300,
        ),
    ]  # fmt: skip


WRONG: tuple[dict[str, Any], ...] = (
    {"tokens": []},
    {"tokens": [-1]},
    {"max_tokens": 0},
    {"temperature": -1.0},
    {"temperature": float("nan")},
    {"top_p": 0.0},
    {"top_k": -1},
    {"min_p": 2.0},
)


class _AnswerChecks:
    """The checks of `answer_rules`."""

    def __init__(self, trial: EngineTrial) -> None:
        self._trial = trial

    async def starts(self) -> None:
        engine = await self._trial.engine()
        capacity = engine.capacity()
        require(
            capacity.free_slots == self._trial.slots,
            f"{capacity.free_slots} of {self._trial.slots} slots are free",
        )
        require(capacity.context > 0, f"the context is {capacity.context} tokens")

    async def stops_at_max_tokens(self) -> None:
        asked = [self._trial.prompt(count) for count in (1, 2, 7)]
        for prompt, answer in zip(asked, await self._trial.ask(*asked), strict=True):
            require(
                (len(answer.tokens), answer.finish) == (prompt.max_tokens, "length"),
                f"max_tokens {prompt.max_tokens}: {len(answer.tokens)} tokens, finish "
                f"{answer.finish!r}",
            )
            wrong = [one for one in answer.tokens if not 0 <= one < self._trial.model.vocabulary]
            require(not wrong, f"ids {wrong[:3]} are outside the vocabulary")

    async def one_logprob_for_each_token(self) -> None:
        [answer] = await self._trial.ask(self._trial.prompt(LONG))
        require(
            len(answer.logprobs) == len(answer.tokens),
            f"{len(answer.tokens)} tokens have {len(answer.logprobs)} logprobs",
        )
        wrong = [one for one in answer.logprobs if not (isfinite(one) and one <= 1e-6)]
        require(not wrong, f"it returned the logprobs {wrong[:3]}")

    async def one_version_for_each_token(self) -> None:
        [answer] = await self._trial.ask(self._trial.prompt(LONG))
        expected = [self._trial.version] * len(answer.tokens)
        require(
            answer.versions == expected,
            f"{len(answer.tokens)} tokens of version {self._trial.version} have the versions "
            f"{answer.versions[:5]} ({len(answer.versions)} in all)",
        )
        require(not answer.mixed, "`mixed` is true, although no weights changed")

    async def logprobs_are_right(self) -> None:
        for temperature in (1.0, 0.7, 0.0):
            asked = self._trial.prompt(LONG, temperature=temperature)
            [answer] = await self._trial.ask(asked)
            await self._trial.require_right(self._trial.version, asked, answer)

    async def masked_logprobs_are_right(self) -> None:
        asked = self._trial.prompt(LONG, temperature=0.7, allowed=(3, 4, 5, 6))
        [answer] = await self._trial.ask(asked)
        require(set(answer.tokens) <= {3, 4, 5, 6}, f"allowed 3 to 6, drew {set(answer.tokens)}")
        await self._trial.require_right(self._trial.version, asked, answer)

    async def draws_allowed_ids_alone(self) -> None:
        [answer] = await self._trial.ask(self._trial.prompt(20, allowed=(9, 11)))
        require(set(answer.tokens) <= {9, 11}, f"allowed 9 and 11, drew {set(answer.tokens)}")

    async def a_stop_id_ends_the_answer(self) -> None:
        every = range(self._trial.model.vocabulary)
        [answer] = await self._trial.ask(self._trial.prompt(20, stop_ids=every))
        require(
            (len(answer.tokens), answer.finish) == (1, "stop"),
            f"every id is a stop id: {len(answer.tokens)} tokens, finish {answer.finish!r}",
        )

    async def a_full_context_is_overflow(self) -> None:
        context = (await self._trial.engine()).capacity().context
        ask, prompt = self._trial.ask, self._trial.prompt
        cases = ((2, context - 2, 2, "length"), (3, context - 2, 2, "overflow"))
        for wanted, length, drawn, finish in (*cases, (1, context, 0, "overflow")):
            [answer] = await ask(prompt(wanted, tokens=[1] * length))
            require(
                (len(answer.tokens), answer.finish) == (drawn, finish),
                f"context {context}, a prompt of {length} tokens, max_tokens {wanted}: "
                f"{len(answer.tokens)} tokens, finish {answer.finish!r}",
            )

    async def a_seed_repeats(self) -> None:
        if not self._trial.deterministic:
            raise NotChecked("the engine does not promise it (--deterministic)")
        asked = self._trial.prompt(LONG, seed=7)
        [first], [second] = await self._trial.ask(asked), await self._trial.ask(asked)
        require(
            first.tokens == second.tokens,
            f"seed 7 drew {first.tokens[:5]} and then {second.tokens[:5]}",
        )

    async def refuses_impossible_prompts(self) -> None:
        engine = await self._trial.engine()
        outside = {"tokens": [self._trial.model.vocabulary]}
        for wrong in (*WRONG, outside):
            try:
                await engine.generate(self._trial.prompt(**wrong))
            except ValueError:
                continue
            except InfrastructureError as error:
                require(False, f"{wrong}: it raised InfrastructureError: {error}")
            require(False, f"{wrong}: it answered")

    async def scores_are_right(self) -> None:
        engine = await self._trial.engine()
        if not isinstance(engine, ScoringEngine):
            raise NotChecked("the engine has no method `score`, which only a teacher needs")
        before, scored = [1, 2, 3], [4, 9, 2, 7]
        runs = [ScoredRun(len(before), len(scored))]
        answer = await engine.score(ScorePrompt(POLICY, [*before, *scored], runs))
        require(not answer.tokens, f"a score has {len(answer.tokens)} tokens")
        require(
            len(answer.logprobs) == len(answer.versions) == len(scored),
            f"{len(scored)} tokens: {len(answer.logprobs)} logprobs, "
            f"{len(answer.versions)} versions",
        )
        asked = self._trial.prompt(len(scored), tokens=before)
        answer.tokens.extend(scored)
        await self._trial.require_right(self._trial.version, asked, answer)
