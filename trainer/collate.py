"""Turns the sequences of a micro-batch into tensors.

Recomputes the token masks of answers that had to follow a JSON schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import UsageError
from headrace.schemas.events import Sampling
from headrace.schemas.packed import unpack_i32
from headrace.services.models.json_schema import Schemas
from headrace.services.models.tokens import single_ids
from headrace.trainer.forward.packed_attention import Packing
from headrace.trainer.packing import layout
from headrace.trainer.sequences import Ints, TokenSequence, UnusableBatch, UnusableSample

KEPT_BYTES = 256 << 20
"""Maximum memory for the masks of one batch that are kept for its later passes."""


class SchemaMasks:
    """Recomputes an engine's masks with the same library and the same tokenizer.

    A mask is packed: 32-bit little-endian words, of which bit i % 32 of word i // 32 says whether
    id i is allowed. Masks are kept until `forget` is called, up to `KEPT_BYTES`.
    """

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """`folder` has the model's tokenizer. It is read when the first schema is needed."""
        self._folder = folder
        self._vocabulary = vocabulary
        self._schemas: Schemas | None = None
        self._kept: dict[tuple[int, int], tuple[TokenSequence, NDArray[np.int32]]] = {}
        """By the id of the sequence and the number of its run. A kept sequence keeps its id."""
        self._numbers: dict[bytes, int] = {}
        self._masks: list[bytes] = []
        """The distinct masks that are kept. `_numbers` has their indices."""
        self._bytes = 0

    def of(self, sequence: TokenSequence, run: int, tokens: Ints) -> list[bytes]:
        """Returns N packed masks: the ids that were allowed at each of an answer's N tokens.

        The answer is run `run` of the sequence's samplings, and `tokens` is the whole answer. Equal
        masks of one answer are one object. Raises UnusableBatch if the schema can't be followed or
        the tokens do not follow it.
        """
        place = id(sequence), run
        if place not in self._kept:
            masks = self._computed(sequence.samplings[run][0], tokens)
            self._keep(sequence, run, masks)
            return masks
        return [self._masks[number] for number in self._kept[place][1]]

    def forget(self) -> None:
        """Drops all kept masks."""
        self._kept, self._numbers, self._masks, self._bytes = {}, {}, [], 0

    def _computed(self, sampling: Sampling, tokens: Ints) -> list[bytes]:
        try:
            if self._schemas is None:
                self._schemas = Schemas(self._folder, self._vocabulary)
            ends = (
                *unpack_i32(sampling.stop_ids),
                *single_ids(self._schemas.tokenizer, sampling.stop),
            )
            around = sampling.json_before, sampling.json_after
            grammar = self._schemas.begin(sampling.json_schema, ends, around)
            distinct: dict[bytes, bytes] = {}
            masks = []
            for token in tokens.tolist():
                mask = grammar.packed()
                masks.append(distinct.setdefault(mask, mask))
                grammar.accept(token)
        except (ValueError, UsageError) as error:
            raise UnusableBatch(
                f"the masks of an answer with a JSON schema can't be recomputed: {error}"
            ) from error
        return masks

    def _keep(self, sequence: TokenSequence, run: int, masks: list[bytes]) -> None:
        """Keeps an answer's masks, if there is room for them."""
        new = [mask for mask in dict.fromkeys(masks) if mask not in self._numbers]
        more = sum(map(len, new)) + np.dtype(np.int32).itemsize * len(masks)
        if self._bytes + more > KEPT_BYTES:
            return
        self._bytes += more
        for mask in new:
            self._numbers[mask] = len(self._masks)
            self._masks.append(mask)
        numbers = np.array([self._numbers[mask] for mask in masks], dtype=np.int32)
        self._kept[id(sequence), run] = sequence, numbers


def _unpacked(mask: bytes, vocabulary: int) -> NDArray[np.bool_]:
    """Returns a packed mask as [V] bool."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=vocabulary, bitorder="little")
    return bits.view(np.bool_)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Sequences for the model, and the N trained tokens among them, flat."""

    ids: Tensor
    """[B, L] int64: token ids. Each row is a sequence that is padded on the right, or with
    `packing` one row has all sequences."""
    rows: Tensor
    """[N] int64: the row in `ids` of the token before each trained token."""
    before: Tensor
    """[N] int64: the column of the token before each trained token. The model's output there
    predicts it."""
    targets: Tensor
    """[N] int64: ids of the trained tokens."""
    temperature: Tensor
    """[N, 1] float32: the sampling temperature."""
    allowed: Tensor | None
    """[K, V] bool: K distinct sets of allowed ids. None if all ids are allowed everywhere."""
    allowed_set: Tensor
    """[N] int64: index of each token's set in `allowed`."""
    behaviour: Tensor
    """[N] float32: as in `TokenSequence`."""
    advantages: Tensor
    """[N] float32: as in `TokenSequence`."""
    sampled: Tensor
    """[S] int64: indices of the sampled tokens among the N."""
    demonstrated: Tensor
    """[N - S] int64: indices of the demonstrated tokens among the N."""
    packing: Packing | None = None
    """Which tokens belong together. None if each row is a sequence."""


def collate(
    sequences: Sequence[TokenSequence],
    vocabulary: int,
    device: torch.device,
    schemas: SchemaMasks | None = None,
    *,
    packed: bool = False,
) -> Inputs:
    """Joins sequences, of which there is at least one: packed, or else padded.

    `vocabulary` is V. `schemas` is needed if a sampling has a JSON schema. Raises UnusableSample if
    an answer's masks can't be recomputed.
    """
    tokens = [one.tokens for one in sequences]
    if packed:
        made = layout.packed(tokens)
        ids, places, packing = made.ids[None], made.places, Packing.of(made, device)
    else:
        (ids, places), packing = layout.padded(tokens), None
    before = [at[one.positions - 1] for at, one in zip(places, sequences, strict=True)]
    rows, columns = np.divmod(np.concatenate(before), ids.shape[1])
    runs = [run for one in sequences for run in one.samplings]
    temperatures = np.repeat([one.temperature for one, _ in runs], [count for _, count in runs])
    targets = np.concatenate([one.tokens[one.positions] for one in sequences])
    allowed, numbers = _allowed(sequences, targets, vocabulary, schemas)
    demonstrated = np.concatenate([one.demonstrated for one in sequences])

    def tensor(array: object, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(array, dtype=dtype).to(device)

    return Inputs(
        ids=tensor(ids, torch.int64),
        rows=tensor(rows, torch.int64),
        before=tensor(columns, torch.int64),
        targets=tensor(targets, torch.int64),
        temperature=tensor(temperatures, torch.float32).unsqueeze(1),
        allowed=None if allowed is None else allowed.to(device),
        allowed_set=tensor(numbers, torch.int64),
        behaviour=tensor(np.concatenate([one.behaviour for one in sequences]), torch.float32),
        advantages=tensor(np.concatenate([one.advantages for one in sequences]), torch.float32),
        sampled=tensor(np.flatnonzero(~demonstrated), torch.int64),
        demonstrated=tensor(np.flatnonzero(demonstrated), torch.int64),
        packing=packing,
    )


def _allowed(
    sequences: Sequence[TokenSequence],
    targets: Ints,
    vocabulary: int,
    schemas: SchemaMasks | None,
) -> tuple[Tensor | None, list[int]]:
    """Returns the distinct sets of allowed ids, [K, V] bool, and each target's index in them."""
    sets: dict[tuple[bool, bytes], int] = {}
    """The number of each set: of a packed mask of a JSON schema, or else of packed ids."""
    numbers: list[int] = []
    start = 0
    runs = ((one, run, *what) for one in sequences for run, what in enumerate(one.samplings))
    for one, run, sampling, count in runs:
        if sampling.json_schema:
            assert schemas is not None, "a sampling has a JSON schema, but `schemas` is missing"
            try:
                masks = schemas.of(one, run, targets[start : start + count])
            except UnusableBatch as error:
                raise UnusableSample(one.sample, str(error)) from error
            numbers += [sets.setdefault((True, mask), len(sets)) for mask in masks]
        else:
            numbers += [sets.setdefault((False, sampling.allowed), len(sets))] * count
        start += count
    if set(sets) == {(False, b"")}:
        return None, numbers
    allowed = np.zeros((len(sets), vocabulary), dtype=np.bool_)
    for row, (is_mask, key) in zip(allowed, sets, strict=True):
        if is_mask:
            row[:] = _unpacked(key, vocabulary)
        else:
            row[unpack_i32(key) if key else slice(None)] = True
    return torch.from_numpy(allowed), numbers
