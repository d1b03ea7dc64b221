"""Turns a demonstration, a text that the policy should have generated, into an answer."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.services.inference.engine import EngineOutput, EnginePrompt


def demonstrate(prompt: EnginePrompt, demonstrated: Sequence[int], context: int) -> EngineOutput:
    """Returns the ids `demonstrated` as the answer to a prompt, ended as its sampling would end it.

    The answer has no logprobs and no versions, because no weights drew it. `context` is the
    maximum of prompt and answer in tokens. Raises ValueError with the reason if the prompt's
    sampling could not have drawn these ids.
    """
    if not prompt.tokens:
        raise ValueError("a demonstration needs at least one token of context before it")
    tokens = list(demonstrated)
    if len(tokens) < prompt.max_tokens and not (tokens and tokens[-1] in prompt.stop_ids):
        stop = next((one for one in prompt.stop_ids if _may_draw(prompt, one)), None)
        if stop is None:
            raise ValueError(
                f"the demonstration ends after {len(tokens)} tokens, but its sampling has no stop "
                f"token that ends the answer before {prompt.max_tokens} tokens: add a stop token"
            )
        tokens.append(stop)
    _require_drawable(prompt, tokens)
    if len(prompt.tokens) + len(tokens) > context:
        return EngineOutput([], [], [], "overflow")
    return EngineOutput(tokens, [], [], "stop" if tokens[-1] in prompt.stop_ids else "length")


def _require_drawable(prompt: EnginePrompt, tokens: Sequence[int]) -> None:
    if len(tokens) > prompt.max_tokens:
        raise ValueError(
            f"the demonstration has {len(tokens)} tokens, but its sampling allows "
            f"{prompt.max_tokens}"
        )
    for index, token in enumerate(tokens):
        if not _may_draw(prompt, token):
            raise ValueError(f"the demonstration has token {token}, which is not allowed")
        if token in prompt.stop_ids and index < len(tokens) - 1:
            raise ValueError(f"the demonstration goes on after the stop token {token}")


def _may_draw(prompt: EnginePrompt, token: int) -> bool:
    return not prompt.allowed or token in prompt.allowed
