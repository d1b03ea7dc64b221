"""Dr. GRPO: GRPO whose sum is divided by a constant."""

from __future__ import annotations

from headrace.trainer.losses.grpo_loss import GrpoLoss
from headrace.trainer.losses.loss import Reduction


class DrGrpoLoss(GrpoLoss):
    """The terms of `grpo`, added up and divided by the number of samples and by a constant.

    Dr. GRPO (arXiv 2503.20783), section 3.2: to divide by the length of each sequence favours short
    right answers and long wrong ones. So it divides by the largest number of tokens that a
    sequence may have, `constant`. Its other change is the advantage `dr_grpo`, which is not divided
    by the deviation of the rewards: set both.
    """

    reduction: Reduction = "constant"
