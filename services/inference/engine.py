"""The public Engine API: continuous batching of one base model, for one or more policies.

Built-ins: `torch_engine.py` (transformers, seconds to start on a laptop's CPU), `vllm_engine.py`
(vLLM, on its CPU build or a GPU) and `scripted.py` (answers by rule, for tests and benchmarks). An
engine of your own is a class of this protocol, named in the recipe as `package.module:Class`, made
as `Class(EngineSetup(...))`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What the worker tells an engine at its making."""

    model: Path
    """Folder with `config.json` and `tokenizer.json`."""
    slots: int
    """Sequences generated at once."""
    threads: int = 1
    device: str = "auto"
    dtype: str = "float32"
    options: Mapping[str, Any] = field(default_factory=dict)
    adapters: int = 0
    """Most policies whose weights are adapters; 0 where weights are whole models."""
    rank: int = 0
    """The highest of the adapters."""


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """What weights are that are no whole model: pairs of matrices beside a frozen one's (LoRA)."""

    base: Path
    """A safetensors file of the frozen model, verified."""
    digest: bytes
    """The base's: equal ones are the same base, and an engine keeps one copy of it."""
    rank: int
    alpha: float
    targets: tuple[str, ...]
    """The layers that have a pair, by their full names."""


@dataclass(frozen=True, slots=True)
class Weights:
    """One version's weights on local disk, verified."""

    policy: str
    version: int
    path: Path
    """A safetensors file."""
    adapter: AdapterWeights | None = None
    """None: the weights are a whole model. All versions of a policy are of one adapter, or none."""


@dataclass(frozen=True, slots=True)
class EnginePrompt:
    """What to continue."""

    policy: str
    tokens: Sequence[int]
    """The whole context, as ids. Never empty."""
    max_tokens: int
    temperature: float = 1.0
    """0 is greedy; its logprobs are those at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_ids: Sequence[int] = ()
    """End the generation, and belong to it."""
    allowed: Sequence[int] = ()
    """The only ids that may be drawn; empty allows all."""
    seed: int | None = None
    json_schema: str = ""
    """The JSON schema that the text follows, up to a stop id. Empty leaves the text free."""
    around: tuple[str, str] = ("", "")
    """What comes before the JSON, and after it; nothing without a schema."""
    priority: int = 0
    """Of prompts that wait for a slot, the higher goes first; in no other way does it count."""


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What an engine drew."""

    tokens: list[int]
    logprobs: list[float]
    """Of each token, in nats, float32, after temperature and masks."""
    versions: list[int]
    """Of each token: the version whose weights drew it."""
    finish: Literal["stop", "length", "overflow", "interrupted"]
    """`overflow`: the context is full. `interrupted`: the engine closed before the end."""
    mixed: bool = False
    """True where part of the KV cache was computed by an older version than the last token's."""
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an engine can take now."""

    free_slots: int
    context: int
    """Most tokens of prompt and generation together; 0 where unknown: then nothing is sent."""


class Engine(Protocol):
    """The same contract for every engine; `tests/contract/` holds them to it.

    All methods are called from one asyncio loop and must not block it; making one may.
    """

    def capacity(self) -> Capacity:
        """Returns what the engine can take now."""

    async def generate(self, prompt: EnginePrompt) -> EngineOutput:
        """Continues a prompt; beyond the free slots it waits for one. Cancelling it frees its slot.

        ValueError where no engine could ever continue it (`check_prompt`), or this one can't follow
        its `json_schema`, InfrastructureError
        where the engine broke, or has no weights of the prompt's policy; HeadraceError where
        it can't go on: the process must end then.
        """

    async def load(self, weights: Weights) -> None:
        """Changes a policy's weights between two tokens: nothing in flight is lost.

        All or nothing: BlobError where the file does not fit the model, or is an adapter of another
        base or shape than the policy's before. The old weights stay then.
        """

    async def close(self, drain_s: float) -> None:
        """Ends within `drain_s` seconds; what is unfinished comes back `interrupted`."""


def check_prompt(prompt: EnginePrompt, vocabulary: int) -> None:
    """ValueError where no engine could ever continue this prompt: it says why."""
    if not prompt.tokens:
        raise ValueError("a prompt needs at least one token")
    if prompt.max_tokens < 1:
        raise ValueError(f"max_tokens is {prompt.max_tokens}; ask for at least 1")
    for name, ids in (("token", prompt.tokens), ("allowed", prompt.allowed)):
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            wrong = next(i for i in ids if not 0 <= i < vocabulary)
            raise ValueError(f"{name} id {wrong} is outside the vocabulary of {vocabulary}")
    if not (prompt.temperature >= 0 and 0 < prompt.top_p <= 1 and 0 <= prompt.min_p <= 1):
        raise ValueError(
            f"temperature {prompt.temperature}, top_p {prompt.top_p}, min_p {prompt.min_p}: "
            "they must be at least 0, within (0, 1], within [0, 1]"
        )
    if prompt.top_k < 0:
        raise ValueError(f"top_k is {prompt.top_k}; 0 is off")
    if prompt.json_schema and prompt.allowed:
        raise ValueError("json_schema and allowed ids exclude each other")
