"""A policy in the recipe: its model, what answers for it, and how it learns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from headrace.schemas.recipe.tables import (
    NotNegative,
    Positive,
    PositiveSeconds,
    RecipeError,
    Settings,
    explain,
)


class SamplingSettings(Settings):
    """How a policy's tokens are drawn while it trains."""

    temperature: float = Field(default=1.0, ge=0)
    """0 takes the likeliest token, which can't be trained on."""
    max_tokens: Positive = 256
    allowed: tuple[str, ...] = ()
    """The only tokens that may be drawn, as the tokenizer spells them; empty allows all."""
    stop: tuple[str, ...] = ()
    json_schema: dict[str, Any] = {}
    """A JSON schema that all that the policy says must follow; empty leaves it free."""


class VllmOptions(Settings):
    """The options of the engine `vllm`."""

    context: Positive | None = None
    """Most tokens of prompt and generation together; absent: what the model can."""
    kv: Literal["keep", "recompute"] = "keep"
    """What becomes of the KV cache of the sequences in flight as weights change between two tokens.

    `keep` goes on with it, and records the generation as of mixed KV; `recompute` reads prompt and
    tokens anew with the new weights. Later prompts never meet a cache of older weights."""
    arguments: dict[str, Any] = {}
    """More of vLLM's own `EngineArgs`, as `kv_cache_memory_bytes` or `gpu_memory_utilization`."""


class EngineSettings(Settings):
    """What answers prompts."""

    use: str = "torch"
    """`torch`, `vllm`, `scripted`, or an import path."""
    options: dict[str, Any] = {}
    """`torch` takes `context`; for `vllm` see `VllmOptions`."""
    slots: Positive = 256
    """Sequences generated at once."""
    threads: Positive = 1
    device: str = "auto"
    """`auto` takes a GPU where there is one."""

    @model_validator(mode="after")
    def _options_are_known(self) -> EngineSettings:
        if self.use == "vllm":
            vllm_options(self.options)
        return self


class Groups(Settings):
    """How a task's outcomes become advantages."""

    advantage: str = "grpo"
    """`grpo`, `dr_grpo`, `rloo`, or an import path."""
    filters: tuple[str, ...] = ()
    """Reasons to drop a group, in order: `zero_advantage`, or import paths."""


class Batches(Settings):
    """How groups become batches."""

    groups: Positive = 16
    max_staleness: NotNegative = 1
    """Versions by which a sample's oldest token may be behind the batch's start, n - 1."""
    prefetch: NotNegative = 1
    """Batches assembled ahead of the newest published version."""
    order: Literal["edf", "fifo"] = "edf"
    """Whose group goes first: that which goes stale first, or that which ended first."""
    batch_wait_s: PositiveSeconds = 30.0
    """After it a batch may be short, so that nothing waits for ever."""


class Training(Settings):
    """One trainer of one policy."""

    loss: str = "grpo"
    """`grpo`, or an import path."""
    learning_rate: float = Field(default=1e-3, gt=0)
    demonstration_learning_rate: float | None = Field(default=None, gt=0)
    """Of updates that hold nothing but demonstrations; absent: `learning_rate`. What rewards bear
    is often less than what cross-entropy needs."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    warmup_updates: NotNegative = 0
    clip_low: float = Field(default=0.2, gt=0)
    clip_high: float = Field(default=0.2, gt=0)
    importance_cap: float = Field(default=2.0, gt=0)
    """Truncation of the importance weight between the trainer's and the engine's old policy."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Coefficient of the policy's entropy a token, in nats, which training then raises as well."""
    updates: Positive = 1
    """Optimizer updates a batch: it is cut into that many minibatches."""
    max_tokens: Positive = 16_384
    """Tokens of one micro-batch, padding included."""
    checkpoint_every: Positive = 10
    """Versions between checkpoints."""
    keep_checkpoints: Positive = 2
    full_every: Positive = 20
    """Versions from one publication of the whole weights to the next. Between them only what has
    changed is published, where that is smaller; 1 publishes whole weights alone."""
    threads: Positive = 1
    device: str = "auto"


class Lora(Settings):
    """An adapter that learns in place of the weights (Hu et al., arXiv:2106.09685).

    It has no dropout: with it the trainer's logprobs would be others than those that are served."""

    rank: Positive = 16
    """Of the two matrices whose product is added to a layer's weights."""
    alpha: float = Field(default=32.0, gt=0)
    """The product counts alpha / rank times."""
    targets: tuple[str, ...] = ()
    """The linear layers that have one, by their name or its last parts, as `q_proj` or
    `mlp.down_proj`; empty: all but the output head."""


class Policy(Settings):
    """A model that learns."""

    model: str
    """A folder with `config.json` and `tokenizer.json`: a name under `infra/models`, a path, or a
    model of the Hugging Face Hub, as `owner/name@revision`.

    Weights beside them are taken as version 0; without, version 0 is random by `seed`."""
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora: Lora | None = None
    """Absent: all weights learn. Policies of equal model, seed and dtype then share their base."""
    engine: EngineSettings = EngineSettings()
    sampling: SamplingSettings = SamplingSettings()
    groups: Groups = Groups()
    batches: Batches = Batches()
    training: Training | None = Training()
    """Absent (`training = false` in TOML): version 0 serves for ever."""

    @field_validator("training", mode="before")
    @classmethod
    def _false_is_none(cls, value: Any) -> Any:
        return None if value is False else value


def vllm_options(options: Mapping[str, Any]) -> VllmOptions:
    """The options of the engine `vllm`. RecipeError names each wrong one."""
    try:
        return VllmOptions.model_validate(options)
    except ValidationError as error:
        raise RecipeError(f"options of the vllm engine: {explain(error)}") from error
