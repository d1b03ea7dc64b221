"""The learner: a model, its optimizer, and what one batch does to them. No log, no clock.

It runs in one process on one device, or as one of several ranks, each of which holds a shard of the
model. Optimizer, gradients and the weights that it changes are float32. The forward pass runs on
these weights in the policy's dtype, so on exactly the numbers that are published and served. If the
policy has an adapter, the rest of the model is frozen in the policy's dtype. With `offload`, the
optimizer and its float32 weights are in the host's memory. On a CPU the same batches in the same
number of processes give the same weights, bit by bit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from headrace.errors import HeadraceError, UsageError
from headrace.schemas.recipe.policy import Policy
from headrace.services.models.torch_models import DTYPES, pick_device
from headrace.trainer.collate import Inputs
from headrace.trainer.critic.critic import Critic
from headrace.trainer.dropping import OutOfMemory, Remaining, check_lengths
from headrace.trainer.forward.master_weights import MasterWeights
from headrace.trainer.forward.policy_forward import PolicyForward
from headrace.trainer.forward.reference import Reference
from headrace.trainer.learning_rate import learning_rate_at
from headrace.trainer.losses.load_loss import load_loss
from headrace.trainer.losses.objective import cross_entropy, objective
from headrace.trainer.metrics.training_metrics import Totals
from headrace.trainer.model_loading import position_limit, trained_tensors
from headrace.trainer.ranks.learner_state import LearnerState
from headrace.trainer.ranks.ranks import ALONE, Ranks, whole_tensor
from headrace.trainer.ranks.sharded_loading import load_shards
from headrace.trainer.ranks.streamed_weights import StreamedWeights
from headrace.trainer.sequences import (
    Floats,
    Stopped,
    TokenSequence,
    UnusableBatch,
    UpdateBatch,
)
from headrace.trainer.update_plan import UpdatePlan


class Learner:
    """One policy's model in training. Only one thread at a time may use it."""

    def __init__(self, folder: Path, policy: Policy, ranks: Ranks = ALONE) -> None:
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
        # In evaluation mode: with dropout the logprobs would differ from those of the engines.
        self._model, self.base = load_shards(folder, policy, ranks, self.device)
        """The base is None if all weights learn."""
        self._ranks = ranks
        # A shard is float32 itself, and is rounded whenever a layer is put together.
        self._masters = MasterWeights(
            self._model,
            torch.float32 if ranks.several else self._dtype,
            self.device if self._settings.offload and not ranks.several else None,
        )
        bonus = self._settings.entropy_bonus > 0
        self._forward = PolicyForward(self._model, folder, self.device, bonus, ranks)
        self._positions = position_limit(self._model)
        self.vocabulary = self._forward.vocabulary
        self._loss = load_loss(self._settings.loss)
        self._parameters = list(self._masters.by_name.values())
        self._reference = (
            Reference(self._masters.in_model, self._streamed().digest(), ranks)
            if self._settings.kl_coefficient > 0 or self._loss.needs_reference
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
        self._state = LearnerState(
            *(self._model, self._masters, self._optimizer, self._critic, self._reference),
            *(self.base, self.device, ranks),
        )
        self.start_logprobs: list[tuple[TokenSequence, Floats]] = []
        """The newest trained sequences, with their logprobs [N] before the batch's first update."""

    def weights(self) -> bytes:
        """Returns the trained weights, or the adapter, as a safetensors file in the policy's dtype.

        All ranks must call it. Rank 0 holds all weights, and the others get no bytes.
        """
        return self._streamed().in_memory()

    def write_weights(self, path: Path) -> None:
        """Writes to a file what `weights` returns, as `StreamedWeights.write`."""
        self._streamed().write(path)

    def _streamed(self) -> StreamedWeights:
        return StreamedWeights(trained_tensors(self._model), self._dtype, self._ranks)

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
        remaining = Remaining(updates, self._settings.max_tokens, self._forward.largest)
        return remaining.train(lambda: self._train(remaining.updates, remaining.max_tokens, stop))

    def _train(
        self, updates: Sequence[UpdateBatch], max_tokens: int, stop: threading.Event | None
    ) -> dict[str, float]:
        """Makes the updates. Raises OutOfMemory, UnusableSample, and what `train` raises."""
        totals = Totals(self._loss, self._ranks)
        count = len(updates) * self._settings.epochs
        with self._forward.keeping_masks(), self._rollback(needed=count > 1):
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
                    inputs = self._forward.collate(sequences, stop)
                    self._backward(plan, inputs, tokens, state, totals)
                for sequences in plan.fillers:
                    self._backward_nothing(plan, self._forward.collate(sequences, stop))
                self._step(plan, totals)
            self.start_logprobs = [one for plan in plans for one in plan.by_sequence(self._ranks)]
        return totals.metrics()

    def cross_entropy(
        self, update: UpdateBatch, stop: threading.Event | None = None
    ) -> tuple[float, int]:
        """Returns the sum of the cross-entropy of trained tokens, in nats, and their number.

        Learns nothing. Drops samples as `train` does. Raises UnusableBatch
        if none remains, and Stopped.
        """
        remaining = Remaining([update], self._settings.max_tokens, self._forward.largest)
        found = remaining.train(
            lambda: self._measure(remaining.updates[0], remaining.max_tokens, stop)
        )
        return found["nats"], int(found["tokens"])

    def _measure(
        self, update: UpdateBatch, max_tokens: int, stop: threading.Event | None
    ) -> dict[str, float]:
        """Measures an update. Raises OutOfMemory, UnusableSample and Stopped."""
        with self._forward.keeping_masks(), self._rollback(needed=False):
            logprobs = self._forward.all_logprobs(self._plan(update, max_tokens), stop)
            return {"nats": -float(logprobs.double().sum()), "tokens": float(len(logprobs))}

    def save(self, path: Path) -> None:
        """Writes all state that training continues from, as `LearnerState.save`."""
        self._state.save(path)

    def load(self, path: Path) -> None:
        """Restores what `save` wrote. Raises what `LearnerState.load` raises."""
        self._state.load(path)

    @property
    def processes(self) -> int:
        """How many processes train together."""
        return self._ranks.size

    @property
    def updates_done(self) -> int:
        """Optimizer updates of the policy since version 0."""
        return self._state.updates_done

    def _plan(self, update: UpdateBatch, max_tokens: int) -> UpdatePlan:
        check_lengths(update, self._positions)
        return self._forward.plan(update, max_tokens, self._loss)

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
        inputs: Inputs,
        tokens: Tensor,
        state: object,
        totals: Totals,
    ) -> None:
        """Adds a micro-batch's gradient. `tokens` are its trained tokens' indices in the update."""
        critic = self._critic if plan.returns is not None else None
        with torch.set_grad_enabled(not self._only_critic(plan)):
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

    def _backward_nothing(self, plan: UpdatePlan, inputs: Inputs) -> None:
        """Runs the model with the other ranks, and adds no gradient."""
        with torch.set_grad_enabled(not self._only_critic(plan)):
            logprobs, _ = self._forward.logprobs(inputs)
        if logprobs.requires_grad:
            (logprobs * 0).sum().backward()  # type: ignore[no-untyped-call]

    def _only_critic(self, plan: UpdatePlan) -> bool:
        """Returns whether an update teaches the critic alone."""
        return plan.returns is not None and self._critic is not None and self._critic.warming

    def _highest_rate(self, plan: UpdatePlan) -> float:
        """Returns the learning rate of an update before warmup and schedule."""
        settings = self._settings
        shown = bool(plan.demonstrated.all())
        return (settings.demonstration_learning_rate if shown else None) or settings.learning_rate

    def _step(self, plan: UpdatePlan, totals: Totals) -> None:
        """Makes one optimizer update. Raises UnusableBatch if loss or gradient is not finite.

        Makes no update if the gradient is 0, for example because all rewards are equal. Momentum
        alone would move the policy on, even further into a failure.
        """
        maximum = self._settings.max_grad_norm
        norm = whole_tensor(torch.nn.utils.clip_grad_norm_(self._parameters, maximum))
        totals.add_update(norm, plan.read)
        if self._critic is not None:
            if plan.returns is not None:
                self._critic.share_gradient(self._ranks)
            totals.add_critic(self._critic.clip_gradient(maximum))
        if not totals.finite():
            raise UnusableBatch("the loss or its gradient is not finite")
        if self._critic is not None:
            self._critic.step()
        if not norm:
            return
        self._state.updates_done += 1
        rate = learning_rate_at(self._settings, self.updates_done, self._highest_rate(plan))
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
        restore = self._state.copied() if needed else None
        done, all_done = self.updates_done, self._all_done
        try:
            yield
        except (UnusableBatch, Stopped, RuntimeError) as error:
            self._masters.drop_gradients()
            if self._critic is not None:
                self._critic.drop_gradient()
            if self._ranks.several and isinstance(error, RuntimeError):
                # The other ranks may be at another place, so this one can't go on.
                raise self._ranks.failure(error) from error
            if restore is not None and self._all_done > all_done:
                restore()
            elif self._all_done > all_done:
                raise HeadraceError(
                    f"the optimizer failed while it changed the weights: {error}. This process "
                    "ends, and the next one continues from the newest checkpoint. If the device is "
                    "out of memory, lower training.max_tokens"
                ) from error
            self._state.updates_done = done
            # torch has a class for a GPU that is out of memory; on a CPU only the text says it.
            if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
                raise OutOfMemory(
                    f"{self.device} is out of memory: lower training.max_tokens"
                ) from error
            raise
