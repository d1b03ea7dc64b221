"""Rules about one answer: its tokens, logprobs, versions, and how it ends."""

from __future__ import annotations

from math import isfinite
from typing import Any

from headrace.errors import InfrastructureError
from headrace.services.inference.engine import ScoredRun, ScorePrompt, ScoringEngine
from headrace.services.operate.conformance.conformance_report import NotChecked, require, rule
from headrace.services.operate.conformance.engine.trial import EngineTrial
from headrace.services.operate.conformance.engine.trial_model import POLICY

LONG = 12
"""Tokens of an answer that is compared."""


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


class AnswerRules:
    """The rules about answers, in the order in which they are tried."""

    def __init__(self, trial: EngineTrial) -> None:
        self._trial = trial

    @rule(
        "Return Capacity(free_slots=setup.slots, context=…) from capacity() after load().",
        limit_s=600,
    )
    async def starts(self) -> None:
        """The constructor returns, load() takes version 0, and all slots are free."""
        engine = await self._trial.engine()
        capacity = engine.capacity()
        require(
            capacity.free_slots == self._trial.slots,
            f"{capacity.free_slots} of {self._trial.slots} slots are free",
        )
        require(capacity.context > 0, f"the context is {capacity.context} tokens")

    @rule("Stop at EnginePrompt.max_tokens, and ignore the model's own end tokens.")
    async def stops_at_max_tokens(self) -> None:
        """An answer has max_tokens tokens and finish 'length'."""
        asked = [self._trial.prompt(count) for count in (1, 2, 7)]
        for prompt, answer in zip(asked, await self._trial.ask(*asked), strict=True):
            require(
                (len(answer.tokens), answer.finish) == (prompt.max_tokens, "length"),
                f"max_tokens {prompt.max_tokens}: {len(answer.tokens)} tokens, finish "
                f"{answer.finish!r}",
            )
            wrong = [one for one in answer.tokens if not 0 <= one < self._trial.model.vocabulary]
            require(not wrong, f"ids {wrong[:3]} are outside the vocabulary")

    @rule("Return the logprob of each drawn token in nats, after temperature and masks.")
    async def one_logprob_for_each_token(self) -> None:
        """Each token has one finite logprob, at most 0."""
        [answer] = await self._trial.ask(self._trial.prompt(LONG))
        require(
            len(answer.logprobs) == len(answer.tokens),
            f"{len(answer.tokens)} tokens have {len(answer.logprobs)} logprobs",
        )
        wrong = [one for one in answer.logprobs if not (isfinite(one) and one <= 1e-6)]
        require(not wrong, f"it returned the logprobs {wrong[:3]}")

    @rule("Return Weights.version once for each token in EngineOutput.versions.")
    async def one_version_for_each_token(self) -> None:
        """Each token has the version that drew it."""
        [answer] = await self._trial.ask(self._trial.prompt(LONG))
        expected = [self._trial.version] * len(answer.tokens)
        require(
            answer.versions == expected,
            f"{len(answer.tokens)} tokens of version {self._trial.version} have the versions "
            f"{answer.versions[:5]} ({len(answer.versions)} in all)",
        )
        require(not answer.mixed, "`mixed` is true, although no weights changed")

    @rule(
        "Divide logits by the temperature and mask them before the log-softmax. If only the "
        "rounding differs, raise --tolerance.",
        limit_s=300,
    )
    async def logprobs_are_right(self) -> None:
        """Logprobs equal those of the trainer's forward pass."""
        for temperature in (1.0, 0.7, 0.0):
            asked = self._trial.prompt(LONG, temperature=temperature)
            [answer] = await self._trial.ask(asked)
            await self._trial.require_right(self._trial.version, asked, answer)

    @rule("Mask the logits of all other ids before the log-softmax.", limit_s=300)
    async def masked_logprobs_are_right(self) -> None:
        """Logprobs are those among the allowed ids alone."""
        asked = self._trial.prompt(LONG, temperature=0.7, allowed=(3, 4, 5, 6))
        [answer] = await self._trial.ask(asked)
        require(set(answer.tokens) <= {3, 4, 5, 6}, f"allowed 3 to 6, drew {set(answer.tokens)}")
        await self._trial.require_right(self._trial.version, asked, answer)

    @rule("Mask the logits of all ids outside EnginePrompt.allowed.")
    async def draws_allowed_ids_alone(self) -> None:
        """With `allowed`, no other id is drawn."""
        [answer] = await self._trial.ask(self._trial.prompt(20, allowed=(9, 11)))
        require(set(answer.tokens) <= {9, 11}, f"allowed 9 and 11, drew {set(answer.tokens)}")

    @rule("Keep the stop id as the last token, and return finish 'stop'.")
    async def a_stop_id_ends_the_answer(self) -> None:
        """A stop id ends the answer and is its last token."""
        every = range(self._trial.model.vocabulary)
        [answer] = await self._trial.ask(self._trial.prompt(20, stop_ids=every))
        require(
            (len(answer.tokens), answer.finish) == (1, "stop"),
            f"every id is a stop id: {len(answer.tokens)} tokens, finish {answer.finish!r}",
        )

    @rule(
        "Stop at capacity().context tokens of prompt and answer, and return 'overflow'.",
        limit_s=120,
    )
    async def a_full_context_is_overflow(self) -> None:
        """An answer that the context cuts has finish 'overflow'."""
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

    @rule("Draw from a generator of EnginePrompt.seed, or leave --deterministic away.")
    async def a_seed_repeats(self) -> None:
        """The same prompt with the same seed draws the same tokens."""
        if not self._trial.deterministic:
            raise NotChecked("the engine does not promise it (--deterministic)")
        asked = self._trial.prompt(LONG, seed=7)
        [first], [second] = await self._trial.ask(asked), await self._trial.ask(asked)
        require(
            first.tokens == second.tokens,
            f"seed 7 drew {first.tokens[:5]} and then {second.tokens[:5]}",
        )

    @rule("Call headrace.check_prompt(prompt, vocabulary) at the beginning of generate().")
    async def refuses_impossible_prompts(self) -> None:
        """A prompt that no engine can continue: ValueError."""
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

    @rule(
        "Return one logprob and one version for each token of the runs, and no tokens.",
        limit_s=300,
    )
    async def scores_are_right(self) -> None:
        """score() returns the trainer's logprobs of the given tokens."""
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
