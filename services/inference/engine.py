"""The public Engine API: continuous batching of one base model for one or more policies.

The built-in engines are `torch_engine.py` (transformers; starts in seconds on a laptop's CPU),
`vllm_engine.py` (vLLM, on its CPU build or a GPU), `openai/` (a server of yours) and `scripted.py`
(fixed answers, for tests and benchmarks). Your own engine is a class that implements `Engine`. The
recipe names it as `package.module:Class`, and the worker makes it as `Class(EngineSetup(...))`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """The settings of an engine, from the recipe."""

    model: Path
    """Folder with `config.json` and `tokenizer.json`."""
    slots: int
    """Sequences generated at once."""
    threads: int = 1
    device: str = "auto"
    dtype: str = "float32"
    options: Mapping[str, Any] = field(default_factory=dict)
    adapters: int = 0
    """Maximum number of policies whose weights are adapters; 0 if weights are whole models."""
    rank: int = 0
    """The highest rank of the adapters."""


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """Describes weights that are a LoRA adapter: pairs of matrices added to a frozen base."""

    base: Path = field(compare=False)
    """A safetensors file of the frozen model, verified."""
    digest: bytes
    """Digest of the base. An engine keeps one copy of bases with equal digests."""
    rank: int
    alpha: float
    targets: tuple[str, ...]
    """The full names of the layers that have a pair."""


@dataclass(frozen=True, slots=True)
class Weights:
    """One version's weights on local disk, verified."""

    policy: str
    version: int
    path: Path
    """A safetensors file."""
    adapter: AdapterWeights | None = None
    """None if the weights are a whole model. It is the same for all versions of a policy."""


@dataclass(frozen=True, slots=True)
class EnginePrompt:
    """The tokens to continue, and how to draw the next ones."""

    policy: str
    tokens: Sequence[int]
    """The whole context, as ids. Never empty."""
    max_tokens: int
    temperature: float = 1.0
    """0 is greedy. Logprobs of greedy tokens are those at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_ids: Sequence[int] = ()
    """These end the generation and are its last token."""
    allowed: Sequence[int] = ()
    """The only ids that may be drawn; empty allows all."""
    seed: int | None = None
    json_schema: str = ""
    """The JSON schema that the text up to a stop id follows. Empty leaves the text free."""
    around: tuple[str, str] = ("", "")
    """The texts before and after the JSON. Ignored without a schema."""
    priority: int = 0
    """If prompts wait for a slot, the highest priority goes first. It has no other effect."""


@dataclass(frozen=True, slots=True)
class ScoredRun:
    """Neighbouring tokens of a sequence to score, which were sampled in the same way."""

    first: int
    """Index of the first one in the sequence, at least 1."""
    count: int
    temperature: float = 1.0
    allowed: Sequence[int] = ()
    json_schema: str = ""
    """As in EnginePrompt. The run is the whole answer."""
    around: tuple[str, str] = ("", "")
    stop_ids: Sequence[int] = ()
    """The ids that end an answer with a schema."""


@dataclass(frozen=True, slots=True)
class ScorePrompt:
    """A sequence, and the tokens in it whose logprobs are asked."""

    policy: str
    tokens: Sequence[int]
    runs: Sequence[ScoredRun]
    """In the order of the sequence, at least one."""
    priority: int = 0
    """As in EnginePrompt: the queue is the same."""


Finish = Literal["stop", "length", "overflow", "interrupted"]
"""`overflow`: the context is full. `interrupted`: the engine closed before the end."""


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """The tokens that an engine drew. Or scores, which have no `tokens`."""

    tokens: list[int]
    logprobs: list[float]
    """One for each token: in nats, float32, after temperature and masks."""
    versions: list[int]
    """One for each token: the version whose weights drew it."""
    finish: Finish
    mixed: bool = False
    """True if an older version than the last token's computed a part of the KV cache."""
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """The prompts that an engine can accept now."""

    free_slots: int
    context: int
    """Maximum tokens of prompt and generation together. If 0, it is unknown: send no prompts."""


class Engine(Protocol):
    """The contract of every engine. `python -m headrace.conformance engine` checks it.

    All methods are called from one asyncio loop and must not block it. The constructor may block.
    An engine that also has the method of `ScoringEngine` can serve a teacher.
    """

    def capacity(self) -> Capacity:
        """Returns what the engine can take now."""

    async def generate(self, prompt: EnginePrompt) -> EngineOutput:
        """Continues a prompt. Waits for a slot if none is free. Cancelling it frees its slot.

        Raises ValueError if no engine could continue the prompt (`check_prompt`), or if this engine
        can't follow its `json_schema`; InfrastructureError if the engine failed, or has no weights
        of the prompt's policy; HeadraceError if the engine can't recover, so the process must end.
        """

    async def load(self, weights: Weights) -> None:
        """Changes a policy's weights between two tokens. Sequences in flight continue.

        Raises BlobError if the file does not fit the model, or if it is an adapter of another base
        or shape than the policy's earlier weights. Then the earlier weights stay.
        """

    async def close(self, drain_s: float) -> None:
        """Ends within `drain_s` seconds. Unfinished sequences come back `interrupted`."""


@runtime_checkable
class ScoringEngine(Protocol):
    """What an engine needs besides `Engine` to serve a teacher."""

    async def score(self, prompt: ScorePrompt) -> EngineOutput:
        """Returns one logprob and one version for each token of the runs, in their order.

        The logprobs are those of the distribution that `generate` would draw from, after
        temperature and masks. Nothing is drawn: `tokens` is empty, and `finish` is `stop`, or
        `overflow` if the sequence does not fit into the context. A score waits for a slot and takes
        it as a prompt does. Raises what `generate` raises.
        """


@runtime_checkable
class FailingEngine(Protocol):
    """What an engine needs besides `Engine` so that its worker ends although no prompt is there."""

    async def failed(self) -> None:
        """Waits until the engine can't recover, and then raises HeadraceError."""


def check_score(prompt: ScorePrompt, vocabulary: int) -> None:
    """Raises ValueError with the reason if no engine could ever score this sequence."""
    ids = [("token", prompt.tokens), *(("allowed", run.allowed) for run in prompt.runs)]
    check_ids(ids, vocabulary)
    end = 1
    for run in prompt.runs:
        if run.first < end or run.count < 1 or run.first + run.count > len(prompt.tokens):
            raise ValueError(
                f"a run of {run.count} tokens from {run.first} on: runs must ascend, begin at 1 or "
                f"later, and end within the {len(prompt.tokens)} tokens"
            )
        end = run.first + run.count
        if not run.temperature > 0:
            raise ValueError(f"temperature {run.temperature}: only more than 0 can be scored")
        if run.json_schema and run.allowed:
            raise ValueError("json_schema and allowed ids exclude each other: give one of them")
    if not prompt.runs:
        raise ValueError("a score needs at least one token to score")


def check_ids(named: Iterable[tuple[str, Sequence[int]]], vocabulary: int) -> None:
    """Raises ValueError if an id is outside the vocabulary. The names are for the message."""
    for name, ids in named:
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            wrong = next(i for i in ids if not 0 <= i < vocabulary)
            raise ValueError(f"{name} id {wrong} is outside the vocabulary of {vocabulary} tokens")


def check_prompt(prompt: EnginePrompt, vocabulary: int) -> None:
    """Raises ValueError with the reason if no engine could ever continue this prompt."""
    if not prompt.tokens:
        raise ValueError("a prompt needs at least one token")
    if prompt.max_tokens < 1:
        raise ValueError(f"max_tokens is {prompt.max_tokens}: ask for at least 1")
    check_ids((("token", prompt.tokens), ("allowed", prompt.allowed)), vocabulary)
    if not (prompt.temperature >= 0 and 0 < prompt.top_p <= 1 and 0 <= prompt.min_p <= 1):
        raise ValueError(
            f"temperature {prompt.temperature}, top_p {prompt.top_p}, min_p {prompt.min_p}: "
            "temperature must be at least 0, top_p within (0, 1], and min_p within [0, 1]"
        )
    if prompt.top_k < 0:
        raise ValueError(f"top_k is {prompt.top_k}: give 0 (off) or more")
    if prompt.json_schema and prompt.allowed:
        raise ValueError("json_schema and allowed ids exclude each other: give one of them")
