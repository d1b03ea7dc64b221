"""What a fine-tuning is made of: the policy with its settings, the sequences, and their order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from headrace.errors import UsageError
from headrace.schemas.recipe.policy import Policy, Training
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.operate.sft.sft_plan import SftPlan, make_plan
from headrace.trainer.sequences import TokenSequence

KEPT = (
    "betas", "weight_decay", "max_grad_norm", "max_tokens", "activation_checkpointing", "offload",
    "threads", "device", "processes", "rank_timeout_s", "keep_checkpoints",
)  # fmt: skip
"""Settings of the recipe's trainer that also hold here. The others are about rewards."""
DECISIVE = (
    "betas", "weight_decay", "max_grad_norm", "learning_rate", "schedule", "warmup_updates",
    "total_updates",
)  # fmt: skip
"""Settings of the trainer that the result depends on. The others can change between two starts."""
Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class SftSettings:
    """What the command's options say of the training."""

    epochs: int = 1
    batch_tokens: int = 16_384
    learning_rate: float | None = None
    """None stands for the recipe's rate for demonstrations."""
    schedule: Schedule = "linear"
    warmup: int = 0
    held_out: float = 0.05
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SftJob:
    """All that a fine-tuning follows from."""

    name: str
    """The policy's name in the recipe."""
    policy: Policy
    """With the settings of this fine-tuning as its training."""
    sequences: Sequence[TokenSequence]
    plan: SftPlan
    digest: bytes
    """Of policy, sequences and plan: equal digests mean the same result."""


@dataclass(frozen=True, slots=True)
class SftTarget:
    """Where the result goes."""

    folder: Path
    merge: bool
    """Whether an adapter is added to its base."""
    force: bool
    """Whether a model folder that is there may be replaced."""

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints, until the model is written."""
        return self.folder.with_name(f"{self.folder.name}.checkpoints")


def pick_policy(recipe: Recipe, name: str | None) -> tuple[str, Policy]:
    """Returns the policy of that name, or the only one that learns, with its name.

    Raises UsageError if there is none or more than one.
    """
    learning = {key: one for key, one in recipe.policies.items() if one.training is not None}
    if name is None and len(learning) == 1:
        return next(iter(learning.items()))
    if name not in learning:
        named = "--policy" if name is None else f"--policy {name!r}"
        raise UsageError(
            f"{named}: name one of the recipe's policies that learn: {', '.join(learning) or '-'}"
        )
    return name, learning[name]


def make_job(
    name: str, policy: Policy, sequences: Sequence[TokenSequence], settings: SftSettings
) -> SftJob:
    """Plans a fine-tuning. Raises UsageError if its schedule does not fit the number of updates."""
    plan = make_plan(
        [len(one.tokens) for one in sequences],
        [one.group for one in sequences],
        epochs=settings.epochs,
        batch_tokens=settings.batch_tokens,
        held_out=settings.held_out,
        seed=settings.seed,
    )
    chosen = policy.model_copy(update={"training": _training(policy, settings, len(plan.updates))})
    return SftJob(name, chosen, sequences, plan, _digest(chosen, sequences, plan))


def _training(policy: Policy, settings: SftSettings, updates: int) -> Training:
    """Returns the settings with which a policy learns demonstrations alone."""
    of_recipe = policy.training
    assert of_recipe is not None, "a policy was picked that does not learn"
    tree = {key: getattr(of_recipe, key) for key in KEPT}
    given = settings.learning_rate or of_recipe.demonstration_learning_rate
    tree["learning_rate"] = given or of_recipe.learning_rate
    # Updates count from 1, so the first one has the highest rate if it ends a warmup.
    tree |= {"warmup_updates": max(1, settings.warmup), "schedule": settings.schedule}
    if settings.schedule != "constant":
        tree["total_updates"] = updates + 1  # The rate reaches 0 after the last update.
    try:
        return Training.model_validate(tree)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise UsageError(
            f"--schedule {settings.schedule} and --warmup {settings.warmup} do not fit "
            f"{updates} updates: {reason}"
        ) from error


def _digest(policy: Policy, sequences: Sequence[TokenSequence], plan: SftPlan) -> bytes:
    training = policy.training
    chosen = policy.model_dump(mode="json", include={"model", "seed", "dtype", "lora"})
    decisive = {key: getattr(training, key) for key in DECISIVE}
    head = json.dumps([chosen, decisive, plan.epochs, plan.held_out], sort_keys=True)
    sha256 = hashlib.sha256(head.encode())
    for one in sequences:
        for array in (one.tokens, one.positions):
            sha256.update(len(array).to_bytes(8, "little") + array.tobytes())
        sha256.update(one.samplings[0][0].model_dump_json().encode())
    return sha256.digest()
