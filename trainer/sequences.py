"""From a trajectory's tree of turns to the token sequences that a model reads.

Every path from a root to a leaf is a sequence. A sampled turn that several paths share is trained
in the first of them, and is context in the others. What a trajectory says is checked, not
trusted: a wrong length or span would silently train on the wrong tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.errors import HeadraceError
from headrace.schemas.events import Sampling, TrajectoryRecorded, Turn
from headrace.schemas.packed import span_runs

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

LOGPROB_TOLERANCE = 1e-3
"""By how much rounding may lift a logprob above 0."""


class UnusableBatch(HeadraceError):
    """A batch that can't be trained on: its trajectories are malformed, or it diverges."""


class Stopped(HeadraceError):
    """Training was asked to stop; the version in the making is dropped."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How a token was drawn: all that its processed logprob depends on."""

    temperature: float
    allowed: bytes
    """i32[]; empty allows all."""
    json_schema: str = ""
    """What the whole answer had to follow; empty where nothing."""
    stop_ids: bytes = b""
    """i32[]: what may end the answer by a schema."""
    stop: tuple[str, ...] = ()
    """Texts, of one token each, that may end it as well."""
    around: tuple[str, str] = ("", "")
    """What came before the JSON, and after it."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """L token ids, of which N are trained. Arrays of N are in the order of `places`."""

    tokens: Ints
    """[L] ids."""
    places: Ints
    """[N] indices of the trained tokens; never 0: a token is predicted from those before it."""
    behaviour: Floats
    """[N] logprobs by the engine that drew them; 0 where they were demonstrated."""
    advantages: Floats
    """[N] times the sample's weight; that weight alone where they were demonstrated."""
    versions: Ints
    """[N] the policy version that drew each; -1 where none did."""
    draws: tuple[tuple[Draw, int], ...]
    """Runs of trained tokens drawn alike: (how, number of tokens)."""
    demonstrated: Bools
    """[N] which were not drawn, but said to be what the policy should have said."""


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """What one optimizer update trains on."""

    sequences: Sequence[TokenSequence]
    tokens: int
    """Trained tokens of the whole update, on all ranks: the loss's denominator."""


def token_sequences(
    trajectory: TrajectoryRecorded,
    policy: str,
    advantages: Sequence[float],
    weight: float,
    vocabulary: int,
) -> list[TokenSequence]:
    """The sequences of a trajectory that train `policy`; one without a trained token is left out.

    `advantages` has one value for all turns, or one a turn of this policy. `vocabulary` bounds the
    ids. UnusableBatch where the trajectory contradicts itself, or can't be trained on.
    """
    where = f"trajectory of task {trajectory.task} sample {trajectory.sample}"
    own = [index for index, turn in enumerate(trajectory.turns) if turn.policy == policy]
    if len(advantages) not in (1, len(own)):
        raise UnusableBatch(
            f"{where}: {len(advantages)} advantages for {len(own)} turns of policy {policy!r}"
        )
    spread = list(advantages) * len(own) if len(advantages) == 1 else advantages
    by_turn = dict(zip(own, spread, strict=True))
    turns = [
        _read_turn(trajectory, index, by_turn.get(index), weight, vocabulary, where)
        for index in range(len(trajectory.turns))
    ]
    sequences, trained = [], set[int]()
    for path in _paths(trajectory.turns):
        new = {index for index in path if turns[index].draw is not None} - trained
        if new:
            # What follows the last trained token changes no gradient.
            last = max(position for position, index in enumerate(path) if index in new)
            sequences.append(_join([turns[index] for index in path[: last + 1]], path, new, where))
            trained |= new
    return sequences


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn, unpacked. `draw` is None where it is not trained."""

    context: Ints
    tokens: Ints
    behaviour: Floats
    versions: Ints
    advantage: float
    demonstrated: bool
    draw: Draw | None


def _read_turn(
    trajectory: TrajectoryRecorded,
    index: int,
    advantage: float | None,
    weight: float,
    vocabulary: int,
    where: str,
) -> _Turn:
    """`advantage` is None where the turn is another policy's."""
    turn = trajectory.turns[index]
    where = f"{where}, turn {index}"
    if not -1 <= turn.parent < index:
        raise UnusableBatch(f"{where}: its parent is turn {turn.parent}")
    try:
        context, tokens = _ids(turn.context), _ids(turn.tokens)
        logprobs, versions = _drawn_by(turn, len(tokens))
    except ValueError as error:
        raise UnusableBatch(f"{where}: {error}") from error
    draw = None
    if advantage is not None:
        for ids in (context, tokens):
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
                raise UnusableBatch(f"{where}: a token id is outside of the model's {vocabulary}")
    if advantage is not None and turn.trainable and len(tokens):
        if len(logprobs) != len(tokens):
            raise UnusableBatch(f"{where}: {len(logprobs)} logprobs for {len(tokens)} tokens")
        if not np.all((logprobs > -np.inf) & (logprobs <= LOGPROB_TOLERANCE)):
            raise UnusableBatch(f"{where}: a logprob is above 0, infinite or no number")
        draw = _draw(trajectory.samplings, turn, tokens, where)
    factor = weight if turn.demonstrated else (advantage or 0.0) * weight
    return _Turn(context, tokens, logprobs, versions, factor, turn.demonstrated, draw)


def _drawn_by(turn: Turn, tokens: int) -> tuple[Floats, Ints]:
    """Logprob and version of each token; 0 and -1 where they were demonstrated."""
    if not turn.demonstrated:
        runs = np.array(span_runs(turn.versions, tokens), dtype=np.int64).reshape(-1, 2)
        return np.frombuffer(turn.logprobs, "<f4"), np.repeat(runs[:, 0], runs[:, 1])
    if turn.logprobs or turn.versions:
        raise ValueError("it was demonstrated, and has logprobs or versions as if it were sampled")
    return np.zeros(tokens, dtype=np.float32), np.full(tokens, -1)


def _ids(data: bytes) -> Ints:
    return np.frombuffer(data, "<i4").astype(np.int64)


def _draw(samplings: Sequence[Sampling], turn: Turn, tokens: Ints, where: str) -> Draw:
    if not 0 <= turn.sampling < len(samplings):
        raise UnusableBatch(f"{where}: it names sampling {turn.sampling} of {len(samplings)}")
    sampling = samplings[turn.sampling]
    truncated = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    if sampling.temperature <= 0 or truncated:
        raise UnusableBatch(
            f"{where}: drawn greedily or with top-p, top-k or min-p, whose support is not "
            f"recorded: the logprobs can't be recomputed. Train on plain temperature sampling"
        )
    if sampling.allowed and not np.isin(tokens, _ids(sampling.allowed)).all():
        raise UnusableBatch(f"{where}: it drew a token that its sampling does not allow")
    if not sampling.json_schema or turn.demonstrated:
        return Draw(sampling.temperature, sampling.allowed)
    return Draw(
        sampling.temperature,
        sampling.allowed,
        sampling.json_schema,
        sampling.stop_ids,
        sampling.stop,
        (sampling.json_before, sampling.json_after),
    )


def _paths(turns: Sequence[Turn]) -> list[list[int]]:
    """Each leaf's path from its root, as turn indices; leaves in order."""
    parents = {turn.parent for turn in turns}
    paths = []
    for leaf in range(len(turns)):
        if leaf in parents:
            continue
        path, index = [], leaf
        while index >= 0:
            path.append(index)
            index = turns[index].parent
        paths.append(path[::-1])
    return paths


def _join(turns: list[_Turn], path: list[int], new: set[int], where: str) -> TokenSequence:
    """One path, cut after its last trained turn; `new` are the turns that it trains."""
    tokens: list[Ints] = []
    places: list[Ints] = []
    trained: list[_Turn] = []
    draws: list[tuple[Draw, int]] = []
    length = 0
    for index, turn in zip(path, turns, strict=False):
        start = length + len(turn.context)
        length = start + len(turn.tokens)
        tokens += (turn.context, turn.tokens)
        if index in new and turn.draw is not None:
            if start == 0:
                raise UnusableBatch(f"{where}, turn {index}: its first token has no context")
            places.append(np.arange(start, length))
            trained.append(turn)
            draws.append((turn.draw, len(turn.tokens)))
    return TokenSequence(
        tokens=np.concatenate(tokens),
        places=np.concatenate(places),
        behaviour=np.concatenate([turn.behaviour for turn in trained]),
        advantages=np.concatenate(
            [np.full(len(turn.tokens), turn.advantage, dtype=np.float32) for turn in trained]
        ),
        versions=np.concatenate([turn.versions for turn in trained]),
        demonstrated=np.repeat(
            [turn.demonstrated for turn in trained], [len(turn.tokens) for turn in trained]
        ),
        draws=tuple(draws),
    )
