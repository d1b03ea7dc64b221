"""The tokens of one context as columns: text, origin, mask, logprobs, version and policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from headrace.schemas import packed
from headrace.schemas.events import TrajectoryRecorded, Turn
from headrace.schemas.turn_paths import paths
from headrace.services.base.texts import encodable
from headrace.services.log.unpacked import ids_in
from headrace.services.operate.dashboard.index.version_series import number
from headrace.services.operate.dashboard.views.cut_texts import Tree

MOST_TOKENS = 8_000
"""Most tokens of one answer."""
CONTEXT, SAMPLED, DEMONSTRATED = 0, 1, 2
"""Where a token comes from."""
LONGEST_CHARACTER = 6
"""Most tokens that are one character together."""
BROKEN = "\ufffd"
"""What a tokenizer makes of a part of a character."""

Decode = Callable[[Sequence[int]], str | None]
"""Decodes token ids of a policy. None if this machine lacks the tokenizer."""


class Token(NamedTuple):
    """One token of a context."""

    turn: int
    id: int
    origin: int
    mask: int
    logprob: float | None
    trainer: float | None
    teacher: float | None
    version: int
    policy: str


def strip_tree(
    trajectory: TrajectoryRecorded,
    decoder: Callable[[str], Decode],
    trainer: Mapping[int, Sequence[float | None]],
    *,
    branch: int | None,
    first: int,
    limit: int,
    masked: bool,
) -> Tree:
    """Returns the tokens from the root to turn `branch`, by default the last one.

    `decoder` returns what decodes the ids of a policy. `trainer` has the trainer's logprobs of the
    turns of which they are known. `masked`: no policy learns from the episode.
    """
    turns = trajectory.turns
    leaves = [path[-1] for path in paths(turns)]
    branch = len(turns) - 1 if branch is None else branch
    path: list[int] = []
    at = branch
    while 0 <= at < len(turns) and len(path) <= len(turns):
        path.append(at)
        at = turns[at].parent
    tokens = [
        one
        for turn in reversed(path)
        for one in _tokens(turn, turns[turn], trainer.get(turn), masked)
    ]
    shown = tokens[first : first + min(limit, MOST_TOKENS)]
    policies = list(dict.fromkeys(one.policy for one in shown))
    return {
        "branch": branch,
        "leaves": leaves,
        "from": first,
        "total": len(tokens),
        "next": first + len(shown) if first + len(shown) < len(tokens) else None,
        "turn": [one.turn for one in shown],
        "id": [one.id for one in shown],
        "text": texts_of(shown, decoder),
        "origin": [one.origin for one in shown],
        "mask": [one.mask for one in shown],
        "logprob": [one.logprob for one in shown],
        "trainer": [one.trainer for one in shown],
        "teacher": [one.teacher for one in shown],
        "version": [one.version for one in shown],
        "policy": [policies.index(one.policy) for one in shown],
        "policies": policies,
    }


def _tokens(
    number_of: int, turn: Turn, trainer: Sequence[float | None] | None, masked: bool
) -> Iterator[Token]:
    for one in ids_in(turn.context):
        yield Token(number_of, one, CONTEXT, 0, None, None, None, -1, turn.policy)
    ids = ids_in(turn.tokens)
    logprobs = _floats(turn.logprobs, len(ids))
    teacher = _floats(turn.teacher, len(ids))
    try:
        versions = packed.unpack_spans(turn.versions, len(ids)) if turn.versions else []
    except ValueError:
        versions = []
    versions = versions or [-1] * len(ids)
    origin = DEMONSTRATED if turn.demonstrated else SAMPLED
    mask = int(turn.trainable and (turn.demonstrated or not masked))
    trainer = trainer or [None] * len(ids)
    columns = zip(ids, logprobs, trainer, teacher, versions, strict=True)
    for one, logprob, trained, taught, version in columns:
        yield Token(number_of, one, origin, mask, logprob, trained, taught, version, turn.policy)


def _floats(data: bytes, count: int) -> list[float | None]:
    """Unpacks one number for each token; None for each if the bytes are not that."""
    if len(data) != 4 * count:
        return [None] * count
    return [number(value) for value in packed.unpack_f32(data)]


def texts_of(tokens: Sequence[Token], decoder: Callable[[str], Decode]) -> list[str | None]:
    """Returns each token's text. The tokens of one character have it at the first one."""
    texts: list[str | None] = []
    decoders: dict[str, Decode] = {}
    at = 0
    while at < len(tokens):
        policy = tokens[at].policy
        decode = decoders.setdefault(policy, decoder(policy))
        count, text = 1, decode([tokens[at].id])
        while text is not None and BROKEN in text and count < LONGEST_CHARACTER:
            more = tokens[at : at + count + 1]
            if len(more) == count or more[-1].policy != policy or more[-1].turn != tokens[at].turn:
                break
            count, text = count + 1, decode([one.id for one in more])
        if text is not None and BROKEN in text:
            count, text = 1, decode([tokens[at].id])
        texts += [None if text is None else encodable(text), *([""] * (count - 1))]
        at += count
    return texts
