"""Recorded trajectories as numpy arrays with decoded text, for notebooks and other tools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.schemas.events import TrajectoryRecorded
from headrace.schemas.packed import unpack_spans
from headrace.schemas.turn_paths import paths
from headrace.services.log.unpacked import Texts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TurnArrays:
    """One turn of a trajectory. C tokens were added to the context, T tokens were sampled."""

    parent: int
    """Index of the turn that this one continues, or -1 if it begins a conversation."""
    role: str
    policy: str
    context: NDArray[np.int32]
    """[C] ids that were added before the sampled ones."""
    tokens: NDArray[np.int32]
    """[T] sampled ids, or the ids of a demonstration."""
    logprobs: NDArray[np.float32]
    """[T] natural logarithms, after temperature and masks; [0] for a demonstration."""
    versions: NDArray[np.int64]
    """[T] the policy version that sampled each token; [0] for a demonstration."""
    text: str
    """What the policy said."""
    context_text: str | None
    """The text of `context`, or None if the model's tokenizer is not on this machine."""
    reward: float | None
    finish: str
    trainable: bool
    demonstrated: bool
    teacher: NDArray[np.float32]
    """[T] logprobs by the policy's teacher; [0] if no teacher scored the turn."""


@dataclass(frozen=True, slots=True)
class PathArrays:
    """One path of a trajectory from its first turn to a leaf, as L tokens."""

    turns: tuple[int, ...]
    """Indices of its turns."""
    tokens: NDArray[np.int32]
    """[L] ids."""
    sampled: NDArray[np.bool_]
    """[L] whether the policy sampled the token."""
    logprobs: NDArray[np.float32]
    """[L] NaN if the token was not sampled."""
    versions: NDArray[np.int64]
    """[L] -1 if the token was not sampled."""
    teacher: NDArray[np.float32]
    """[L] logprobs by the policy's teacher. NaN if no teacher scored the token."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode, as recorded."""

    recorded: TrajectoryRecorded
    """The event, with every field."""
    turns: tuple[TurnArrays, ...]

    @property
    def task(self) -> int:
        """The number of its task."""
        return self.recorded.task

    @property
    def sample(self) -> int:
        """Which of the task's episodes it is, from 0."""
        return self.recorded.sample

    @property
    def reward(self) -> float | None:
        """The episode's reward, or None if nothing may be learned from it."""
        return self.recorded.reward

    def paths(self) -> Iterator[PathArrays]:
        """Each path from a first turn to a leaf. A trajectory without branches has one."""
        import numpy as np

        for path in paths(self.turns):
            turns = [self.turns[index] for index in path]
            parts = [(turn, len(turn.context), len(turn.tokens)) for turn in turns]
            yield PathArrays(
                tuple(path),
                np.concatenate([ids for turn in turns for ids in (turn.context, turn.tokens)]),
                np.concatenate([np.repeat([False, bool(len(turn.logprobs))], [c, t])
                                for turn, c, t in parts]),
                np.concatenate([_padded(turn.logprobs, c, t, np.nan) for turn, c, t in parts]),
                np.concatenate([_padded(turn.versions, c, t, -1) for turn, c, t in parts]),
                np.concatenate([_padded(turn.teacher, c, t, np.nan) for turn, c, t in parts]),
            )  # fmt: skip


def _padded(values: Any, context: int, tokens: int, empty: float) -> Any:
    """[context + tokens]: `values` for the tokens, `empty` elsewhere."""
    import numpy as np

    padded = np.full(context + tokens, empty, values.dtype)
    if len(values):
        padded[context:] = values
    return padded


def unpack(event: TrajectoryRecorded, texts: Texts) -> Trajectory:
    """Unpacks an event. Needs numpy."""
    import numpy as np

    turns = []
    for turn in event.turns:
        tokens = np.frombuffer(turn.tokens, "<i4")
        versions: list[int] = []
        with suppress(ValueError):  # Another team may have written wrong spans.
            versions = unpack_spans(turn.versions, len(tokens)) if turn.versions else []
        text = texts.of(turn.policy, turn.tokens, event.tokenizer)
        turns.append(
            TurnArrays(
                parent=turn.parent,
                role=turn.role,
                policy=turn.policy,
                context=np.frombuffer(turn.context, "<i4"),
                tokens=tokens,
                logprobs=np.frombuffer(turn.logprobs, "<f4"),
                versions=np.asarray(versions, np.int64),
                text=turn.text if text is None else text,
                context_text=texts.of(turn.policy, turn.context, event.tokenizer),
                reward=turn.reward,
                finish=turn.finish,
                trainable=turn.trainable,
                demonstrated=turn.demonstrated,
                teacher=np.frombuffer(turn.teacher, "<f4"),
            )
        )
    return Trajectory(event, tuple(turns))
