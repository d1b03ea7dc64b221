"""The logprobs of one sequence, by the trainer's own loading, forward pass and processing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from headrace.schemas.events import Sampling
from headrace.services.models.even_rounding import WIDE_ATTENTION
from headrace.services.models.output_head import ChosenHidden
from headrace.services.models.torch_models import DTYPES, overwrite, read_file
from headrace.trainer.collate import SchemaMasks, collate
from headrace.trainer.forward.master_weights import MasterWeights
from headrace.trainer.forward.token_logprobs import token_logprobs
from headrace.trainer.model_loading import load_model
from headrace.trainer.sequences import TokenSequence


def sequence_logprobs(
    folder: Path,
    weights: Path,
    sampling: Sampling,
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    dtype: str = "float32",
    attention: str = WIDE_ATTENTION,
) -> Tensor:
    """Returns the logprobs [N] of N tokens after a prompt, in nats, as the trainer computes them.

    `folder` has the model's config.json, and the tokenizer if `sampling` has a schema. `weights` is
    a safetensors file of the whole model. It loads the model each time, on the CPU: it is for
    checks, not for training.
    """
    with TemporaryDirectory(prefix="headrace-bare-") as bare:
        # Weights in the folder itself would only be read to be overwritten.
        (Path(bare) / "config.json").write_bytes((folder / "config.json").read_bytes())
        network = load_model(Path(bare), 0, attention).eval()
    overwrite(network.state_dict(keep_vars=True), read_file(weights))
    MasterWeights(network, DTYPES[dtype])
    count = len(tokens)
    positions = np.arange(len(prompt), len(prompt) + count)
    zeros = np.zeros(count, dtype=np.float32)
    sequence = TokenSequence(
        np.array([*prompt, *tokens]),
        positions,
        zeros,
        zeros,
        positions,
        ((sampling, count),),
        np.zeros(count, dtype=np.bool_),
    )
    vocabulary = network.config.vocab_size
    masks = SchemaMasks(folder, vocabulary)
    inputs = collate([sequence], vocabulary, torch.device("cpu"), masks)
    with torch.no_grad():
        hidden_at = ChosenHidden(network)
        hidden = hidden_at(inputs.rows, inputs.before, input_ids=inputs.ids)
        return token_logprobs(hidden, inputs, hidden_at.head)[0]
