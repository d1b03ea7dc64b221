"""Divides a batch among ranks, as micro-batches that are packed without padding. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import UsageError
from headrace.schemas.events import Sampling
from headrace.trainer.contract.training_batch import SampleOrigin, TrainingBatch
from headrace.trainer.packing.micro_batches import divide
from headrace.trainer.sequences import Bools, Floats, Ints, TokenSequence

Cuts = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PackedMicroBatch:
    """S sequences one after the other: L tokens without padding.

    A token must see only the tokens before it in its own sequence. Every array of L has one entry
    for each token. What is about sampling is 0, False or -1 at tokens that are not trained.
    """

    tokens: Ints
    """[L] int64: token ids."""
    positions: Ints
    """[L] int64: the index of each token in its sequence, from 0."""
    segments: Ints
    """[L] int64: the index of each token's sequence in this micro-batch, from 0 to S - 1."""
    samples: Ints
    """[L] int64: the index of each token's sample in the batch, which `origins` explains."""
    loss_mask: Bools
    """[L] bool: whether the token is trained. It is predicted from the token before it, so the
    first token of a sequence never is."""
    demonstrated: Bools
    """[L] bool: whether a trained token was demonstrated instead of sampled. Its loss is the
    cross-entropy times its advantage."""
    logprobs: Floats
    """[L] float32: logprobs in nats by the engine that sampled the token, after temperature and
    masks; 0 if it was demonstrated."""
    advantages: Floats
    """[L] float32: advantage times the sample's weight; the weight alone if demonstrated."""
    rewards: Floats
    """[L] float32: the reward of the token's sample. NaN if it has none."""
    versions: Ints
    """[L] int64: the version that sampled the token; -1 for all other tokens."""
    teacher: Floats | None
    """[L] float32: logprobs in nats by the policy's teacher. None if it has no teacher."""
    samplings: tuple[Sampling, ...]
    """The distinct samplings: temperature, allowed ids and JSON schema."""
    sampling: Ints
    """[L] int64: the index of each trained token's sampling in `samplings`; -1 for all others."""
    origins: tuple[SampleOrigin, ...]
    """[S] the task, sample and attempt of each sequence."""

    @property
    def cu_seqlens(self) -> Cuts:
        """[S + 1] int32: where each sequence begins, and L. Attention kernels call it so."""
        counts = np.bincount(self.segments, minlength=len(self.origins))
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)

    @property
    def temperatures(self) -> Floats:
        """[L] float32: the sampling temperature of each trained token; 1 for all others."""
        table = np.array([*(one.temperature for one in self.samplings), 1.0], dtype=np.float32)
        return table[self.sampling]

    def allowed(self, vocabulary: int) -> Bools:
        """Returns [len(samplings), vocabulary] bool: the token ids that each sampling allows.

        The logits of other ids are minus infinity before a logprob is computed. Raises UsageError
        if a sampling has a JSON schema, whose masks depend on the tokens before.
        """
        table = np.ones((len(self.samplings), vocabulary), dtype=np.bool_)
        for row, sampling in zip(table, self.samplings, strict=True):
            if sampling.json_schema:
                raise UsageError(
                    "a token was sampled under a JSON schema, so its mask depends on the tokens "
                    "before it. Compute it from `samplings`, or let the agent send no schema"
                )
            if sampling.allowed:
                row[:] = False
                row[np.frombuffer(sampling.allowed, "<i4")] = True
        return table


def plan(batch: TrainingBatch, ranks: int, max_tokens: int) -> list[list[PackedMicroBatch]]:
    """Returns the micro-batches of each rank: [ranks][M], the same number M for all.

    A micro-batch has at most `max_tokens` tokens, unless a single sequence is longer. The
    micro-batches of one step, which all ranks train at the same time, have similar sizes. Some may
    be empty if there are few sequences: such a rank still takes part in what all ranks do together.
    The result follows from the arguments alone, so every rank may compute it. Raises UsageError if
    `ranks` or `max_tokens` is below 1.
    """
    if ranks < 1 or max_tokens < 1:
        raise UsageError(f"ranks is {ranks} and max_tokens is {max_tokens}: use at least 1")
    chosen = divide([len(one.tokens) for one in batch.sequences], ranks, max_tokens)
    return [
        [_packed(batch, [batch.sequences[index] for index in one]) for one in of_rank]
        for of_rank in chosen
    ]


def _packed(batch: TrainingBatch, sequences: Sequence[TokenSequence]) -> PackedMicroBatch:
    lengths = [len(one.tokens) for one in sequences]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(starts[-1])
    at = _joined([one.positions + start for one, start in zip(sequences, starts, strict=False)])
    origins = [batch.origins[one.sample] for one in sequences]
    rewards = [np.nan if one.reward is None else one.reward for one in origins]
    samplings, numbers = _samplings(sequences)
    taught = any(one.teacher is not None for one in sequences)

    def spread(values: Sequence[NDArray[Any]], empty: float, dtype: type) -> NDArray[Any]:
        found: NDArray[Any] = np.full(total, empty, dtype=dtype)
        if len(at):
            found[at] = np.concatenate(values)
        return found

    return PackedMicroBatch(
        tokens=_joined([one.tokens for one in sequences]),
        positions=_joined([np.arange(length) for length in lengths]),
        segments=np.repeat(np.arange(len(sequences)), lengths),
        samples=np.repeat(np.array([one.sample for one in sequences], dtype=np.int64), lengths),
        loss_mask=spread([np.ones(len(one.positions)) for one in sequences], 0, np.bool_),
        demonstrated=spread([one.demonstrated for one in sequences], 0, np.bool_),
        logprobs=spread([one.behaviour for one in sequences], 0, np.float32),
        advantages=spread([one.advantages for one in sequences], 0, np.float32),
        rewards=np.repeat(np.array(rewards, dtype=np.float32), lengths),
        versions=spread([one.versions for one in sequences], -1, np.int64),
        teacher=spread([one.teacher for one in sequences if one.teacher is not None], 0, np.float32)
        if taught
        else None,
        samplings=samplings,
        sampling=spread([numbers], -1, np.int64),
        origins=tuple(origins),
    )


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _samplings(sequences: Sequence[TokenSequence]) -> tuple[tuple[Sampling, ...], Ints]:
    """Returns the distinct samplings, and the index of each trained token's one."""
    known: dict[Sampling, int] = {}
    runs = [run for one in sequences for run in one.samplings]
    numbers = [known.setdefault(sampling, len(known)) for sampling, _ in runs]
    counts = [count for _, count in runs]
    return tuple(known), np.repeat(np.array(numbers, dtype=np.int64), counts)
