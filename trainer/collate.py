"""From token sequences to the tensors of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.schemas.packed import unpack_i32
from headrace.trainer.schema_masks import SchemaMasks
from headrace.trainer.sequences import Draw, Ints, TokenSequence


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the model reads of B sequences, and N trained tokens among them, flat."""

    ids: Tensor
    """[B, L] int64, right-padded: under a causal mask no token sees the padding behind it."""
    rows: Tensor
    """[N] int64: the sequence of each trained token."""
    before: Tensor
    """[N] int64: the place in front of it, whose output predicts it."""
    targets: Tensor
    """[N] int64: the tokens."""
    temperature: Tensor
    """[N, 1] float32."""
    allowed: Tensor | None
    """[K, V] bool: K sets of allowed ids; None where everything is."""
    allowed_set: Tensor
    """[N] int64: which of the K sets is each token's."""
    behaviour: Tensor
    """[N] float32."""
    advantages: Tensor
    """[N] float32."""
    drawn: Tensor
    """[D] int64: which of the N were drawn."""
    demonstrated: Tensor
    """[N - D] int64: which were demonstrated instead."""


def collate(
    sequences: Sequence[TokenSequence],
    vocabulary: int,
    device: torch.device,
    schemas: SchemaMasks | None = None,
) -> Inputs:
    """Pads and joins sequences. Never empty. `schemas` is needed where answers follow one."""
    ids = np.zeros((len(sequences), max(len(one.tokens) for one in sequences)), dtype=np.int64)
    for row, one in enumerate(sequences):
        ids[row, : len(one.tokens)] = one.tokens
    places = np.concatenate([one.places for one in sequences])
    rows = np.repeat(np.arange(len(sequences)), [len(one.places) for one in sequences])
    runs = [run for one in sequences for run in one.draws]
    temperatures = np.repeat([draw.temperature for draw, _ in runs], [count for _, count in runs])
    targets = ids[rows, places]
    allowed, numbers = _allowed(runs, targets, vocabulary, schemas)
    demonstrated = np.concatenate([one.demonstrated for one in sequences])

    def tensor(array: object, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(array, dtype=dtype).to(device)

    return Inputs(
        ids=tensor(ids, torch.int64),
        rows=tensor(rows, torch.int64),
        before=tensor(places - 1, torch.int64),
        targets=tensor(targets, torch.int64),
        temperature=tensor(temperatures, torch.float32).unsqueeze(1),
        allowed=None if allowed is None else allowed.to(device),
        allowed_set=tensor(numbers, torch.int64),
        behaviour=tensor(np.concatenate([one.behaviour for one in sequences]), torch.float32),
        advantages=tensor(np.concatenate([one.advantages for one in sequences]), torch.float32),
        drawn=tensor(np.flatnonzero(~demonstrated), torch.int64),
        demonstrated=tensor(np.flatnonzero(demonstrated), torch.int64),
    )


def _allowed(
    runs: Sequence[tuple[Draw, int]],
    targets: Ints,
    vocabulary: int,
    schemas: SchemaMasks | None,
) -> tuple[Tensor | None, list[int]]:
    """The distinct sets of allowed ids, as [K, V], and the set of each of the N targets."""
    sets: dict[bytes, NDArray[np.bool_]] = {}
    """By what tells them apart: packed ids, or packed bits."""
    chosen: list[bytes] = []
    place = 0
    for draw, count in runs:
        if draw.json_schema:
            assert schemas is not None, "answers follow a JSON schema"
            for mask in schemas.of(draw, targets[place : place + count]):
                key = b"bits" + np.packbits(mask).tobytes()
                sets.setdefault(key, mask)
                chosen.append(key)
        else:
            if draw.allowed not in sets:
                sets[draw.allowed] = np.zeros(vocabulary, dtype=np.bool_)
                sets[draw.allowed][unpack_i32(draw.allowed) if draw.allowed else slice(None)] = True
            chosen += [draw.allowed] * count
        place += count
    if set(sets) == {b""}:
        return None, [0] * len(targets)
    numbers = {key: number for number, key in enumerate(sets)}
    return torch.from_numpy(np.stack(list(sets.values()))), [numbers[key] for key in chosen]


def processed_distribution(logits: Tensor, inputs: Inputs) -> Tensor:
    """Logprobs [N, V] of all that could have been drawn, from logits [N, V].

    The distribution is the one that was drawn from: masked to the allowed ids, whose logprobs
    alone are finite, then divided by the temperature, in float32.
    """
    scores = logits.float() / inputs.temperature
    if inputs.allowed is not None:
        scores = scores.masked_fill(~inputs.allowed[inputs.allowed_set], -torch.inf)
    return scores.log_softmax(-1)


def drawn_logprobs(distribution: Tensor, inputs: Inputs) -> Tensor:
    """Logprobs [N] of the trained tokens, from `processed_distribution`."""
    return distribution.gather(1, inputs.targets.unsqueeze(1)).squeeze(1)


def entropy(distribution: Tensor) -> Tensor:
    """Entropies [N] in nats, from `processed_distribution`. Forbidden ids add nothing."""
    return -(distribution.exp() * distribution.clamp(min=-1e9)).sum(-1)
