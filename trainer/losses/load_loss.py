"""The built-in losses by name, and how a recipe's loss is loaded and tried."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor

from headrace.errors import UsageError
from headrace.schemas.recipe.tables import Choice, use_and_options
from headrace.services.base.plugins import load, with_options
from headrace.trainer.losses.loss import FunctionLoss, Loss, MicroBatch

_HERE = "headrace.trainer.losses"
LOSSES = {
    "grpo": f"{_HERE}.grpo_loss:GrpoLoss",
    "dr_grpo": f"{_HERE}.dr_grpo_loss:DrGrpoLoss",
    "gspo": f"{_HERE}.gspo_loss:GspoLoss",
    "cispo": f"{_HERE}.cispo_loss:CispoLoss",
    "icepop": f"{_HERE}.icepop_loss:IcepopLoss",
    "m2po": f"{_HERE}.m2po_loss:M2poLoss",
    "dpo": f"{_HERE}.dpo_loss:DpoLoss",
    "distill": f"{_HERE}.distill_loss:DistillLoss",
    "reinforce": f"{_HERE}.reinforce_loss:ReinforceLoss",
}
"""The built-in losses by the recipe's name."""


def load_loss(choice: Choice) -> Loss:
    """Returns the recipe's loss with its options.

    It is a built-in, or a user's own subclass of `Loss`, or a user's function that maps a
    micro-batch and the new logprobs [N] to terms [N]. Raises UsageError for anything else, or if an
    option is wrong.
    """
    use, options = use_and_options(choice)
    found = load("loss", use, LOSSES)
    if inspect.isclass(found) and issubclass(found, Loss):
        return with_options("loss", use, found, options)
    if inspect.isclass(found) or not callable(found):
        raise UsageError(f"loss {use!r} is neither a function nor a subclass of headrace.Loss")
    with_options("loss", use, FunctionLoss, options)
    return FunctionLoss.of(found, options)


def try_loss(choice: Choice) -> None:
    """Calls the recipe's loss with a few numbers. Raises UsageError if it is not a usable loss."""
    loss = load_loss(choice)
    logprobs = torch.full((4,), -1.0, requires_grad=True)
    batch = _example(None)
    if loss.prepares:
        batch = _example(loss.prepare(batch, logprobs.detach()))
    terms: Any = loss.terms(batch, logprobs)
    if not isinstance(terms, Tensor) or terms.shape != logprobs.shape:
        found = f"shape {tuple(terms.shape)}" if isinstance(terms, Tensor) else type(terms).__name__
        raise UsageError(
            f"it returned {found} for {len(logprobs)} tokens: return the loss of each token, as a "
            "tensor of the shape of the logprobs, and let the option `reduction` say how they "
            "become one number"
        )
    if not terms.requires_grad:
        raise UsageError("its terms have no gradient: compute them from the new logprobs")
    if not math.isfinite(total := terms.sum().item()):
        raise UsageError(f"the sum of its terms is {total} for finite numbers")


def _example(state: Any) -> MicroBatch:
    """Returns two sequences of two tokens, whose second one is a version behind."""
    advantages = torch.tensor([-0.4, 0.6, -0.4, 0.2])
    first, second = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 2, 3])
    return MicroBatch(
        behaviour=torch.full_like(advantages, -1.1),
        proximal=torch.full_like(advantages, -1.0),
        reference=torch.full_like(advantages, -1.0),
        advantages=advantages,
        tokens=second,
        sequences=first,
        lengths=torch.full_like(first, 2),
        samples=first,
        groups=torch.zeros_like(first),
        turns=second,
        versions=1 - first,
        staleness=first,
        uses=1 - first,
        teacher=torch.full_like(advantages, -0.9),
        state=state,
    )
