"""The losses give the same loss and gradient as those of TRL's trainer on the same tensors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.schemas.events import Sampling
from headrace.schemas.recipe.policy import Training
from headrace.schemas.recipe.tables import Choice
from headrace.services.models.weights import model_folder
from headrace.trainer.losses.load_loss import load_loss
from headrace.trainer.losses.objective import objective
from headrace.trainer.sequences import TokenSequence, UpdateBatch
from headrace.trainer.update_plan import UpdatePlan

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

LENGTHS = [7, 2, 5, 9]
LONGEST = 12
KL = 0.3
CASES: list[tuple[dict[str, Any], Choice]] = [
    ({"loss_type": "dapo"}, "grpo"),
    ({"loss_type": "dapo", "epsilon_high": 0.28}, {"use": "grpo", "clip_high": 0.28}),
    ({"loss_type": "grpo"}, {"use": "grpo", "reduction": "sequence"}),
    # GRPO as published weighs no part of the KL divergence by the ratio.
    (
        {"loss_type": "grpo", "beta": KL, "use_bias_correction_kl": False},
        {"use": "grpo", "reduction": "sequence"},
    ),
    ({"loss_type": "dr_grpo"}, {"use": "dr_grpo", "constant": LONGEST}),
    (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05},
        {"use": "gspo", "clip_low": 0.05, "clip_high": 0.05},
    ),
    ({"loss_type": "cispo", "epsilon_high": 1.25}, {"use": "cispo", "clip_high": 0.25}),
]


@pytest.mark.parametrize(("theirs", "ours"), CASES, ids=str)
def test_loss_and_gradient_are_those_of_trl(
    theirs: dict[str, Any], ours: Choice, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    shape = (len(LENGTHS), LONGEST)
    old, new, reference = (-(3 * random.random((3, *shape)) + 0.1)).astype(np.float32)
    new = old + 0.3 * random.normal(size=shape).astype(np.float32)
    advantages = random.normal(size=len(LENGTHS)).astype(np.float32)
    mask = np.arange(LONGEST) < np.array(LENGTHS)[:, None]

    value, gradient = by_trl(tmp_path, theirs, old, new, reference, advantages, mask)
    kl = theirs.get("beta", 0.0)
    mine, own = by_us(ours, kl, old, new, reference, advantages)

    assert mine == pytest.approx(value, rel=1e-6, abs=1e-7)
    torch.testing.assert_close(own, gradient[torch.from_numpy(mask)], rtol=1e-5, atol=1e-7)


def test_dpo_is_that_of_trl(tmp_path: Path) -> None:
    """TRL gets chosen answers first: rows 0 and 1 are chosen over rows 2 and 3."""
    import trl
    from datasets import Dataset

    random = np.random.default_rng(0)
    shape = (len(LENGTHS), LONGEST)
    reference = (-(3 * random.random(shape)) - 0.1).astype(np.float32)
    new = reference + 0.3 * random.normal(size=shape).astype(np.float32)
    mask = np.arange(LONGEST) < np.array(LENGTHS)[:, None]
    config = trl.DPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", beta=KL
    )
    trainer: Any = trl.DPOTrainer(
        model=model_with_weights(tmp_path), args=config,
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "a", "rejected": "a"}]),
    )  # fmt: skip
    trainer.precompute_ref_logps = True
    leaf = torch.from_numpy(new.copy()).requires_grad_()
    seen, whole = (
        torch.from_numpy(mask),
        torch.from_numpy(np.pad(mask, ((0, 0), (1, 0))).astype(int)),
    )
    sums = torch.from_numpy(reference * mask).sum(dim=1)
    given = {
        "input_ids": torch.zeros_like(whole), "attention_mask": torch.ones_like(whole),
        "completion_mask": whole, "ref_chosen_logps": sums[:2], "ref_rejected_logps": sums[2:],
    }  # fmt: skip
    nothing = torch.zeros_like(leaf)
    outputs = SimpleNamespace(
        log_probs=leaf * seen, entropy=nothing, mean_logits=nothing, is_top1=seen
    )
    value = trainer._compute_loss(lambda **_: outputs, given, False)
    [gradient] = torch.autograd.grad(value, leaf)

    preferred = np.array([1.0, 1.0, -1.0, -1.0], dtype=np.float32)
    mine, own = by_us({"use": "dpo", "beta": KL}, KL, reference, new, reference, preferred)

    assert mine == pytest.approx(value.item(), rel=1e-6, abs=1e-7)
    torch.testing.assert_close(own, gradient[seen], rtol=1e-5, atol=1e-7)


def by_trl(
    folder: Path,
    options: dict[str, Any],
    old: Any,
    new: Any,
    reference: Any,
    advantages: Any,
    mask: Any,
) -> tuple[float, Tensor]:
    """Loss and gradient [B, L] by TRL, whose model returns `new`."""
    import trl
    from datasets import Dataset

    config = trl.GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to="none",
        num_generations=len(LENGTHS), per_device_train_batch_size=len(LENGTHS),
        per_device_eval_batch_size=len(LENGTHS), max_completion_length=LONGEST, **options,
    )  # fmt: skip
    trainer: Any = trl.GRPOTrainer(
        model=model_with_weights(folder), reward_funcs=lambda completions, **_: [0.0] * 4,
        args=config, train_dataset=Dataset.from_list([{"prompt": "a"}]),
    )  # fmt: skip
    trainer.model.eval()
    leaf = torch.from_numpy(new.copy()).requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        leaf,
        torch.zeros_like(leaf),
        None,
    )
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": ids[:, :1], "prompt_mask": torch.ones_like(ids[:, :1]),
            "completion_ids": ids, "completion_mask": torch.from_numpy(mask).long(),
            "advantages": torch.from_numpy(advantages),
            "old_per_token_logps": torch.from_numpy(old),
            "ref_per_token_logps": torch.from_numpy(reference),
            "num_items_in_batch": torch.tensor(float(mask.sum())),
        },
    )  # fmt: skip
    [gradient] = torch.autograd.grad(loss, leaf)
    return loss.item(), gradient


def model_with_weights(folder: Path) -> str:
    """A folder with random weights and a tokenizer, as TRL loads it."""
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    made, source = folder / "model", model_folder("tiny-llama")
    make: Any = AutoModelForCausalLM.from_config
    make(AutoConfig.from_pretrained(source)).save_pretrained(made)
    read: Any = PreTrainedTokenizerFast.from_pretrained
    tokenizer = read(source)
    tokenizer.pad_token = tokenizer.eos_token = "a"
    tokenizer.save_pretrained(made)
    return str(made)


def by_us(
    choice: Choice, kl: float, old: Any, new: Any, reference: Any, advantages: Any
) -> tuple[float, Tensor]:
    """Loss and gradient [T] by the objective of the learner."""
    loss = load_loss(choice)
    update = UpdateBatch(
        [
            TokenSequence(
                tokens=np.arange(length + 1),
                positions=np.arange(1, length + 1),
                behaviour=old[row, :length],
                advantages=np.full(length, advantages[row]),
                versions=np.zeros(length, dtype=np.int64),
                samplings=((Sampling(max_tokens=1), length),),
                demonstrated=np.zeros(length, dtype=np.bool_),
                sample=row,
                group=row % 2,
            )
            for row, length in enumerate(LENGTHS)
        ]
    )

    def flat(array: Any) -> Tensor:
        rows = [array[row, :length] for row, length in enumerate(LENGTHS)]
        return torch.from_numpy(np.concatenate(rows))

    plan = UpdatePlan(update, [range(len(LENGTHS))], loss, torch.device("cpu"), read=0)
    plan.proximal, plan.reference = flat(old), flat(reference) if kl else None
    leaf = flat(new).requires_grad_()
    [(_, tokens)] = plan.micro_batches
    batch = plan.tokens(tokens, leaf.detach())
    if loss.prepares:
        batch = plan.tokens(tokens, leaf.detach(), loss.prepare(batch, leaf.detach()))
        kl = 0.0
    part = objective(
        loss, Training(kl_coefficient=kl), batch, leaf, torch.zeros_like(leaf), plan.weights
    )
    [gradient] = torch.autograd.grad(part.differentiable, leaf)
    return part.value.item(), gradient
