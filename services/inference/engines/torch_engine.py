"""Continuous batching with transformers: any causal language model, on CPU or one GPU.

It doesn't guarantee: prefix caching, paged memory, models with sliding-window or linear
attention (refused), or the same draw for the same seed in another batch.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.errors import BlobError, InfrastructureError, UsageError
from headrace.services.inference.engine import AdapterWeights, EngineSetup, Weights
from headrace.services.inference.engines.engine_thread import Change, ThreadedEngine
from headrace.services.inference.engines.row import Outcome, Row
from headrace.services.inference.engines.torch_batch import PolicyBatch
from headrace.services.inference.engines.torch_weights import check_fit, read_file, sharing
from headrace.services.models.lora import adapter_tensors, attach

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchEngine(ThreadedEngine):
    """An Engine on transformers. Making it reads the configuration, and may block.

    Options: `context`, in tokens, where it shall be shorter than the model's own.
    """

    name = "torch"
    turn_tokens = 16_384
    """Long prompts must not starve what is under way."""

    def __init__(self, setup: EngineSetup) -> None:
        if unknown := sorted(set(setup.options) - {"context"}):
            raise UsageError(f"the torch engine has no option {unknown}; it has: context")
        if setup.dtype not in DTYPES:
            raise UsageError(f"no dtype {setup.dtype!r} for the torch engine: {sorted(DTYPES)}")
        super().__init__(setup)
        self._config = _config(setup)
        self._context = _context(setup, self._config)
        self._vocabulary = int(self._config.vocab_size)
        self._device = _device(setup.device)
        self._batches: dict[str, PolicyBatch] = {}
        self._bases: dict[bytes, Any] = {}
        """Frozen models by their digest. Nothing calls them: policies have models that share
        their memory."""

    def _read(self, weights: Weights) -> tuple[PolicyBatch, dict[str, Tensor]]:
        state = read_file(weights.path)
        batch = self._batches.get(weights.policy)
        if batch is None:
            batch = self._adapted(weights.adapter) if weights.adapter else self._whole()
        check_fit(batch.own, state)
        return batch, state

    def _whole(self) -> PolicyBatch:
        model = self._model()
        return PolicyBatch(model, model.state_dict(keep_vars=True))

    def _adapted(self, adapter: AdapterWeights) -> PolicyBatch:
        """A policy's model on a base, which is read where no policy had it before."""
        base = self._bases.get(adapter.digest)
        if base is None:
            base, state = self._model(), read_file(adapter.base)
            own = base.state_dict()
            check_fit(base.state_dict(keep_vars=True), state)
            for name, value in state.items():
                own[name].copy_(value)
            self._bases[adapter.digest] = base
        model = sharing(base)
        dtype = DTYPES[self._setup.dtype]
        try:
            attach(model, adapter.targets, adapter.rank, adapter.alpha, dtype)
        except ValueError as error:
            raise BlobError(f"the adapter does not fit the model: {error}") from error
        return PolicyBatch(model, adapter_tensors(model))

    def _model(self) -> Any:
        make: Any = AutoModelForCausalLM.from_config
        dtype = DTYPES[self._setup.dtype]
        return make(self._config, dtype=dtype, attn_implementation="sdpa").to(self._device)

    # From here on: the engine's thread.

    def _work(self) -> None:
        torch.set_num_threads(self._setup.threads)
        with torch.inference_mode():
            super()._work()

    def _change(self, change: Change) -> None:
        batch, state = change.state
        try:
            batch.load(state, change.weights.version)
        except RuntimeError as error:
            raise InfrastructureError(
                "engine_failed", f"can't take over weights: {error}"
            ) from error
        self._batches[change.weights.policy] = batch

    def _under_way(self) -> list[Row]:
        return [row for batch in self._batches.values() for row in batch.rows]

    def _drop_cancelled(self) -> None:
        for batch in self._batches.values():
            batch.drop_cancelled()

    def _turn(self, joining: list[Row]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for policy, batch in self._batches.items():
            prompts = [row for row in joining if row.prompt.policy == policy]
            try:
                outcomes += batch.decode()
                outcomes += batch.prefill(prompts)
            except Exception as error:
                # A step's boundary: whatever torch raises (out of memory, a broken kernel)
                # reaches those who wait, and the engine serves on.
                logger.exception("policy %s: a step failed", policy)
                failure = InfrastructureError("engine_failed", f"{type(error).__name__}: {error}")
                rows = {id(row): row for row in (*batch.take_all(), *prompts)}
                outcomes += [(row, failure) for row in rows.values()]
        return outcomes


def _config(setup: EngineSetup) -> Any:
    try:
        config = AutoConfig.from_pretrained(setup.model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"{setup.model} has no usable config.json: {error}") from error
    if not hasattr(config, "vocab_size"):
        raise UsageError(f"{setup.model} is no plain language model: no vocab_size in config.json")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (
        getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    ):
        raise UsageError(
            f"{setup.model}: the torch engine serves models of full attention only, not "
            f"{sorted(kinds)}; use another engine"
        )
    return config


def _context(setup: EngineSetup, config: Any) -> int:
    longest = getattr(config, "max_position_embeddings", None)
    wanted = setup.options.get("context", longest)
    if not isinstance(wanted, int) or wanted < 1:
        raise UsageError(
            f"{setup.model}: the torch engine's option `context` is {wanted!r}; give a number of "
            "tokens, needed where config.json has no max_position_embeddings"
        )
    return wanted if longest is None else min(wanted, int(longest))


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"no device {name!r} here: {error}") from error
