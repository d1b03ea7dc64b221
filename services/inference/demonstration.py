"""What the policy should have said, as an answer: the ids that it would have had to draw."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.services.inference.engine import EngineOutput, EnginePrompt


def demonstrate(prompt: EnginePrompt, said: Sequence[int], context: int) -> EngineOutput:
    """The answer to a prompt that says `said`, ended as the prompt's sampling would end it.

    It has neither logprobs nor versions: nobody's weights drew it. `context` is the most tokens of
    prompt and answer together. ValueError where the sampling could not draw it: it says why.
    """
    if not prompt.tokens:
        raise ValueError("a demonstration needs at least one token of context before it")
    tokens = list(said)
    if len(tokens) < prompt.max_tokens and not (tokens and tokens[-1] in prompt.stop_ids):
        stop = next((one for one in prompt.stop_ids if _may_draw(prompt, one)), None)
        if stop is None:
            raise ValueError(
                f"the demonstration ends after {len(tokens)} tokens, where the policy would go on: "
                f"its sampling has no stop token that it may draw, and allows {prompt.max_tokens}"
            )
        tokens.append(stop)
    _require_drawable(prompt, tokens)
    if len(prompt.tokens) + len(tokens) > context:
        return EngineOutput([], [], [], "overflow")
    return EngineOutput(tokens, [], [], "stop" if tokens[-1] in prompt.stop_ids else "length")


def _require_drawable(prompt: EnginePrompt, tokens: Sequence[int]) -> None:
    if len(tokens) > prompt.max_tokens:
        raise ValueError(
            f"the demonstration is of {len(tokens)} tokens, its sampling allows {prompt.max_tokens}"
        )
    for place, token in enumerate(tokens):
        if not _may_draw(prompt, token):
            raise ValueError(f"the demonstration has token {token}, which is not allowed")
        if token in prompt.stop_ids and place < len(tokens) - 1:
            raise ValueError(f"the demonstration goes on after the stop token {token}")


def _may_draw(prompt: EnginePrompt, token: int) -> bool:
    return not prompt.allowed or token in prompt.allowed
