"""The learner: a model, its optimizer, and what one batch does to them. No log, no clock.

It runs in one process on one device; it can't shard a model. Optimizer, gradients and the weights
that it changes are float32. The forward pass runs on these weights in the policy's dtype, so on
exactly the numbers that are published and served. If the policy has an adapter, the rest of the
model is frozen in the policy's dtype. On a CPU the same batches give the same weights, bit by bit.
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

from headrace.errors import BlobError, HeadraceError, UsageError
from headrace.schemas.recipe.policy import Policy
from headrace.services.models.torch_models import DTYPES, check_fit, overwrite, pick_device
from headrace.trainer.collate import pack
from headrace.trainer.critic.critic import Critic
from headrace.trainer.dropping import OutOfMemory, Remaining, check_lengths
from headrace.trainer.forward.master_weights import MasterWeights
from headrace.trainer.forward.policy_forward import PolicyForward
from headrace.trainer.forward.reference import Reference, digest_tensor
from headrace.trainer.learning_rate import learning_rate_at
from headrace.trainer.losses.load_loss import load_loss
from headrace.trainer.losses.objective import cross_entropy, objective
from headrace.trainer.metrics.training_metrics import Totals
from headrace.trainer.model_loading import load_policy, position_limit, trained_weights
from headrace.trainer.optimizer_state import above, optimizer_tensors, restore_optimizer, under
from headrace.trainer.sequences import (
    Floats,
    Stopped,
    TokenSequence,
    UnusableBatch,
    UpdateBatch,
    raise_if_stopped,
)
from headrace.trainer.update_plan import UpdatePlan


class Learner:
    """One policy's model in training. Only one thread at a time may use it."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        """Loads version 0: the folder's weights, or random ones by the policy's seed.

        Sets torch's number of threads for the whole process, and on a CPU also its deterministic
        algorithms. Raises UsageError if the device or the model does not exist.
        """
        if policy.training is None:
            raise UsageError(
                "this policy is not trained: its recipe says `training = false`. Remove that line "
                "to train it"
            )
        self._settings = policy.training
        self._dtype = DTYPES[policy.dtype]
        self.device = pick_device(self._settings.device)
        torch.set_num_threads(self._settings.threads)
        if self.device.type == "cpu":
            torch.use_deterministic_algorithms(True)
        self._model, self.base = load_policy(folder, policy)
        """The base is None if all weights learn."""
        # No dropout: with it the logprobs would differ from those of the engines.
        self._model.eval().to(self.device)
        self._masters = MasterWeights(self._model, self._dtype)
        bonus = self._settings.entropy_bonus > 0
        self._forward = PolicyForward(self._model, folder, self.device, bonus)
        self._positions = position_limit(self._model)
        self.vocabulary = self._forward.vocabulary
        self._loss = load_loss(self._settings.loss)
        self._parameters = list(self._masters.by_name.values())
        self._reference = (
            Reference(self._masters.in_model, self.weights())
            if self._settings.kl_coefficient > 0
            else None
        )
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=self._settings.learning_rate,
            betas=self._settings.betas,
            weight_decay=self._settings.weight_decay,
        )
        self._optimizer.register_step_post_hook(self._masters.update_copies)
        self._critic: Critic | None = None
        if (chosen := self._settings.critic) is not None:
            self._critic = Critic(chosen, self._forward.width, self.device, self._settings.betas)
        self.updates_done = 0
        """Optimizer updates of the policy since version 0."""
        self.start_logprobs: list[tuple[TokenSequence, Floats]] = []
        """The newest trained sequences, with their logprobs [N] before the batch's first update."""

    def weights(self) -> bytes:
        """Returns the trained weights, or the adapter, as a safetensors file in the policy's
        dtype."""
        return trained_weights(self._model, self._dtype)

    def train(
        self, updates: Sequence[UpdateBatch], stop: threading.Event | None = None
    ) -> dict[str, float]:
        """Trains on each minibatch in each epoch, and returns the metrics of `Totals.metrics`.

        If the device is out of memory, it starts again with smaller micro-batches, and at last
        without the longest sample. It also drops samples whose masks can't be recomputed. More
        metrics count this: `dropped_samples`, `dropped_samples_memory` and `memory_retries`.

        Makes all updates or none. Raises UnusableBatch if a loss or gradient is not finite or no
        sample remains, and Stopped if `stop` was set. Weights and optimizer are then as they were
        before. Raises HeadraceError if the optimizer failed while it changed the weights and no
        copy of them is left: then this learner must not be used any more.
        """
        remaining = Remaining(updates, self._settings.max_tokens)
        return remaining.train(lambda: self._train(remaining.updates, remaining.max_tokens, stop))

    def _train(
        self, updates: Sequence[UpdateBatch], max_tokens: int, stop: threading.Event | None
    ) -> dict[str, float]:
        """Makes the updates. Raises OutOfMemory, UnusableSample, and what `train` raises."""
        totals = Totals(self._loss)
        count = len(updates) * self._settings.epochs
        with self._rollback(needed=count > 1):
            plans = [self._plan(update, max_tokens) for update in updates]
            for plan in plans:
                self._note_start(plan, stop, logprobs=count > 1)
            if self._critic is not None:
                totals.known = self._critic.estimate(plans)
            for number in range(count):
                plan = plans[number % len(plans)]
                state = self._prepared(plan, stop, first=number == 0)
                self._optimizer.zero_grad(set_to_none=True)
                for sequences, tokens in plan.micro_batches:
                    raise_if_stopped(stop)
                    self._backward(plan, sequences, tokens, state, totals)
                self._step(self._highest_rate(plan), totals)
        self.start_logprobs = [one for plan in plans for one in plan.by_sequence()]
        return totals.metrics()

    def save(self, path: Path) -> None:
        """Writes all state that training continues from, as a safetensors file.

        The version and the offset in the log are not part of it. Raises OSError if the disk can't
        take the file.
        """
        try:
            save_file(self._state(), path)
        except SafetensorError as error:  # The library raises it for a full disk.
            raise OSError(f"{path}: {error}") from error

    def load(self, path: Path) -> None:
        """Restores what `save` wrote.

        Raises UsageError if it is of another model or base, or of another version 0 and the loss
        has a KL divergence from it.
        """
        self._restore(load_file(path))

    def _state(self, copied: bool = False) -> dict[str, Tensor]:
        """Returns model, optimizer, warmup and random state by name, on the CPU.

        The tensors may share the learner's memory, unless `copied`. A frozen base is its digest.
        """
        state = self._trained_state()
        state |= above("optimizer", optimizer_tensors(self._optimizer))
        if self._critic is not None:
            state |= above("critic", self._critic.state())
        state["random"] = torch.get_rng_state()
        state["updates_done"] = torch.tensor(self.updates_done)
        if self._reference is not None:
            state |= self._reference.state()
        if self.device.type == "cuda":
            state["random.cuda"] = torch.cuda.get_rng_state(self.device)
        # One copy: from a GPU, `to` makes it anyway.
        return {
            name: tensor.detach().to("cpu", copy=copied).contiguous()
            for name, tensor in state.items()
        }

    def _trained_state(self) -> dict[str, Tensor]:
        """Returns the tensors that the optimizer changes, and those that identify the model."""
        state = {f"model.{name}": one for name, one in self._masters.by_name.items()}
        if self.base is None:
            return state | {f"buffer.{name}": one for name, one in self._model.named_buffers()}
        return state | {"base": digest_tensor(self.base.digest)}

    def _restore(self, tensors: dict[str, Tensor]) -> None:
        own = self._trained_state()
        kinds = ("model.", "buffer.", "base")
        given = {name: one for name, one in tensors.items() if name.startswith(kinds)}
        try:
            check_fit(own, given)
        except BlobError as error:
            raise UsageError(
                f"the checkpoint is of another model than the recipe's: {error}. Use the recipe of "
                f"the run that wrote it, or start a new namespace"
            ) from error
        if self.base is not None and not torch.equal(own["base"], given["base"]):
            raise UsageError(
                "the checkpoint's adapter is of another base than the recipe's model. Restore the "
                "weights that the run started with, or start a new namespace"
            )
        if self._reference is not None:
            self._reference.check(tensors)
        overwrite(own, given)
        self._masters.update_copies()
        restore_optimizer(self._optimizer, under("optimizer", tensors))
        if self._critic is not None:
            self._critic.restore(under("critic", tensors))
        torch.set_rng_state(tensors["random"])
        if self.device.type == "cuda" and "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"], self.device)
        self.updates_done = int(tensors["updates_done"])

    def _plan(self, update: UpdateBatch, max_tokens: int) -> UpdatePlan:
        check_lengths(update, self._positions)
        lengths = [len(one.tokens) for one in update.sequences]
        packed = pack(lengths, max_tokens)
        return UpdatePlan(update, packed, self._loss, self.device)

    def _note_start(
        self, plan: UpdatePlan, stop: threading.Event | None, *, logprobs: bool
    ) -> None:
        """Gives a plan what it needs to know of the weights before the batch's first update."""
        readers = [self._forward.read_logprobs] if logprobs else []
        if self._critic is not None:
            readers.append(self._critic.read_values)
        if readers:
            found = self._forward.read(plan, stop, *readers)
            plan.proximal = found[0] if logprobs else None
            plan.values = found[-1] if self._critic is not None else None
        if self._reference is not None:
            with self._reference.in_model():
                plan.reference = self._forward.all_logprobs(plan, stop)

    def _prepared(self, plan: UpdatePlan, stop: threading.Event | None, *, first: bool) -> object:
        """Returns what the loss wants to know of an update before its first micro-batch.

        In the batch's first update, the logprobs of the batch's start are the current ones.
        """
        chosen = (~plan.demonstrated).nonzero().squeeze(1)
        if not self._loss.prepares or not len(chosen):
            return None
        known = plan.proximal if first else None
        logprobs = self._forward.all_logprobs(plan, stop) if known is None else known
        return self._loss.prepare(plan.tokens(chosen, logprobs[chosen]), logprobs[chosen])

    def _backward(
        self,
        plan: UpdatePlan,
        sequences: Sequence[TokenSequence],
        tokens: Tensor,
        state: object,
        totals: Totals,
    ) -> None:
        """Adds a micro-batch's gradient. `tokens` are its trained tokens' indices in the update."""
        inputs = self._forward.collate(sequences)
        critic = self._critic if plan.returns is not None else None
        only_critic = critic is not None and critic.warming
        with torch.set_grad_enabled(not only_critic):
            hidden = self._forward.hidden(inputs)
            logprobs, entropies = self._forward.logprobs(inputs, hidden)
        plan.note(tokens, logprobs.detach())
        total = logprobs.new_zeros(())
        if len(shown := inputs.demonstrated):
            terms = cross_entropy(logprobs[shown], inputs.advantages[shown])
            total = (plan.weights[tokens[shown]] * terms).sum()
            totals.add_demonstrated(total.detach(), logprobs[shown].detach())
        if len(sampled := inputs.sampled):
            new, spread = logprobs[sampled], entropies[sampled]
            batch = plan.tokens(tokens[sampled], new.detach(), state)
            part = objective(
                self._loss, self._settings, batch, new, spread, plan.weights[tokens[sampled]]
            )
            totals.add(batch, part, new.detach(), spread.detach())
            total = total + part.differentiable
            if critic is not None:
                terms = critic.terms(hidden[sampled], plan, tokens[sampled])
                totals.add_values(terms.detach())
                total = total + (plan.value_weights[tokens[sampled]] * terms).sum()
        if total.requires_grad:  # not if only the critic learns, and only from other tokens
            total.backward()  # type: ignore[no-untyped-call]

    def _highest_rate(self, plan: UpdatePlan) -> float:
        """Returns the learning rate of an update before warmup and schedule."""
        settings = self._settings
        shown = bool(plan.demonstrated.all())
        return (settings.demonstration_learning_rate if shown else None) or settings.learning_rate

    def _step(self, highest_rate: float, totals: Totals) -> None:
        """Makes one optimizer update. Raises UnusableBatch if loss or gradient is not finite.

        Makes no update if the gradient is 0, for example because all rewards are equal. Momentum
        alone would move the policy on, even further into a failure.
        """
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.max_grad_norm)
        totals.add_update(norm)
        if self._critic is not None:
            totals.add_critic(self._critic.clip_gradient(self._settings.max_grad_norm))
        if not totals.finite():
            raise UnusableBatch("the loss or its gradient is not finite")
        if self._critic is not None:
            self._critic.step()
        if not norm:
            return
        self.updates_done += 1
        rate = learning_rate_at(self._settings, self.updates_done, highest_rate)
        totals.add_rate(rate)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    @property
    def _all_done(self) -> int:
        """Updates of policy and critic."""
        return self.updates_done + (self._critic.updates_done if self._critic else 0)

    @contextmanager
    def _rollback(self, needed: bool) -> Iterator[None]:
        """Undoes the updates that were made if the batch fails.

        `needed` says whether an update may fail after another one was made. Otherwise nothing is
        copied, since a copy of model and optimizer for each batch costs too much.
        """
        saved = self._state(copied=True) if needed else None
        done, all_done = self.updates_done, self._all_done
        try:
            yield
        except (UnusableBatch, Stopped, RuntimeError) as error:
            self._masters.drop_gradients()
            if self._critic is not None:
                self._critic.drop_gradient()
            if saved is not None and self._all_done > all_done:
                self._restore(saved)
            elif self._all_done > all_done:
                raise HeadraceError(
                    f"the optimizer failed while it changed the weights: {error}. This process "
                    "ends, and the next one continues from the newest checkpoint. If the device is "
                    "out of memory, lower training.max_tokens"
                ) from error
            self.updates_done = done
            # torch has a class for a GPU that is out of memory; on a CPU only the text says it.
            if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
                raise OutOfMemory(
                    f"{self.device} is out of memory: lower training.max_tokens"
                ) from error
            raise
