"""Which models can read packed sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.services.models.output_head import ChosenHidden
from headrace.trainer.forward.packed_attention import PACKED, Packing
from headrace.trainer.packing.layout import packed, padded

TRIAL = ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 6, 5], [3, 2, 1])
"""Token ids of three sequences. Two of them begin alike."""
TOLERANCE = {torch.float32: 1e-4}
"""How much of the largest number two computations of one hidden state may differ, by dtype."""
COARSE = 0.05
"""The same for narrower dtypes."""


def learn_to_pack(model: Any, hidden_at: ChosenHidden, device: torch.device) -> bool:
    """Lets a model read packed sequences, and returns whether it can.

    It can if every layer is attention to all earlier tokens, which transformers leaves to a
    function of ours, and if three short sequences get the same hidden states packed and padded.
    Windows, chunks and sparse attention are wider than those, so the configuration must not name
    any. All ranks must call it.
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

    expected = states(ids, places)
    model.set_attn_implementation(PACKED[own])
    more = {"position_ids": packing.positions, "packing": packing}
    try:
        found = states(layout.ids[None], layout.places, **more)
        most = TOLERANCE.get(found.dtype, COARSE) * expected.abs().max()
        if bool((found - expected).abs().max() <= most):
            return True
    except (TypeError, ValueError, RuntimeError):
        pass  # It does not know positions, or what its attention is given.
    model.set_attn_implementation(own)
    return False


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
