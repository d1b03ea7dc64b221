"""Continuous batching with transformers: causal language models on a CPU or one GPU.

It has no prefix caching and no paged memory. It refuses models with sliding-window or linear
attention. The same seed may draw other tokens in another batch.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace.errors import InfrastructureError, UsageError
from headrace.schemas.recipe.resources.engine_settings import TorchOptions, engine_options
from headrace.services.inference.engine import AdapterWeights, EngineSetup, Weights
from headrace.services.inference.engines.engine_thread import ThreadedEngine, WeightsChange
from headrace.services.inference.engines.row import AnyRow, Outcome, Row, ScoreRow
from headrace.services.inference.engines.torch_batch import PolicyBatch
from headrace.services.models.even_rounding import WIDE_ATTENTION
from headrace.services.models.lora import adapted, adapter_tensors
from headrace.services.models.torch_models import (
    DTYPES,
    check_fit,
    overwrite,
    pick_device,
    read_config,
    read_file,
)

logger = logging.getLogger(__name__)


class TorchEngine(ThreadedEngine):
    """An Engine on transformers. The constructor reads the model's configuration and may block."""

    name = "torch"
    prefill_tokens = 16_384
    """Long prompts must not starve the sequences in flight."""

    def __init__(self, setup: EngineSetup) -> None:
        if setup.dtype not in DTYPES:
            raise UsageError(f"the torch engine has no dtype {setup.dtype!r}: use {sorted(DTYPES)}")
        super().__init__(setup)
        self._config = _config(setup)
        self._context = _context(setup, self._config)
        self._vocabulary = int(self._config.vocab_size)
        self._device = pick_device(setup.device)
        self._batches: dict[str, PolicyBatch] = {}
        self._bases: dict[bytes, Any] = {}
        """Frozen models by their digest. The models of the policies share their tensors."""

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
        """Makes a policy's model on its base. Reads the base if no policy has used it before."""
        base = self._bases.get(adapter.digest)
        if base is None:
            base = self._model()
            overwrite(base.state_dict(keep_vars=True), read_file(adapter.base))
            self._bases[adapter.digest] = base
        dtype = DTYPES[self._setup.dtype]
        model = adapted(base, adapter.targets, adapter.rank, adapter.alpha, dtype)
        return PolicyBatch(model, adapter_tensors(model))

    def _model(self) -> Any:
        make: Any = AutoModelForCausalLM.from_config
        dtype = DTYPES[self._setup.dtype]
        return make(self._config, dtype=dtype, attn_implementation=WIDE_ATTENTION).to(self._device)

    # The methods below run in the engine's thread.

    def _work(self) -> None:
        torch.set_num_threads(self._setup.threads)
        with torch.inference_mode():
            super()._work()

    def _change(self, change: WeightsChange) -> None:
        batch, state = change.state
        try:
            batch.load(state, change.weights.version)
        except RuntimeError as error:
            raise InfrastructureError("engine_failed", f"can't load weights: {error}") from error
        self._batches[change.weights.policy] = batch

    def _rows(self) -> list[AnyRow]:
        return [row for batch in self._batches.values() for row in batch.rows]

    def _drop_cancelled(self) -> None:
        for batch in self._batches.values():
            batch.drop_cancelled()

    def _advance(self, joining: list[AnyRow]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for policy, batch in self._batches.items():
            new = [row for row in joining if row.prompt.policy == policy]
            prompts = [row for row in new if isinstance(row, Row)]
            scores = [row for row in new if isinstance(row, ScoreRow)]
            try:
                outcomes += batch.decode()
                outcomes += batch.prefill(prompts)
            except Exception as error:
                failure = _failed_step(policy, error)
                outcomes += [(row, failure) for row in {*batch.take_all(), *prompts}]
            try:
                outcomes += batch.score(scores)
            except Exception as error:
                failure = _failed_step(policy, error)
                outcomes += [(row, failure) for row in scores]
        return outcomes


def _failed_step(policy: str, error: Exception) -> InfrastructureError:
    """Logs what torch raised, and returns the error for the callers. The engine goes on.

    torch may raise anything, such as out of memory or a failed kernel.
    """
    logger.error("policy %s: a step failed", policy, exc_info=error)
    return InfrastructureError("engine_failed", f"{type(error).__name__}: {error}")


def _config(setup: EngineSetup) -> Any:
    config = read_config(setup.model)
    if not hasattr(config, "vocab_size"):
        raise UsageError(
            f"{setup.model} is not a plain language model: its config.json has no vocab_size"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (
        getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    ):
        raise UsageError(
            f"{setup.model}: the torch engine serves only models with full attention, not "
            f"{sorted(kinds)}: use another engine"
        )
    return config


def _context(setup: EngineSetup, config: Any) -> int:
    wanted = engine_options(TorchOptions, setup.options).context
    longest = getattr(config, "max_position_embeddings", None)
    known = [limit for limit in (wanted, longest) if limit is not None]
    if not known:
        raise UsageError(
            f"{setup.model}: its config.json has no max_position_embeddings. Set the option "
            "`context` of the torch engine to a number of tokens"
        )
    return min(known)
