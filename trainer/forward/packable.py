"""Which models can read packed sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from headrace.errors import UsageError
from headrace.services.models.output_head import ChosenHidden
from headrace.trainer.forward.packed_attention import PACKED, Packing
from headrace.trainer.packing.layout import packed, padded
from headrace.trainer.ranks.ranks import ALONE, Ranks

TRIAL = ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 6, 5], [3, 2, 1])
"""Token ids of three sequences. Two of them begin alike."""
TOLERANCE = {torch.float32: 1e-4}
"""How much of the largest number two computations of one hidden state may differ, by dtype."""
COARSE = 0.05
"""The same for narrower dtypes, whose rounding hides more. So these are tried in float32, too."""


def learn_to_pack(
    model: Any, hidden_at: ChosenHidden, device: torch.device, ranks: Ranks = ALONE
) -> bool:
    """Lets a model read packed sequences, and returns whether it can.

    It can if every layer is attention to all earlier tokens, which transformers leaves to a
    function of ours, and if three short sequences get the same hidden states packed and padded, in
    the model's dtype as far as that can tell, and in float32.
    Windows, chunks and sparse attention are wider than those, so the configuration must not name
    any. All ranks must call it, and all can or none does.
    """
    own = model.config._attn_implementation
    if own not in PACKED or not _attends_to_all(model):
        return False
    tokens = [np.array(one, dtype=np.int64) for one in TRIAL]
    ids, places = padded(tokens)
    layout = packed(tokens, shared=4)
    packing = Packing.of(layout, device)

    def states(ids: Any, places: Any, **more: Any) -> Tensor:
        rows, columns = np.divmod(np.concatenate(places), ids.shape[1])
        chosen = (torch.from_numpy(one).to(device) for one in (rows, columns))
        read = torch.from_numpy(ids).to(device)
        with torch.no_grad():
            return hidden_at(*chosen, input_ids=read, use_cache=False, **more)

    def apart() -> tuple[float, torch.dtype]:
        """How much packed and padded differ, as a part of the largest number; and their dtype."""
        model.set_attn_implementation(own)
        expected = states(ids, places)
        model.set_attn_implementation(PACKED[own])
        found = states(layout.ids[None], layout.places, **more)
        return float((found - expected).abs().max() / expected.abs().max()), found.dtype

    more = {"position_ids": packing.positions, "packing": packing}
    try:
        differ, dtype = apart()
        able = differ <= TOLERANCE.get(dtype, COARSE)
        if dtype != torch.float32:  # Its rounding may hide that the model is not computed right.
            with _in_float32(model):
                able = apart()[0] <= TOLERANCE[torch.float32] and able
    except (TypeError, ValueError, RuntimeError):
        able = False  # It does not know positions, or what its attention is given.
    able = int(ranks.sum(torch.tensor(int(able), device=device))) == ranks.size
    if not able:
        model.set_attn_implementation(own)
    return able


def require_causal(model: Any, hidden_at: ChosenHidden, device: torch.device) -> None:
    """Raises UsageError if a token changes the hidden states of tokens before it.

    Some models of transformers compute attention by code of their own, which gets no causal mask
    from us: Bloom, for example. In a narrow dtype its rounding may hide that, so such a model is
    tried in float32, too. All ranks must call it.
    """
    ids = torch.tensor([[*range(1, 8), other] for other in (6, 7)], device=device)
    rows, columns = torch.arange(2, device=device).repeat_interleave(7), torch.arange(7).repeat(2)

    def apart() -> tuple[float, torch.dtype]:
        """How much the same tokens differ before another one, as a part of the largest number."""
        with torch.no_grad():
            found = hidden_at(rows, columns.to(device), input_ids=ids, use_cache=False)
        one, other = found.chunk(2)
        return float((one - other).abs().max() / found.abs().max()), found.dtype

    differ, dtype = apart()
    sees = differ > TOLERANCE.get(dtype, COARSE)
    if dtype != torch.float32:
        # A model that can't be computed so is judged by the first trial alone.
        with suppress(TypeError, ValueError, RuntimeError), _in_float32(model):
            sees = apart()[0] > TOLERANCE[torch.float32] or sees
    if sees:
        raise UsageError(
            f"a {type(model).__name__} can't be trained: in transformers its tokens see later "
            "ones, because its attention takes no mask of ours. Choose another model"
        )


@contextmanager
def _in_float32(model: Any) -> Iterator[None]:
    """Lets a narrow model compute in float32: each module widens its own weights while it runs.

    So the weights of one module at a time take more memory. Those of embedding and head stay
    narrow, because they are the largest: the results of the embedding are widened, and the head is
    called with no tokens.
    """
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    own: dict[nn.Module, dict[str, Any]] = {}

    def widen(module: nn.Module, unnamed: Any, named: Any) -> Any:
        own[module] = dict(module._parameters)
        module._parameters.update({name: _wide(one) for name, one in own[module].items()})
        return tree_map(_wide, (unnamed, named))

    def restore(module: nn.Module, _: Any, result: Any) -> None:
        module._parameters.update(own.pop(module, {}))

    handles: list[Any] = [
        ends[0].register_forward_hook(lambda *called: _wide(called[2])),
        ends[1].register_forward_pre_hook(lambda head, given: (given[0].to(head.weight.dtype),)),
    ]
    for module in model.modules():
        if module._parameters and module not in ends:
            handles.append(module.register_forward_pre_hook(widen, with_kwargs=True))
            handles.append(module.register_forward_hook(restore, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _wide(one: Any) -> Any:
    return one.float() if isinstance(one, Tensor) and one.is_floating_point() else one


def _attends_to_all(model: Any) -> bool:
    config = model.config.get_text_config()
    layers = getattr(config, "layer_types", None) or ()
    window = None if layers else getattr(config, "sliding_window", None)
    return (
        model._supports_attention_backend
        and not model._is_stateful
        and set(layers) <= {"full_attention"}
        and window is None
    )
