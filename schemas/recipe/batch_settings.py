"""The table `policies.NAME.batches`: how groups become batches, and which are trained on again."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor
from typing import Literal

from pydantic import Field, model_validator

from headrace.schemas.recipe.tables import NotNegative, Positive, PositiveSeconds, Settings


class Replay(Settings):
    """Trains on groups of earlier batches again. docs/dataflow.md has the rules."""

    share: float = Field(gt=0, lt=1)
    """Share of the groups of a batch that earlier batches were trained on. Fresh groups replace
    those that are missing, for example in the first batches."""
    max_uses: int = Field(default=2, ge=2)
    """In how many batches a group is trained on at most, the first one included."""
    max_age: Positive = 16
    """How many versions the oldest token of a replayed group may be behind, counted as for
    `max_staleness`, which it may exceed. A group is also forgotten this many batches after its
    first one."""
    weight: float = Field(default=1.0, gt=0)
    """Factor of the loss of a replayed sample. In its second replay it counts twice: its square."""

    @model_validator(mode="after")
    def _can_be_reached(self) -> Replay:
        if self.exact_share > 1 - Fraction(1, self.max_uses):
            raise ValueError(
                f"share: if each group is trained on at most {self.max_uses} times, at most "
                f"{1 - 1 / self.max_uses:.3g} of the groups can be replayed. Lower it from "
                f"{self.share:g}, or raise max_uses"
            )
        return self

    @property
    def exact_share(self) -> Fraction:
        """`share` as it is written: 0.3 is 3/10."""
        return Fraction(str(self.share))


class Batches(Settings):
    """How groups become batches."""

    groups: Positive = 16
    """Number of groups in a batch. If `tokens` is set, the largest number."""
    tokens: Positive | None = None
    """Number of trainable tokens in a batch: it is full with the group that reaches this number, or
    with `groups` groups. Absent: only `groups` counts."""
    replay: Replay | None = None
    """Absent: each group is trained on in one batch."""
    max_staleness: NotNegative = 32
    """How many versions the oldest token of a sample in batch n may be behind version n - 1. A
    version that did not change the weights is not counted. Only the longest episodes use it, and
    if it is too small, batches wait for them or lose them. Set it to at least eight times the
    batches in flight: `scheduler.live_episodes` divided by the episodes of a batch."""
    prefetch: NotNegative = 1
    """Number of batches that are assembled ahead of the newest published version."""
    order: Literal["edf", "fifo"] = "edf"
    """Which group goes first. `edf`: the one that goes stale first. `fifo`: the one that ended
    first."""
    batch_wait_s: PositiveSeconds = 30.0
    """Seconds without any group that was started, is live or was closed. After them a batch may be
    short."""
    straggler_wait_s: float | None = Field(default=None, ge=0)
    """Most seconds that a full batch waits for live groups that it would make stale. Absent: it
    waits for each until its deadline, or until it has taken 1.5 times as long as 90 % of the newest
    64 groups took at most. 0: it waits for none, and long episodes are trained on less often than
    short ones."""

    @model_validator(mode="after")
    def _replays_fit(self) -> Batches:
        if self.replay is None:
            return self
        if self.groups - 1 < ceil(self.replay.exact_share * self.groups):
            raise ValueError(
                f"replay.share: {self.replay.share:g} of {self.groups} groups leaves no fresh "
                "group. Lower it, or raise `groups`"
            )
        if self.replay.max_age <= self.prefetch:
            raise ValueError(
                f"replay.max_age: a group can be replayed prefetch + 1 = {self.prefetch + 1} "
                f"batches after its first one, so {self.replay.max_age} allows no replay. Raise it"
            )
        return self

    @property
    def fresh_groups(self) -> int:
        """The most fresh groups in a batch, if there are enough groups to replay."""
        return self.groups - (floor(self.replay.exact_share * self.groups) if self.replay else 0)

    @property
    def batches_needed(self) -> int:
        """How many of the last batches say what the next one may replay; at least one."""
        return self.replay.max_age if self.replay else 1
