"""Scores with vLLM: it returns the logprobs of a prompt's own tokens while it reads the prompt.

These are the logprobs of the model's plain distribution: vLLM applies neither a temperature nor
masks to them. It computes them again for a prefix that it has in its cache.
"""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from headrace.errors import InfrastructureError
from headrace.services.inference.engine import ScorePrompt
from headrace.services.inference.engines.row import ScoreRow

SCORING = SamplingParams(
    max_tokens=1,
    prompt_logprobs=0,
    ignore_eos=True,
    detokenize=False,
    output_kind=RequestOutputKind.FINAL_ONLY,
)
"""Asks for the logprob of each token of a prompt, and of no other tokens."""


def check_plain(prompt: ScorePrompt) -> None:
    """Raises ValueError if a token was not sampled from the model's plain distribution."""
    for run in prompt.runs:
        if run.temperature != 1 or run.allowed or run.json_schema:
            raise ValueError(
                "vLLM scores only what was sampled at temperature 1 and without masks. Sample so, "
                "or serve the teacher with the engine `torch`"
            )


def prompt_logprobs(row: ScoreRow, output: Any) -> list[float]:
    """Returns the logprobs of the row's runs from vLLM's finished output of its prompt.

    Raises InfrastructureError if vLLM ended the prompt before it had read it.
    """
    tokens, known = row.prompt.tokens, output.prompt_logprobs
    if known is None or len(known) < len(tokens):
        raise InfrastructureError("engine_failed", "vLLM ended a score before its end")
    indices = (
        index for run in row.prompt.runs for index in range(run.first, run.first + run.count)
    )
    return [float(known[index][tokens[index]].logprob) for index in indices]
