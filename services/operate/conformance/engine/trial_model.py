"""The model that an engine is tried with: two versions of weights, and the trainer's logprobs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from headrace.errors import UsageError
from headrace.schemas.events import Sampling
from headrace.schemas.packed import pack_i32
from headrace.services.inference.engine import EnginePrompt, Weights
from headrace.services.models.weights import model_folder

SHARPNESS = 15.0
"""Random matrices are multiplied by it. Otherwise all tokens would be almost equally likely, and no
test could tell right logprobs from wrong ones."""
CHANGE = 1.05
"""The matrices of a model that has weights are multiplied by it for the second version."""
POLICY = "default"


@dataclass(frozen=True)
class TrialModel:
    """A model folder, and a scratch folder with the weights that the engine gets."""

    folder: Path
    scratch: Path
    dtype: str

    @cached_property
    def vocabulary(self) -> int:
        """Number of token ids. Raises UsageError if config.json has no `vocab_size`."""
        try:
            config = json.loads((self.folder / "config.json").read_text("utf-8"))
            return int(config["vocab_size"])
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(f"{self.folder} has no usable config.json: {error!r}") from error

    def weights(self, version: int, policy: str = POLICY) -> Weights:
        """Returns a version's weights. All even versions have the same ones, and all odd ones."""
        return Weights(policy, version, self.scratch / f"{version % 2}.safetensors")

    def logprobs(self, version: int, prompt: EnginePrompt, tokens: Sequence[int]) -> list[float]:
        """Returns the logprob of each drawn token, as the trainer computes it. Blocks."""
        from headrace.trainer.forward.sequence_logprobs import sequence_logprobs

        sampling = Sampling(
            max_tokens=len(tokens),
            temperature=prompt.temperature or 1.0,
            allowed=pack_i32(prompt.allowed),
        )
        path = self.weights(version).path
        found = sequence_logprobs(
            self.folder, path, sampling, prompt.tokens, tokens, dtype=self.dtype
        )
        return [float(one) for one in found]


def make_trial_model(model: str, scratch: Path, dtype: str) -> TrialModel:
    """Writes two versions of weights for a recipe's `model`. Blocks.

    If its folder has weights, they are version 0. Raises UsageError if there is no such model.
    """
    from headrace.services.models.torch_models import DTYPES
    from headrace.trainer.model_loading import load_model, weights_file

    folder = model_folder(model, weights=True)
    trained = any(folder.glob("*.safetensors"))
    for version in (0, 1):
        network = load_model(folder, seed=version)
        factor = SHARPNESS if not trained else CHANGE if version else 1.0
        for matrix in network.parameters():
            if matrix.dim() > 1:
                matrix.data.mul_(factor)
        (scratch / f"{version}.safetensors").write_bytes(
            weights_file(network.state_dict(), DTYPES[dtype])
        )
    return TrialModel(folder, scratch, dtype)
