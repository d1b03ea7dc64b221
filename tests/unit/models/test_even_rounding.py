"""Layers and attention that round alike, with the inputs that models give them."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from headrace.services.models.even_rounding import round_evenly, wide_attention
from headrace.trainer.ranks.ranks import Ranks

WIDTH = 64
LAYERS: dict[str, Any] = {
    "input": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "x": lambda: cast("Any", Conv1D)(WIDTH, WIDTH),
}
"""Kinds of layers, by the name of their argument."""


@pytest.fixture(params=list(LAYERS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def a_layer(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    return LAYERS[name]().to(dtype)


def rows_of(layer: Any, dtype: torch.dtype = torch.bfloat16) -> list[int]:
    """Calls a layer with one row: how many rows it multiplied."""
    seen: list[int] = []
    product = torch.addmm if isinstance(layer, Conv1D) else nn.functional.linear
    at = torch if isinstance(layer, Conv1D) else nn.functional

    def watched(*given: Tensor) -> Tensor:
        seen.append(len(given[1 if at is torch else 0]))
        return product(*given)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(at, product.__name__, watched)
        layer(torch.ones(1, WIDTH, dtype=dtype))
    return seen


def test_a_row_alone_has_the_result_that_it_has_among_others(name: str) -> None:
    layer = a_layer(name)
    round_evenly(layer)
    many = torch.randn(3, 7, WIDTH, dtype=torch.bfloat16)
    together = layer(many)
    assert together.shape == many.shape
    for one in range(3):
        for row in range(7):
            assert torch.equal(layer(many[one : one + 1, row : row + 1])[0, 0], together[one, row])
            assert torch.equal(layer(many[one, row]), together[one, row])


def test_the_argument_may_be_named(name: str) -> None:
    layer = a_layer(name)
    round_evenly(layer)
    for count in (0, 1, 5):
        rows = torch.randn(count, WIDTH, dtype=torch.bfloat16)
        assert torch.equal(layer(**{name: rows}), layer(rows))


def test_an_argument_that_the_layer_does_not_have_is_an_error(name: str) -> None:
    layer = a_layer(name)
    round_evenly(layer)
    with pytest.raises(TypeError, match="rows"):
        layer(rows=torch.ones(1, WIDTH, dtype=torch.bfloat16))


def test_a_layer_is_changed_once(name: str) -> None:
    layer = a_layer(name)
    round_evenly(layer)
    changed = layer.forward
    round_evenly(layer)
    assert layer.forward is changed
    assert rows_of(layer) == [2]


def test_float32_layers_stay_as_they_are(name: str) -> None:
    layer = a_layer(name, torch.float32)
    round_evenly(layer)
    assert "forward" not in vars(layer)


def test_layers_with_wider_weights_are_changed_if_they_compute_in_a_narrow_dtype(name: str) -> None:
    """As the layers of a model in several processes, whose weights are shards in float32."""
    layer = a_layer(name, torch.float32)
    round_evenly(layer, torch.bfloat16)
    assert rows_of(layer.bfloat16()) == [2]


def test_a_sharded_model_is_changed_for_the_dtype_in_which_it_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Ranks, "several", True)
    torch.distributed.init_process_group(
        "gloo", store=cast("Any", torch.distributed).HashStore(), rank=0, world_size=1
    )
    try:
        for dtype, rows in ((torch.bfloat16, [2]), (torch.float32, [1])):
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
            setattr(model, "_no_split_modules", ["Linear"])  # noqa: B010  (nn.Module has no type)
            Ranks().shard(model, dtype, torch.device("cpu"))
            assert rows_of(model, dtype) == rows
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_may_have_an_empty_batch(dtype: torch.dtype, masked: bool) -> None:
    query, key = torch.ones(0, 4, 3, 16, dtype=dtype), torch.ones(0, 2, 5, 16, dtype=dtype)
    mask = torch.ones(0, 1, 3, 5, dtype=torch.bool) if masked else None
    module: Any = nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    result, _ = wide_attention(module, query, key, key, mask)
    assert result.shape == (0, 3, 4, 16)
    assert result.dtype == dtype
