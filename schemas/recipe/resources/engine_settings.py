"""The inference engine of a policy in the recipe, and the options of the built-in engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from headrace.schemas.problems import problems_of
from headrace.schemas.recipe.secret_references import Options
from headrace.schemas.recipe.tables import (
    NotNegative,
    Positive,
    PositiveSeconds,
    RecipeError,
    Settings,
)

Chosen = TypeVar("Chosen", bound=Settings)
OPENAI = "openai"
"""The engine that asks a server."""
VLLM_PROCESSES = frozenset(
    {
        *(
            "pipeline_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        ),
        *("data_parallel_size", "data_parallel_size_local", "data_parallel_backend", "nnodes"),
        *("distributed_executor_backend", "worker_cls", "worker_extension_cls"),
        *("weight_transfer_config", "enable_elastic_ep"),
    }
)
"""Arguments of vLLM that would start other processes than Headrace ends and brings weights to."""
SecretTable = dict[Literal["env", "file"], str]
"""A reference to a secret, as the recipe writes it."""


class TorchOptions(Settings):
    """The options of the engine `torch`, which runs transformers on a CPU or one GPU."""

    context: Positive | None = None
    """Maximum number of tokens of prompt and generation together. It can't exceed the model's own
    limit. Absent: the model's own limit."""


class ScriptedOptions(Settings):
    """The options of the engine `scripted`, which repeats the same tokens. It is for tests."""

    tokens: Annotated[tuple[int, ...], Field(min_length=1)] | None = None
    """The token ids to draw, one after the other, again from the first after the last. Absent:
    those of `text`, or 0 without it."""
    text: Annotated[str, Field(min_length=1)] | None = None
    """A text that the model's tokenizer turns into the ids to draw, instead of `tokens`."""
    count: Positive | None = None
    """Number of tokens after which a generation stops. Absent: the prompt's limit."""
    delay_ms: float = Field(default=0.0, ge=0)
    """Milliseconds before each token."""
    fail_every: NotNegative = 0
    """With n, every nth prompt fails. 0: none fails."""

    @model_validator(mode="after")
    def _tokens_or_text(self) -> ScriptedOptions:
        if self.tokens is not None and self.text is not None:
            raise ValueError("the scripted engine takes `tokens` or `text`, not both")
        return self


class VllmOptions(Settings):
    """The options of the engine `vllm`, which runs vLLM on its CPU build or on a GPU."""

    context: Positive | None = None
    """Maximum number of tokens of prompt and generation together. Absent: the model's own limit."""
    kv: Literal["keep", "recompute"] = "keep"
    """What happens to the KV cache of running sequences when weights change between two tokens.

    `keep` goes on with the cache and records the generation as one with mixed KV. `recompute`
    computes it again for the prompt and the tokens so far, with the new weights. Later prompts
    never use a cache of older weights."""
    tensor_parallel_size: Positive = 1
    """Number of GPUs of one machine that share the model. Each has a shard of every layer and of
    the KV cache, in a process of its own. It must divide the model's attention heads."""
    arguments: dict[str, Any] = {}
    """Further `EngineArgs` of vLLM, for example `gpu_memory_utilization`."""

    @field_validator("arguments")
    @classmethod
    def _leaves_processes_alone(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "tensor_parallel_size" in value:
            raise ValueError("tensor_parallel_size is an option beside `arguments`: move it there")
        if taken := sorted(VLLM_PROCESSES & set(value)):
            raise ValueError(
                f"{', '.join(taken)}: Headrace can't use it. An engine has the processes of "
                "`tensor_parallel_size` and no others. For more throughput, start more workers"
            )
        return value


class OpenaiOptions(Settings):
    """The options of the engine `openai`, a server with OpenAI's API that returns token ids.

    vLLM's server is one. The server must run, and Headrace does not start it."""

    url: str
    """The server's API, for example `http://127.0.0.1:8000/v1`."""
    served_model: str
    """The model's name at the server."""
    token: str | SecretTable | None = None
    """A bearer token for the server, as a reference to a secret. `weights_url` gets it only if it
    has the same scheme, host and port. Absent: none."""
    context: Positive | None = None
    """Maximum number of tokens of prompt and generation together. Absent: what the server says as
    `max_model_len` at `/models`."""
    timeout_s: PositiveSeconds = 600.0
    """Seconds that one prompt may take at the server, with all its tries."""
    tries: Positive = 3
    """How often a prompt is sent at most, if the connection is lost or the server is overloaded."""
    weights_url: str | None = None
    """An address that gets a POST with each new version, and answers when the server serves it.
    Absent: the server serves one fixed version."""
    weights_s: PositiveSeconds = 600.0
    """Seconds that this answer may take."""
    extra: dict[str, Any] = {}
    """Further fields of each request."""

    @field_validator("url", "weights_url")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r}: give an address, as http://127.0.0.1:8000/v1")
        return value


ENGINE_OPTIONS: dict[str, type[Settings]] = {
    "torch": TorchOptions,
    "vllm": VllmOptions,
    OPENAI: OpenaiOptions,
    "scripted": ScriptedOptions,
}
"""The options of the built-in engines."""


def engine_options(kind: type[Chosen], options: Mapping[str, Any]) -> Chosen:
    """Returns the options of an engine as a `kind`. Raises RecipeError, which names each wrong one.

    `kind` is one of ENGINE_OPTIONS.
    """
    try:
        return kind.model_validate(options)
    except ValidationError as error:
        name = next(name for name, one in ENGINE_OPTIONS.items() if one is kind)
        problems = "; ".join(problems_of(error))
        raise RecipeError(f"options of the {name} engine: {problems}") from error


class EngineSettings(Settings):
    """The inference engine, which answers prompts."""

    use: str = "torch"
    """`torch`, `vllm`, `openai`, `scripted`, or an import path."""
    options: Options = {}
    """Options of the engine."""
    slots: Positive = 256
    """Number of sequences that are generated at the same time."""
    threads: Positive = 1
    """Number of CPU threads."""
    device: str = "auto"
    """The device that the model runs on. `auto` takes a GPU if there is one."""

    @model_validator(mode="after")
    def _options_are_known(self) -> EngineSettings:
        if self.use in ENGINE_OPTIONS:
            engine_options(ENGINE_OPTIONS[self.use], self.options)
        return self
