"""DPO: a sample of a group becomes likelier than one with a lower reward."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import softplus

from headrace.trainer.losses.loss import Loss, MicroBatch, Reduction


class Preferences(NamedTuple):
    """What the pairs of an update say of each of its samples, by its index. All [S] float64."""

    values: Tensor
    """The mean loss of the pairs of the sample's group, divided by the sample's tokens."""
    slopes: Tensor
    """The gradient of the sum of the groups' mean losses, each times the number of its samples, by
    the logprob of the whole sample."""


class DpoLoss(Loss):
    """Learns from pairs of samples of the same task, and never asks how large a reward was.

    With d the sum over a sample's tokens of new - reference, where the reference is version 0, each
    pair of a group whose first sample w has a higher mean advantage than its second sample l has

        loss = - log sigmoid(beta * (d_w - d_l))

    DPO (arXiv 2305.18290), equation 7. The paper has one pair for each prompt. Here a group gives
    all pairs whose advantages differ, and the loss of an update is the mean of its samples' values,
    which are the mean loss of the pairs of their group, or 0 if it has none. A sample is all that
    the policy did in an episode, over all turns and branches.

    - It has no importance weights: the pairs may be of any policy and as old as the log. On a
      recorded run, `headrace replay trajectories` trains by it. In a run it learns from its own
      samples, as online DPO does (arXiv 2402.04792).
    - Pairs are found among the samples of one update, so `minibatches` above 1 makes them fewer.
    - It compares the means of a sample's advantages over its tokens. Use an advantage that gives a
      sample one value, so that these have the order of the rewards.
    - Everything is summed over a sample, and not averaged over its tokens: `kl_coefficient`,
      `entropy_bonus` and demonstrations in the same batch, too. So they weigh as many times more
      than with `grpo` as a sample has tokens.
    - It needs the reference even if `kl_coefficient` is 0, and a look at the whole update.
    """

    clips: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = True
    reduction: Reduction = "constant"
    constant: int = Field(default=1, ge=1)
    beta: float = Field(default=0.1, gt=0)
    """How much the policy must differ from the reference until a pair counts as learned: the
    smaller, the farther it goes."""

    @model_validator(mode="after")
    def _keep_the_sums(self) -> Self:
        if self.reduction != "constant":
            raise ValueError("dpo compares sums over samples: leave the option `reduction` out")
        return self

    def prepare(self, update: MicroBatch, logprobs: Tensor) -> Preferences:
        """Returns what the pairs of the update say of its samples."""
        assert update.reference is not None, "the learner gives a reference to this loss"
        size = int(update.samples.max()) + 1

        def sums(values: Tensor) -> Tensor:
            made = torch.zeros(size, dtype=torch.float64, device=values.device)
            return made.index_add(0, update.samples, values.double())

        tokens = sums(torch.ones_like(logprobs))
        differences = sums(logprobs - update.reference)
        advantages = sums(update.advantages) / tokens
        groups = torch.full_like(update.samples[:1], -1).repeat(size)
        groups[update.samples] = update.groups
        values, slopes = torch.zeros_like(tokens), torch.zeros_like(tokens)
        for group in set(update.groups.tolist()):
            members = (groups == group).nonzero().squeeze(1)
            better = advantages[members, None] > advantages[None, members]
            if not (pairs := better.sum()):
                continue
            margins = self.beta * (differences[members, None] - differences[None, members])
            values[members] = (softplus(-margins) * better).sum() / pairs / tokens[members]
            pulls = self.beta * torch.sigmoid(-margins) * better / pairs
            slopes[members] = len(members) * (pulls.sum(0) - pulls.sum(1))
        return Preferences(values, slopes)

    def terms(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """Returns each token's part of its sample's value, with the pairs' gradient, [N]."""
        preferences: Preferences = batch.state
        values = preferences.values[batch.samples].to(logprobs.dtype)
        slopes = preferences.slopes[batch.samples].to(logprobs.dtype)
        return values + slopes * (logprobs - logprobs.detach())
