"""Turns a trajectory's tree of turns into the token sequences that the model reads.

Every path from a root to a leaf is one sequence. If several paths share a turn, the first of them
trains it and the others read it as context. Trajectories are checked, not trusted: a wrong length
or span would train on the wrong tokens without any error.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import HeadraceError
from headrace.schemas.events import Sampling, TrajectoryRecorded, Turn
from headrace.schemas.packed import span_runs
from headrace.schemas.turn_paths import paths

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

LOGPROB_TOLERANCE = 1e-3
"""The largest logprob that is accepted, in nats: rounding may lift one slightly above 0."""


class UnusableBatch(HeadraceError):
    """The batch can't be trained on: its trajectories are malformed, or training diverges."""


class NothingFits(UnusableBatch):
    """The device has too little memory for each single sample of the batch."""


class UnusableSample(UnusableBatch):
    """One sample can't be trained on; the rest of its batch can."""

    def __init__(self, sample: int, reason: str) -> None:
        """`sample` is its index in the batch."""
        super().__init__(reason)
        self.sample = sample

    def __reduce__(self) -> tuple[type[UnusableSample], tuple[int, str]]:
        """Lets one rank tell the others."""
        return UnusableSample, (self.sample, str(self))


class Stopped(HeadraceError):
    """The trainer was asked to stop; it drops the version that it was making."""


def raise_if_stopped(stop: threading.Event | None) -> None:
    """Raises Stopped if `stop` is set."""
    if stop is not None and stop.is_set():
        raise Stopped("stopped before the version was complete")


class SampleLabels(NamedTuple):
    """Which sample of a batch a sequence belongs to. The fields are those of `TokenSequence`."""

    sample: int = 0
    group: int = 0
    use: int = 0
    name: str = ""


UNLABELLED = SampleLabels()


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """L token ids, of which N are trained. Arrays of N have the order of `positions`."""

    tokens: Ints
    """[L] int64: token ids."""
    positions: Ints
    """[N] int64: indices of the trained tokens in `tokens`. Never 0, because a token is predicted
    from the tokens before it."""
    behaviour: Floats
    """[N] float32: logprobs in nats by the engine that sampled the tokens; 0 if demonstrated."""
    advantages: Floats
    """[N] float32: advantage times the sample's weight; the weight alone if demonstrated."""
    versions: Ints
    """[N] int64: the policy version that sampled each token; -1 if demonstrated."""
    samplings: tuple[tuple[Sampling, int], ...]
    """How the trained tokens were sampled, as runs of (sampling, number of tokens): one for each
    turn."""
    demonstrated: Bools
    """[N] bool: whether the agent demonstrated the token instead of sampling it."""
    teacher: Floats | None = None
    """[N] float32: logprobs in nats by the policy's teacher; 0 if demonstrated. None if the policy
    has no teacher."""
    sample: int = 0
    """The index in the batch of the sample that the sequence belongs to."""
    group: int = 0
    """The index in the batch of the sample's group."""
    use: int = 0
    """Number of earlier batches with the sample. 0 means fresh."""
    name: str = ""
    """The sample's task and number, for people."""
    turns: tuple[int, ...] = ()
    """The index in the trajectory of each run of `samplings`."""
    rewards: Floats | None = None
    """[N] float32: the reward that followed each token. None unless the policy has a critic. Then
    `advantages` has only the sample's weight."""


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """The sequences that one optimizer update trains on."""

    sequences: Sequence[TokenSequence]
    newest: int = 0
    """The newest version before the batch: version n - 1 if the batch makes version n."""

    @property
    def tokens(self) -> int:
        """The number of trained tokens."""
        return sum(len(one.positions) for one in self.sequences)


def token_sequences(
    trajectory: TrajectoryRecorded,
    policy: str,
    advantages: Sequence[float],
    weight: float,
    vocabulary: int,
    taught: bool = False,
    labels: SampleLabels = UNLABELLED,
) -> list[TokenSequence]:
    """Returns the sequences of a trajectory that train `policy`, with the `labels` of its sample.

    If it is `taught`, they have the logprobs of its teacher, which the trajectory must have.

    A path without trained tokens is left out. `advantages` has one value for all turns, or one for
    each turn of this policy. `weight` multiplies them. Token ids must be below `vocabulary`.
    Raises UnusableBatch if the trajectory contradicts itself or can't be trained on.
    """
    name = f"trajectory of task {trajectory.task} sample {trajectory.sample}"
    own = [index for index, turn in enumerate(trajectory.turns) if turn.policy == policy]
    if len(advantages) not in (1, len(own)):
        raise UnusableBatch(
            f"{name}: {len(advantages)} advantages for {len(own)} turns of policy {policy!r}"
        )
    spread = list(advantages) * len(own) if len(advantages) == 1 else advantages
    by_turn = dict(zip(own, spread, strict=True))
    turns: list[_UnpackedTurn] = []
    for index in range(len(trajectory.turns)):
        try:
            turns.append(_read_turn(trajectory, index, by_turn.get(index), weight, vocabulary))
            if taught and turns[-1].sampling is not None:
                turns[-1] = replace(turns[-1], teacher=_teacher(trajectory.turns[index]))
        except ValueError as error:
            raise UnusableBatch(f"{name}, turn {index}: {error}") from error
    sequences, trained = [], set[int]()
    for path in paths(trajectory.turns):
        new = {index for index in path if turns[index].sampling is not None} - trained
        if new:
            # Tokens after the last trained one have no influence on the gradient.
            last = max(position for position, index in enumerate(path) if index in new)
            read = [turns[index] for index in path[: last + 1]]
            sequences.append(_join(read, path, new, name, labels))
            trained |= new
    return sequences


@dataclass(frozen=True, slots=True)
class _UnpackedTurn:
    context: Ints
    tokens: Ints
    behaviour: Floats
    versions: Ints
    advantage: float
    demonstrated: bool
    sampling: Sampling | None
    """None if the turn is not trained."""
    teacher: Floats | None = None


def _read_turn(
    trajectory: TrajectoryRecorded,
    index: int,
    advantage: float | None,
    weight: float,
    vocabulary: int,
) -> _UnpackedTurn:
    """Unpacks a turn. `advantage` is None if the turn is another policy's.

    Raises ValueError if the turn contradicts itself or can't be trained on.
    """
    turn = trajectory.turns[index]
    if not -1 <= turn.parent < index:
        raise ValueError(f"its parent is turn {turn.parent}, which is not an earlier one")
    context, tokens = _ids(turn.context), _ids(turn.tokens)
    logprobs, versions = _logprobs_and_versions(turn, len(tokens))
    sampling = None
    if advantage is not None:
        for ids in (turn.context, turn.tokens):
            # As a number without a sign, a negative id is above all others.
            if np.maximum.reduce(np.frombuffer(ids, "<u4"), initial=0) >= vocabulary:
                raise ValueError(f"a token id is outside of the model's {vocabulary} ids")
    if advantage is not None and turn.trainable and len(tokens):
        if len(logprobs) != len(tokens):
            raise ValueError(f"{len(logprobs)} logprobs for {len(tokens)} tokens")
        _check_logprobs(logprobs, "a logprob")
        sampling = _checked_sampling(trajectory.samplings, turn, tokens)
    factor = weight if turn.demonstrated else (advantage or 0.0) * weight
    return _UnpackedTurn(context, tokens, logprobs, versions, factor, turn.demonstrated, sampling)


def _teacher(turn: Turn) -> Floats:
    """Returns the teacher's logprob of each token. Raises ValueError if it scored other tokens."""
    count = len(turn.tokens) // 4
    if turn.demonstrated:
        return np.zeros(count, dtype=np.float32)
    logprobs = np.frombuffer(turn.teacher, "<f4")
    if len(logprobs) != count:
        raise ValueError(f"{len(logprobs)} logprobs by its teacher for {count} tokens")
    _check_logprobs(logprobs, "a logprob by its teacher")
    return logprobs


def _check_logprobs(logprobs: Floats, what: str) -> None:
    least, most = np.minimum.reduce(logprobs, initial=0), np.maximum.reduce(logprobs, initial=0)
    if not -np.inf < least <= most <= LOGPROB_TOLERANCE:  # This refuses NaN, too.
        raise ValueError(f"{what} is above 0, infinite or not a number")


def _logprobs_and_versions(turn: Turn, tokens: int) -> tuple[Floats, Ints]:
    """Returns the logprob and the version of each token; 0 and -1 if it was demonstrated."""
    if not turn.demonstrated:
        runs = np.array(span_runs(turn.versions, tokens), dtype=np.int64).reshape(-1, 2)
        return np.frombuffer(turn.logprobs, "<f4"), np.repeat(runs[:, 0], runs[:, 1])
    if turn.logprobs or turn.versions:
        raise ValueError("it was demonstrated, but it has logprobs or versions like a sampled turn")
    return np.zeros(tokens, dtype=np.float32), np.full(tokens, -1)


def _ids(data: bytes) -> Ints:
    return np.frombuffer(data, "<i4").astype(np.int64)


def _checked_sampling(samplings: Sequence[Sampling], turn: Turn, tokens: Ints) -> Sampling:
    """Returns the turn's sampling. Raises ValueError if its logprobs can't be recomputed."""
    if not 0 <= turn.sampling < len(samplings):
        raise ValueError(f"it names sampling {turn.sampling} of {len(samplings)} samplings")
    sampling = samplings[turn.sampling]
    truncated = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    if sampling.temperature <= 0 or truncated:
        raise ValueError(
            "it was sampled greedily or with top-p, top-k or min-p. The log does not record which "
            "tokens these left, so the logprobs can't be recomputed. Train on plain temperature "
            "sampling"
        )
    if sampling.allowed and not np.isin(tokens, _ids(sampling.allowed)).all():
        raise ValueError("it has a token that its sampling does not allow")
    if turn.demonstrated and sampling.json_schema:
        # Its tokens need not follow the schema.
        return sampling.model_copy(update={"json_schema": ""})
    return sampling


def _join(
    turns: list[_UnpackedTurn], path: list[int], new: set[int], name: str, labels: SampleLabels
) -> TokenSequence:
    """Joins a path's turns up to its last trained one. `new` are the turns that it trains."""
    positions: list[Ints] = []
    trained: list[_UnpackedTurn] = []
    samplings: list[tuple[Sampling, int]] = []
    numbers: list[int] = []
    length = 0
    for index, turn in zip(path, turns, strict=False):
        start = length + len(turn.context)
        length = start + len(turn.tokens)
        if index in new and turn.sampling is not None:
            if start == 0:
                raise UnusableBatch(f"{name}, turn {index}: its first token has no context")
            positions.append(np.arange(start, length))
            trained.append(turn)
            numbers.append(index)
            samplings.append((turn.sampling, len(turn.tokens)))
    counts = [count for _, count in samplings]
    taught = [turn.teacher for turn in trained if turn.teacher is not None]
    return TokenSequence(
        tokens=np.concatenate([ids for turn in turns for ids in (turn.context, turn.tokens)]),
        positions=np.concatenate(positions),
        behaviour=np.concatenate([turn.behaviour for turn in trained]),
        advantages=np.repeat(np.array([t.advantage for t in trained], dtype=np.float32), counts),
        versions=np.concatenate([turn.versions for turn in trained]),
        demonstrated=np.repeat([turn.demonstrated for turn in trained], counts),
        samplings=tuple(samplings),
        turns=tuple(numbers),
        teacher=np.concatenate(taught) if taught else None,
        sample=labels.sample,
        group=labels.group,
        use=labels.use,
        name=labels.name,
    )
