"""Attention of packed sequences: each token sees only the tokens before it in its own sequence.

No mask of all tokens by all tokens is made. Sequences are computed in blocks, each by a call of
torch's scaled dot-product attention: long ones alone, short ones together and padded for this call
only. On a GPU one call of FlashAttention's kernel for sequences of various lengths does it all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from headrace.services.models.even_rounding import WIDE_ATTENTION, wide_attention
from headrace.trainer.packing.layout import Layout, Piece
from headrace.trainer.packing.micro_batches import rows
from headrace.trainer.sequences import Ints

Attention = Callable[..., tuple[Tensor, None]]

AT_ONCE = 512
"""Maximum number of queries of a call for several sequences, and of a call with a mask. Such a mask
has one number for each of them and each key."""
KEYS_AT_ONCE = 1 << 15
"""Maximum number of keys of a call for several sequences."""
KEPT = 4
"""Maximum number of keys for each token that are kept for the backward pass. If shared beginnings
make more of them, they are gathered again."""
WIDEST = 256
"""The widest head that FlashAttention can compute."""


@dataclass(frozen=True, slots=True)
class Block:
    """S sequences that share equally many tokens, P, and at most n queries of each of them."""

    queries: slice | Tensor
    """The places of one sequence's queries, or [S, n] int64."""
    keys: slice | Tensor
    """The places of one sequence's keys, or [S, P + n] int64."""
    mask: Tensor | None
    """[1, 1, n, P + n] bool: which keys a query sees. None if P is 0: then it is the causal mask
    of torch."""
    own: Tensor | None
    """[M] int64: which of the S * n results are of queries. None if all are."""


@dataclass(frozen=True, slots=True)
class Varlen:
    """What FlashAttention needs to know of S sequences, each with its own queries and all keys."""

    keys: Tensor | None
    """[K] int64: the places of all keys. None if these are those of the queries."""
    cuts: tuple[Tensor, Tensor]
    """[S + 1] int32: where each sequence begins among queries and keys, and their numbers."""
    longest: tuple[int, int]
    """The most queries and keys of a sequence."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How the T tokens of a micro-batch belong together, on the model's device."""

    positions: Tensor
    """[1, T] int64: the position of each token in its sequence."""
    blocks: Sequence[Block]
    """In the order of the tokens."""
    varlen: Varlen
    shares: bool
    """Whether sequences share tokens."""
    gathers_again: bool
    """Whether there are more keys than `KEPT` allows."""

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> Packing:
        """Prepares the attention of a layout."""
        pieces = layout.pieces
        keys = sum(piece.first + piece.length for piece in pieces)
        return cls(
            positions=torch.from_numpy(layout.positions).unsqueeze(0).to(device),
            blocks=list(_blocks(layout, device)),
            varlen=_varlen(layout, device),
            shares=pieces[-1].first > 0,
            gathers_again=keys > KEPT * len(layout.ids),
        )


def _blocks(layout: Layout, device: torch.device) -> Iterator[Block]:
    shares = [piece for piece in layout.pieces if piece.first]
    last = max((piece.first + piece.length for piece in shares), default=0)
    # Masks end at the last query and the last key, so all of them are parts of this one.
    mask = torch.ones(AT_ONCE, last, dtype=torch.bool, device=device).tril(last - AT_ONCE)
    for shared, alike in groupby(layout.pieces, key=attrgetter("first")):
        pieces = list(alike)
        for chosen in rows([piece.length for piece in pieces], AT_ONCE):
            count = pieces[chosen[0]].length
            together = max(1, KEYS_AT_ONCE // (shared + count))
            for first in range(0, len(chosen), together):
                part = [pieces[index] for index in chosen[first : first + together]]
                longest = part[0].length
                step = AT_ONCE if shared and len(part) == 1 else longest
                for start in range(0, longest, step):
                    yield _block(layout, part, start, min(step, longest - start), mask)


def _block(layout: Layout, pieces: Sequence[Piece], start: int, count: int, mask: Tensor) -> Block:
    """Returns the block of `count` queries of each piece, from its query `start` on."""
    shared = pieces[0].first
    end = shared + start + count
    if len(pieces) == 1:
        places = layout.places[pieces[0].sequence][:end]
        first = int(places[end - count])
        queries = slice(first, first + count)
        if not shared:
            return Block(queries, queries, None, None)
        keys = torch.from_numpy(places).to(mask.device).unsqueeze(0)
        return Block(queries, keys, mask[None, None, AT_ONCE - count :, -end:], None)
    filled = np.zeros((len(pieces), end), dtype=np.int64)
    for row, piece in zip(filled, pieces, strict=True):
        row[: shared + piece.length] = layout.places[piece.sequence]
    there = np.arange(count) < np.array([[piece.length] for piece in pieces])
    found = torch.from_numpy(filled).to(mask.device)
    return Block(
        queries=found[:, shared:],
        keys=found,
        mask=mask[None, None, AT_ONCE - count :, -end:] if shared else None,
        own=None if there.all() else torch.from_numpy(np.flatnonzero(there)).to(mask.device),
    )


def _varlen(layout: Layout, device: torch.device) -> Varlen:
    counts = [piece.length for piece in layout.pieces]
    reads = [piece.first + piece.length for piece in layout.pieces]

    def cuts(lengths: Sequence[int]) -> Tensor:
        return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)

    keys: list[Ints] = [layout.places[piece.sequence] for piece in layout.pieces]
    return Varlen(
        keys=None if counts == reads else torch.from_numpy(np.concatenate(keys)).to(device),
        cuts=(cuts(counts), cuts(reads)),
        longest=(max(counts), max(reads)),
    )


def packed_attention(
    inner: Attention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    *,
    packing: Packing | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Returns the attention of packed sequences, or without `packing` what `inner` returns.

    Shapes and options are those of transformers' `sdpa`: query [1, H, T, D], key and value
    [1, G, T, D], result [1, T, H, D].
    """
    if packing is None:
        return inner(module, query, key, value, mask, **options)
    query, key, value = (one[0].transpose(0, 1) for one in (query, key, value))
    if packing.shares:
        # The gradients of what several sequences read are added up in float32.
        key, value = key.float(), value.float()
    if inner is sdpa_attention_forward and _flashes(query, value):
        run: Any = partial(_by_flash, packing.varlen, options.get("scaling"))
        result = _calls(run, packing.gathers_again)(query, key, value)
        return result.unsqueeze(0), None
    results = []
    for block in packing.blocks:
        run = partial(_by_block, partial(inner, module, **options), block)
        again = packing.gathers_again and block.mask is not None
        results.append(_calls(run, again)(query, key, value))
    return torch.cat(results).unsqueeze(0) if len(results) > 1 else results[0].unsqueeze(0), None


def _calls(run: Callable[..., Tensor], again: bool) -> Callable[..., Tensor]:
    """Returns `run`, or a function that runs it again in the backward pass, and keeps nothing."""
    if not again or not torch.is_grad_enabled():
        return run
    return partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)


def _by_block(
    attention: Attention, block: Block, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Returns the results [M, H, D] of a block, from query [T, H, D], key and value [T, G, D]."""
    chosen = (query[block.queries], *(one[block.keys].to(query.dtype) for one in (key, value)))
    batched = [(one if one.dim() == 4 else one.unsqueeze(0)).transpose(1, 2) for one in chosen]
    result = attention(*batched, block.mask)[0].flatten(0, 1)
    return result if block.own is None else result[block.own]


def _flashes(query: Tensor, value: Tensor) -> bool:
    """Whether torch's FlashAttention can compute it."""
    width = query.shape[-1]
    fits = width == value.shape[-1] <= WIDEST and width % 8 == 0
    return fits and query.is_cuda and query.dtype != torch.float32


def _by_flash(
    varlen: Varlen, scale: float | None, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Returns all results [T, H, D]. The kernel aligns the mask to the last query and key."""
    if varlen.keys is not None:
        key, value = key[varlen.keys], value[varlen.keys]
    read = (query, key.to(query.dtype), value.to(query.dtype), *varlen.cuts, *varlen.longest)
    found = varlen_attn(*read, scale=scale, window_size=(-1, 0), enable_gqa=True)
    assert isinstance(found, Tensor), "no log-sum-exp was asked for"
    return found


PACKED = {WIDE_ATTENTION: f"{WIDE_ATTENTION}_packed", "sdpa": "sdpa_packed"}
"""The name of the attention that packs, by that of the one it calls. Transformers makes no masks
for them, because none are registered."""

for _name, _inner in ((WIDE_ATTENTION, wide_attention), ("sdpa", sdpa_attention_forward)):
    AttentionInterface.register(PACKED[_name], partial(packed_attention, _inner))
