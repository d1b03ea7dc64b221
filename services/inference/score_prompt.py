"""Turns a request for scores into the sequence and the runs of tokens that an engine scores."""

from __future__ import annotations

from headrace.schemas import packed
from headrace.schemas.events import GenerationRequested, ScoredTokens
from headrace.services.inference.engine import (
    Engine,
    ScoredRun,
    ScorePrompt,
    ScoringEngine,
)
from headrace.services.inference.tokenizer import Tokenizer


def score_prompt(request: GenerationRequested, tokenizer: Tokenizer) -> ScorePrompt:
    """Returns what an engine needs. Raises ValueError if the request contradicts itself."""
    return ScorePrompt(
        policy=request.policy,
        tokens=packed.unpack_i32(request.tokens),
        runs=[_run(request, tokenizer, one) for one in request.scored],
        priority=request.priority,
    )


def _run(request: GenerationRequested, tokenizer: Tokenizer, one: ScoredTokens) -> ScoredRun:
    if one.sampling >= len(request.samplings):
        raise ValueError(
            f"a score names sampling {one.sampling} of {len(request.samplings)} samplings"
        )
    sampling = request.samplings[one.sampling]
    ends = (*packed.unpack_i32(sampling.stop_ids), *tokenizer.stop_ids(sampling.stop))
    return ScoredRun(
        first=one.first,
        count=one.count,
        temperature=sampling.temperature,
        allowed=tuple(packed.unpack_i32(sampling.allowed)),
        json_schema=sampling.json_schema,
        around=(sampling.json_before, sampling.json_after),
        stop_ids=ends,
    )


def scoring(engine: Engine) -> ScoringEngine:
    """Returns the engine if it can score. Raises ValueError if it can't."""
    if not isinstance(engine, ScoringEngine):
        raise ValueError(
            f"the engine {type(engine).__name__} has no method `score`, so it can't serve a "
            "teacher. Add the method, or use the engine `torch` or `vllm`"
        )
    return engine
