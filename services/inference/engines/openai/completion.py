"""What a completion request says, and what its answer must have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from headrace.errors import InfrastructureError, UsageError
from headrace.services.inference.engine import EnginePrompt

IDS = "return_token_ids"
PROBE_TOKENS = 2
EXACT = 1e-3
"""Nats by which the logprob of an only allowed token may differ from 0."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens that a server drew."""

    tokens: list[int]
    logprobs: list[float]
    stopped: bool
    """Whether a stop id ended it."""
    cached_tokens: int


def completion_body(model: str, prompt: EnginePrompt, limit: int) -> dict[str, Any]:
    """Returns the request for at most `limit` tokens. The names beyond OpenAI's are vLLM's."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt.tokens),
        "max_tokens": limit,
        "temperature": prompt.temperature,
        "top_p": prompt.top_p,
        "top_k": prompt.top_k,
        "min_p": prompt.min_p,
        "logprobs": 0,
        IDS: True,
        "ignore_eos": True,
        "stream": False,
        "n": 1,
    }
    if prompt.stop_ids:
        body["stop_token_ids"] = list(prompt.stop_ids)
    if prompt.allowed:
        body["allowed_token_ids"] = list(prompt.allowed)
    if prompt.seed is not None:
        body["seed"] = prompt.seed
    return body


def read_completion(
    answer: Mapping[str, Any], prompt: EnginePrompt, limit: int, vocabulary: int
) -> Completion:
    """Reads an answer. Raises InfrastructureError if tokens or logprobs are absent or wrong.

    `vocabulary` is the number of ids that the model has.
    """
    try:
        [choice] = answer["choices"]
        tokens = [int(one) for one in choice["token_ids"]]
        logprobs = [float(one) for one in choice["logprobs"]["token_logprobs"]]
        usage = answer.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        cached = int(details.get("cached_tokens") or 0)
    except (LookupError, AttributeError, TypeError, ValueError, ArithmeticError) as error:
        raise _wrong(f"the answer lacks token ids or logprobs ({error!r})") from error
    if not all(0 <= one < vocabulary for one in tokens):
        raise _wrong(f"it drew an id outside the vocabulary of {vocabulary} ids")
    if len(tokens) > limit:
        raise _wrong(f"{len(tokens)} tokens came, and {limit} were asked for")
    if len(tokens) != len(logprobs):
        raise _wrong(f"{len(tokens)} tokens have {len(logprobs)} logprobs")
    if not all(isfinite(one) and one <= EXACT for one in logprobs):
        raise _wrong("a logprob is not a number of at most 0")
    if prompt.allowed and not set(tokens) <= set(prompt.allowed):
        raise _wrong("it drew an id that is not allowed")
    stops = set(prompt.stop_ids)
    at = next((n for n, token in enumerate(tokens) if token in stops), None)
    if at is not None and at != len(tokens) - 1:
        raise _wrong("tokens follow a stop id")
    if at is None and len(tokens) != limit:
        raise _wrong(
            f"{len(tokens)} of {limit} tokens came, and no stop id, finish_reason "
            f"{choice.get('finish_reason')!r}"
        )
    return Completion(tokens, [min(one, 0.0) for one in logprobs], at is not None, cached)


def require_usable(answer: Mapping[str, Any], prompt: EnginePrompt, vocabulary: int) -> None:
    """Checks the answer to a prompt that allows one id alone, at a temperature that is not 1.

    Its logprobs are 0 if they are computed after temperature and masks. Raises UsageError, which
    says what the server must be started with.
    """
    try:
        found = read_completion(answer, prompt, PROBE_TOKENS, vocabulary)
    except InfrastructureError as error:
        raise UsageError(
            f"the server of the engine `openai` can't be used: {error.message}. It must know the "
            f"fields `{IDS}`, `logprobs`, `allowed_token_ids` and `ignore_eos` of "
            "/v1/completions, as vLLM's server does"
        ) from error
    if any(one < -EXACT for one in found.logprobs):
        raise UsageError(
            "the server of the engine `openai` returns logprobs from before temperature and masks, "
            "so nothing could be trained on its tokens. Start vLLM's server with "
            "`--logprobs-mode processed_logprobs`"
        )


def _wrong(reason: str) -> InfrastructureError:
    return InfrastructureError("engine_failed", reason, retryable=False)
