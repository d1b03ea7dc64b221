"""Logprobs and entropies in chunks: the numbers of one plain softmax, in far less memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.errors import UsageError
from headrace.services.models.lora import adapter_tensors, attach
from headrace.services.models.output_head import ChosenHidden, Head
from headrace.trainer.collate import collate
from headrace.trainer.forward.token_logprobs import token_logprobs
from tests.bench.head import one_softmax as plain
from tests.unit.trainer.test_learner import ACTIONS, OPEN, learner, sequence

VOCABULARY = 258
CPU = torch.device("cpu")
LOGITS = Head(torch.clone, VOCABULARY)
"""A head whose hidden states are the logits."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def loss_of(pair: tuple[Tensor, Tensor]) -> Tensor:
    """Depends on each logprob and entropy in its own way."""
    logprobs, entropies = pair
    return (logprobs * random(len(logprobs), seed=8)).sum() + (entropies**2).sum()


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_those_of_one_softmax(chunk: int, bias: bool) -> None:
    """With mixed temperatures and masks, and a head that also scales and caps its logits."""
    inputs = collate([sequence(0, 5), sequence(1, 4, OPEN), sequence(2, 2)], VOCABULARY, CPU)
    layer = nn.Linear(32, VOCABULARY, bias=bias)
    nn.init.normal_(layer.weight, std=0.5)

    def capped(logits: Tensor) -> Tensor:
        return torch.tanh(logits / 5) * 5 / 1.5

    def gradients(compute: Callable[[Tensor], tuple[Tensor, Tensor]]) -> list[Tensor]:
        hidden = random(11, 32).requires_grad_()
        pair = compute(hidden)
        found = torch.autograd.grad(loss_of(pair), (hidden, *layer.parameters()))
        return [*(one.detach() for one in pair), *found]

    learned = list(layer.parameters())
    head = Head(layer, VOCABULARY, learned, capped, linear=not bias)
    expected = gradients(lambda hidden: plain(capped(layer(hidden)), inputs))
    found = gradients(lambda hidden: token_logprobs(hidden, inputs, head, chunk))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_forbidden_id_gets_no_gradient() -> None:
    inputs = collate([sequence(0)], VOCABULARY, CPU)
    logits = random(3, VOCABULARY).requires_grad_()
    [gradient] = torch.autograd.grad(loss_of(token_logprobs(logits, inputs, LOGITS)), logits)
    assert torch.isfinite(gradient).all()
    assert set(gradient.any(dim=0).nonzero().flatten().tolist()) == set(ACTIONS)


def test_the_entropys_gradient_is_that_of_its_closed_form() -> None:
    """dH / d logit = -p (log p + H) / temperature on what is allowed, and 0 elsewhere."""
    inputs = collate([sequence(0, 2), sequence(1, 1, OPEN)], VOCABULARY, CPU)
    logits = (3 * random(3, VOCABULARY)).requires_grad_()

    [gradient] = torch.autograd.grad(token_logprobs(logits, inputs, LOGITS)[1].sum(), logits)

    assert inputs.allowed is not None
    for row, temperature in enumerate([0.5, 0.5, 1.0]):
        allowed = inputs.allowed[inputs.allowed_set[row]]
        p = (logits.detach()[row, allowed] / temperature).softmax(-1)
        spread = -(p * p.log()).sum()
        expected = -p * (p.log() + spread) / temperature
        torch.testing.assert_close(gradient[row, allowed], expected, rtol=1e-4, atol=1e-6)
        assert not gradient[row, ~allowed].any()


def test_a_bfloat16_heads_gradient_is_added_up_in_float32() -> None:
    """In bfloat16, the sum over 256 chunks would lose most of its later parts."""
    tokens = 256
    inputs = collate([sequence(0, tokens, OPEN)], VOCABULARY, CPU)
    weight = random(VOCABULARY, 16).bfloat16()
    hidden = random(1, 16, seed=1).bfloat16().expand(tokens, 16)

    def gradient(dtype: torch.dtype, linear: bool) -> Tensor:
        layer = nn.Linear(16, VOCABULARY, bias=False)
        layer.weight.data = weight.to(dtype)
        head = Head(layer, VOCABULARY, [layer.weight], linear=linear)
        logprobs, _ = token_logprobs(hidden.to(dtype), inputs, head, chunk=1)
        [found] = torch.autograd.grad(logprobs.sum(), layer.weight)
        return found.float()

    exact = gradient(torch.float32, True)
    for linear in (False, True):
        error = (gradient(torch.bfloat16, linear) - exact).norm() / exact.norm()
        assert error < 0.01


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the number of elements of the largest tensor that torch makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple) else (made,):
            if isinstance(one, Tensor):
                self.elements = max(self.elements, one.numel())
        return made


def test_no_tensor_has_the_logits_of_all_tokens() -> None:
    tokens, chunk = 400, 20
    inputs = collate([sequence(0, tokens)], VOCABULARY, CPU)
    layer = nn.Linear(8, VOCABULARY, bias=False)
    head = Head(layer, VOCABULARY, [layer.weight], linear=True)
    with LargestTensor() as largest:  # type: ignore[no-untyped-call]
        hidden = random(tokens, 8).requires_grad_()
        loss_of(token_logprobs(hidden, inputs, head, chunk)).backward()  # type: ignore[no-untyped-call]
    assert largest.elements == chunk * VOCABULARY


def configured(folder: Path, **changes: Any) -> Any:
    tree = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 258,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(tree | changes))
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    return make(AutoConfig.from_pretrained(folder)).eval()


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gemma2", "final_logit_softcapping": 0.3},
        {"model_type": "granite", "logits_scaling": 8.0, "tie_word_embeddings": True},
        {"model_type": "cohere", "logit_scale": 0.5},
        {"model_type": "phi"},  # Its head has a bias.
    ],
    ids=lambda changes: changes["model_type"],
)
def test_what_models_do_to_their_logits_is_done(changes: dict[str, Any], tmp_path: Path) -> None:
    model = configured(tmp_path, **changes)
    head = model.get_output_embeddings()
    nn.init.normal_(head.weight, std=0.5)
    if head.bias is not None:
        nn.init.normal_(head.bias)
    inputs = collate([sequence(0, 4), sequence(1, 2, OPEN)], VOCABULARY, CPU)

    logits = model(inputs.ids).logits[inputs.rows, inputs.before]
    expected = plain(logits, inputs)
    wanted = torch.autograd.grad(loss_of(expected), list(model.parameters()), allow_unused=True)
    hidden_at = ChosenHidden(model)
    hidden = hidden_at(inputs.rows, inputs.before, input_ids=inputs.ids)
    found = token_logprobs(hidden, inputs, hidden_at.head, 2)
    gradients = torch.autograd.grad(loss_of(found), list(model.parameters()), allow_unused=True)

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-5)


def test_an_adapter_of_the_head_learns(tmp_path: Path) -> None:
    model = configured(tmp_path, model_type="llama").requires_grad_(False)
    attach(model, ["lm_head"], 4, 8.0, torch.float32)
    adapter = list(adapter_tensors(model).values())
    for seed, tensor in enumerate(adapter):
        tensor.data = random(*tensor.shape, seed=seed)
    inputs = collate([sequence(0, 4)], VOCABULARY, CPU)

    expected = plain(model(inputs.ids).logits[inputs.rows, inputs.before], inputs)
    wanted = torch.autograd.grad(loss_of(expected), adapter)
    hidden_at = ChosenHidden(model)
    hidden = hidden_at(inputs.rows, inputs.before, input_ids=inputs.ids)
    found = token_logprobs(hidden, inputs, hidden_at.head, 3)

    torch.testing.assert_close(
        torch.autograd.grad(loss_of(found), adapter), wanted, rtol=1e-4, atol=1e-4
    )


def test_a_model_that_changes_its_logits_in_another_way_is_refused(tmp_path: Path) -> None:
    model = configured(tmp_path, model_type="llama")

    def halve(module: Any, inputs: Any, output: Any) -> Any:
        output.logits = output.logits / 2
        return output

    model.register_forward_hook(halve)
    with pytest.raises(UsageError, match="LlamaForCausalLM changes its logits"):
        ChosenHidden(model)


def test_the_logits_of_a_whole_forward_pass_are_not_needed() -> None:
    """The head is the widest layer: the model's own call of it gets no tokens."""
    one = learner()
    widths: list[int] = []
    one._model.lm_head.register_forward_hook(
        lambda module, hidden, logits: widths.append(logits.numel() // VOCABULARY)
    )
    ids = torch.zeros((1, 9), dtype=torch.int64)
    one._forward._hidden_at(ids[0, :1], ids[0, :1], input_ids=ids)
    assert widths == [0]
