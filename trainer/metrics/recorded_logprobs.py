"""The trainer's logprobs of a batch's tokens, packed for the blob store.

The blob is a little-endian float32[T] without a header, where T is the batch's `sampled_tokens`. It
has the logprobs in nats under the weights before the batch's first update. The samples have the
order of the batch, and sample i has `samples[i].tokens` numbers. Within a sample, the turns that
the policy trains have the order of the trajectory. A sample that the trainer dropped is all NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path

import numpy as np

from headrace.schemas.events import BatchAssembled, Turn
from headrace.trainer.sequences import Floats, TokenSequence

ITEM_BYTES = 4


def pack_logprobs(batch: BatchAssembled, found: Iterable[tuple[TokenSequence, Floats]]) -> bytes:
    """Returns the blob of a batch. `found` has each trained sequence's logprobs, float32[N]."""
    parts: dict[int, list[tuple[int, Floats]]] = {}
    for sequence, logprobs in found:
        ends = np.cumsum([count for _, count in sequence.samplings])
        turns = zip(sequence.turns, np.split(logprobs, ends[:-1]), strict=True)
        parts.setdefault(sequence.sample, []).extend(turns)
    whole = np.full(batch.sampled_tokens, np.nan, "<f4")
    ends = np.cumsum([sample.tokens for sample in batch.samples])
    for index, own in parts.items():
        ordered = np.concatenate([part for _, part in sorted(own, key=itemgetter(0))])
        whole[ends[index] - len(ordered) : ends[index]] = ordered
    return whole.tobytes()


def read_logprobs(path: Path, batch: BatchAssembled, index: int) -> Floats | None:
    """Returns the logprobs of sample `index` from a blob's file; None if it was dropped.

    Raises ValueError if the file does not fit the batch.
    """
    if path.stat().st_size != ITEM_BYTES * batch.sampled_tokens:
        raise ValueError(f"it does not have one number for each of {batch.sampled_tokens} tokens")
    start = sum(sample.tokens for sample in batch.samples[:index])
    count = batch.samples[index].tokens
    logprobs = np.fromfile(path, "<f4", count, offset=ITEM_BYTES * start)
    return None if np.isnan(logprobs).all() else logprobs


def trained_turns(turns: Sequence[Turn], policy: str) -> dict[int, int]:
    """Returns the number of tokens of each turn that trains `policy`, by index and in order."""
    return {
        index: len(turn.tokens) // ITEM_BYTES
        for index, turn in enumerate(turns)
        if turn.policy == policy and turn.trainable and turn.tokens
    }
