"""The sizes of a dense decoder, read from its `config.json` without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from headrace.errors import UsageError
from headrace.schemas.problems import problems_of

HEAD_WIDTH = {"llama": None, "mistral": None, "qwen2": None, "qwen3": 128}
"""The families of models that can be planned, and the width of a head if `config.json` is silent.
None: the hidden size divided by the number of heads."""


class _Config(BaseModel):
    """The keys of `config.json` that say how large a model is, with transformers' defaults."""

    model_type: str
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int | None = Field(default=None, gt=0)
    head_dim: int | None = Field(default=None, gt=0)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    max_position_embeddings: int = Field(default=2048, gt=0)


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer: its name in every decoder layer, and its widths."""

    name: str
    inside: int
    outside: int
    bias: bool


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of equal layers with RMS norms, grouped attention and a gated MLP."""

    vocabulary: int
    """V."""
    hidden: int
    """H."""
    inner: int
    """F, the width inside the MLP."""
    layers: int
    heads: int
    key_heads: int
    head_width: int
    context: int
    """Tokens of the longest sequence."""
    tied: bool
    """Whether the output head is the embedding."""
    norms_of_heads: bool
    """Whether queries and keys are normalized, as in Qwen3."""
    linears: tuple[Linear, ...]
    """The linear layers of one decoder layer."""

    @property
    def queries(self) -> int:
        """The width of all queries of a token."""
        return self.heads * self.head_width

    @property
    def keys(self) -> int:
        """The width of all keys of a token, which is that of its values too."""
        return self.key_heads * self.head_width

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        norms = 2 * self.hidden + (2 * self.head_width if self.norms_of_heads else 0)
        return norms + sum(one.outside * (one.inside + one.bias) for one in self.linears)

    @property
    def outer_parameters(self) -> int:
        """Parameters outside of the layers: embedding, head and last norm."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """All parameters. A tied embedding counts once."""
        return self.layers * self.layer_parameters + self.outer_parameters

    @property
    def largest(self) -> int:
        """Elements of the largest tensor."""
        return self.hidden * max(self.vocabulary, self.inner)

    def chosen(self, targets: Sequence[str]) -> tuple[Linear, ...]:
        """Returns the layers that the targets of a LoRA adapter name. Empty targets name all.

        Raises UsageError if a target names none.
        """
        found = [
            one for one in self.linears
            if not targets or any(f".{one.name}".endswith(f".{target}") for target in targets)
        ]  # fmt: skip
        for target in targets:
            if not any(f".{one.name}".endswith(f".{target}") for one in self.linears):
                raise UsageError(
                    f"the planner knows no linear layer {target!r}. It knows "
                    f"{', '.join(one.name for one in self.linears)}"
                )
        return tuple(found)


def read_shape(folder: Path) -> ModelShape:
    """Reads a model's sizes. Raises UsageError if the file is not usable, or of another family."""
    path = folder / "config.json"
    try:
        config = _Config.model_validate(json.loads(path.read_text("utf-8")))
    except ValidationError as error:
        raise UsageError(f"{path} can't be planned: {'; '.join(problems_of(error))}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not a readable JSON file: {error}") from error
    if config.model_type not in HEAD_WIDTH:
        raise UsageError(
            f"{path}: models of the type {config.model_type!r} can't be planned. The planner knows "
            f"{', '.join(HEAD_WIDTH)}"
        )
    heads, hidden = config.num_attention_heads, config.hidden_size
    width = config.head_dim or HEAD_WIDTH[config.model_type] or hidden // heads
    key_heads = config.num_key_value_heads or heads
    return ModelShape(
        vocabulary=config.vocab_size,
        hidden=hidden,
        inner=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=heads,
        key_heads=key_heads,
        head_width=width,
        context=config.max_position_embeddings,
        tied=config.tie_word_embeddings,
        norms_of_heads=config.model_type == "qwen3",
        linears=_linears(config, heads * width, key_heads * width),
    )


def _linears(config: _Config, queries: int, keys: int) -> tuple[Linear, ...]:
    hidden, inner = config.hidden_size, config.intermediate_size
    biased = config.attention_bias and config.model_type in ("llama", "qwen3")
    inputs = biased or config.model_type == "qwen2"
    mlp = config.mlp_bias and config.model_type == "llama"
    return (
        Linear("self_attn.q_proj", hidden, queries, inputs),
        Linear("self_attn.k_proj", hidden, keys, inputs),
        Linear("self_attn.v_proj", hidden, keys, inputs),
        Linear("self_attn.o_proj", queries, hidden, biased),
        Linear("mlp.gate_proj", hidden, inner, mlp),
        Linear("mlp.up_proj", hidden, inner, mlp),
        Linear("mlp.down_proj", inner, hidden, mlp),
    )
