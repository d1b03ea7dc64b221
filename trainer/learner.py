"""The learner: a model, its optimizer, and what one batch does to them. No log, no clock.

It does not share a model over processes: one process, one device. Parameters and optimizer are
float32; with dtype bfloat16 the forward pass runs in it (autocast), and so are the published
weights. Where an adapter learns, the rest of the model is frozen, in the policy's dtype as it is
served, and only the adapter is float32. On a CPU the same batches give the same weights, bit by
bit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.errors import UsageError
from headrace.schemas.recipe.policy import Policy
from headrace.services.base.plugins import load
from headrace.services.models.lora import adapter_tensors
from headrace.trainer.collate import (
    Inputs,
    collate,
    drawn_logprobs,
    entropy,
    processed_distribution,
)
from headrace.trainer.losses import LOSSES, Loss, MicroBatch, cross_entropy, entropy_bonus
from headrace.trainer.model_loading import (
    DTYPES,
    Base,
    ChosenLogits,
    add_adapter,
    load_model,
    pick_device,
    weights_file,
)
from headrace.trainer.plan import pack
from headrace.trainer.schema_masks import SchemaMasks
from headrace.trainer.sequences import Stopped, TokenSequence, UnusableBatch, UpdateBatch
from headrace.trainer.training_metrics import Totals


class Learner:
    """One policy's model in training. Used by one thread at a time."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        """Version 0: the weights in the folder, or random ones by the policy's seed.

        Sets torch's number of threads and, on a CPU, its deterministic algorithms: both are
        settings of the process. UsageError where there is no such device or model.
        """
        if policy.training is None:
            raise UsageError("this policy is not trained: its recipe says `training = false`")
        self._settings = policy.training
        self._dtype = DTYPES[policy.dtype]
        self.device = pick_device(self._settings.device)
        torch.set_num_threads(self._settings.threads)
        if self.device.type == "cpu":
            torch.use_deterministic_algorithms(True)
        # Without dropout: with it these logprobs would be others than those that are served.
        self._model = load_model(folder, policy.seed).eval()
        self.base: Base | None = None
        """What is frozen; None where all weights learn."""
        if policy.lora is not None:
            self.base = add_adapter(self._model, folder, policy.lora, policy.seed, self._dtype)
        self._model.to(self.device)
        self._logits_of = ChosenLogits(self._model)
        self.vocabulary = int(self._model.config.vocab_size)
        self._schemas = SchemaMasks(folder, self.vocabulary)
        self._loss: Loss = load("loss", self._settings.loss, LOSSES)
        self._parameters = [one for one in self._model.parameters() if one.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=self._settings.learning_rate,
            betas=self._settings.betas,
            weight_decay=self._settings.weight_decay,
        )
        self.updates_done = 0
        """Optimizer updates since version 0."""

    def weights(self) -> bytes:
        """What has learned, weights or adapter: a safetensors file in the policy's dtype."""
        learned = self._model.state_dict() if self.base is None else adapter_tensors(self._model)
        return weights_file(learned, self._dtype)

    def train(
        self, updates: Sequence[UpdateBatch], stop: threading.Event | None = None
    ) -> dict[str, float]:
        """Makes one optimizer update after the other; returns their metrics.

        All or nothing: UnusableBatch (a loss or gradient is not finite, or the device is out of
        memory) and Stopped (`stop` was set) leave weights and optimizer as they were.
        """
        totals = Totals()
        with self._rollback(needed=len(updates) > 1):
            proximal = [self._proximal(update, stop) for update in updates]
            for update, anchors in zip(updates, proximal, strict=True):
                self._optimizer.zero_grad(set_to_none=True)
                for chosen, anchor in zip(self._pack(update), anchors, strict=True):
                    _check(stop)
                    self._backward([update.sequences[i] for i in chosen], anchor, update, totals)
                self._step(self._learning_rate(update), totals)
        return totals.metrics()

    def save(self, path: Path) -> None:
        """Writes all that training goes on from, as a safetensors file: no version, no place.

        OSError where the disk can't take it.
        """
        try:
            save_file(self._tensors(), path)
        except SafetensorError as error:  # so it calls a full disk
            raise OSError(f"{path}: {error}") from error

    def load(self, path: Path) -> None:
        """Goes on from what `save` wrote. UsageError where that is of another model, or base."""
        self._restore(load_file(path))

    def _tensors(self) -> dict[str, Tensor]:
        """Model, optimizer, scheduler and random state by name. May share the learner's memory.

        Of a frozen base, no more than its digest.
        """
        kept = self._learning()
        for index, state in self._optimizer.state_dict()["state"].items():
            kept |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
        kept["random"] = torch.get_rng_state()
        kept["updates_done"] = torch.tensor(self.updates_done)
        if self.device.type == "cuda":
            kept["random.cuda"] = torch.cuda.get_rng_state(self.device)
        return {name: tensor.detach().contiguous().cpu() for name, tensor in kept.items()}

    def _learning(self) -> dict[str, Tensor]:
        """What the optimizer changes, and what says of which model it is."""
        parameters = self._model.named_parameters()
        kept = {f"model.{name}": one for name, one in parameters if one.requires_grad}
        if self.base is None:
            return kept | {f"buffer.{name}": one for name, one in self._model.named_buffers()}
        return kept | {"base": torch.frombuffer(bytearray(self.base.digest), dtype=torch.uint8)}

    def _restore(self, tensors: dict[str, Tensor]) -> None:
        own = self._learning()
        given = {
            name: tensor
            for name, tensor in tensors.items()
            if name.partition(".")[0] in ("model", "buffer", "base")
        }
        if {name: tensor.shape for name, tensor in own.items()} != {
            name: tensor.shape for name, tensor in given.items()
        }:
            raise UsageError("the checkpoint is of another model than the recipe's")
        if self.base is not None and not torch.equal(own.pop("base"), given["base"]):
            raise UsageError("the checkpoint's adapter is of another base than the recipe's model")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(given[name])
        self._restore_optimizer(tensors)
        torch.set_rng_state(tensors["random"])
        if self.device.type == "cuda" and "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"], self.device)
        self.updates_done = int(tensors["updates_done"])

    def _restore_optimizer(self, tensors: dict[str, Tensor]) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "optimizer":
                index, _, field = rest.partition(".")
                # A copy: the optimizer updates it in place.
                state.setdefault(int(index), {})[field] = tensor.clone()
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state})

    def _pack(self, update: UpdateBatch) -> list[list[int]]:
        return pack([len(one.tokens) for one in update.sequences], self._settings.max_tokens)

    def _proximal(
        self, update: UpdateBatch, stop: threading.Event | None
    ) -> Sequence[Tensor | None]:
        """The logprobs at the batch's start, by micro-batch.

        None for a batch of one update: there the new logprobs are those of the start.
        """
        packed = self._pack(update)
        if self._settings.updates == 1:
            return [None] * len(packed)
        anchors: list[Tensor] = []
        with torch.no_grad():
            for chosen in packed:
                _check(stop)
                inputs = self._collate([update.sequences[index] for index in chosen])
                anchors.append(self._logprobs(inputs)[0])
        return anchors

    def _collate(self, sequences: Sequence[TokenSequence]) -> Inputs:
        return collate(sequences, self.vocabulary, self.device, self._schemas)

    def _logprobs(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Of the trained tokens: logprobs [N], and entropies [N] of what they were drawn from."""
        reduced = self._dtype != torch.float32
        with torch.autocast(self.device.type, dtype=self._dtype, enabled=reduced):
            logits = self._logits_of(inputs)
        distribution = processed_distribution(logits, inputs)
        # Over a large vocabulary the entropy's gradient needs memory: only where it is used.
        spread = distribution if self._settings.entropy_bonus else distribution.detach()
        return drawn_logprobs(distribution, inputs), entropy(spread)

    def _backward(
        self,
        sequences: Sequence[TokenSequence],
        anchor: Tensor | None,
        update: UpdateBatch,
        totals: Totals,
    ) -> None:
        inputs = self._collate(sequences)
        logprobs, entropies = self._logprobs(inputs)
        proximal = logprobs.detach() if anchor is None else anchor
        loss = logprobs.new_zeros(())
        if len(said := inputs.demonstrated):
            loss = cross_entropy(logprobs[said], inputs.advantages[said], update.tokens)
            totals.add_demonstrated(loss.detach(), logprobs[said].detach())
        if len(drawn := inputs.drawn):
            micro_batch = MicroBatch(
                inputs.behaviour[drawn],
                proximal[drawn],
                inputs.advantages[drawn],
                update.tokens,
                self._settings,
            )
            learned = self._loss(micro_batch, logprobs[drawn])
            learned = learned - entropy_bonus(micro_batch, entropies[drawn])
            totals.add(
                micro_batch, learned.detach(), logprobs[drawn].detach(), entropies[drawn].detach()
            )
            loss = loss + learned
        loss.backward()  # type: ignore[no-untyped-call]

    def _learning_rate(self, update: UpdateBatch) -> float:
        settings = self._settings
        shown = all(one.demonstrated.all() for one in update.sequences)
        return (settings.demonstration_learning_rate if shown else None) or settings.learning_rate

    def _step(self, learning_rate: float, totals: Totals) -> None:
        """One optimizer update, unless something is not finite: then UnusableBatch.

        Without a gradient, as where all rewards are equal, there is none: momentum alone would
        carry the policy on, further into whatever fails.
        """
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.max_grad_norm)
        totals.add_update(norm)
        if not totals.finite():
            raise UnusableBatch("the loss or its gradient is not finite")
        if not norm:
            return
        warmup = self._settings.warmup_updates
        self.updates_done += 1
        share = min(1.0, self.updates_done / warmup) if warmup else 1.0
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * share
        self._optimizer.step()

    @contextmanager
    def _rollback(self, needed: bool) -> Iterator[None]:
        """Undoes updates made so far where the batch fails. `needed`: a later one may."""
        saved = {k: v.clone() for k, v in self._tensors().items()} if needed else None
        done = self.updates_done
        try:
            yield
        except (UnusableBatch, Stopped, RuntimeError) as error:
            self._optimizer.zero_grad(set_to_none=True)
            if saved is not None and self.updates_done > done:
                self._restore(saved)
            # torch has a type for a full GPU, and for a full CPU no more than this text.
            if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
                raise UnusableBatch(
                    f"{self.device} is out of memory: lower training.max_tokens"
                ) from error
            raise


def _check(stop: threading.Event | None) -> None:
    if stop is not None and stop.is_set():
        raise Stopped("stopped before the version was whole")
