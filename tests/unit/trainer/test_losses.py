"""Each loss against a plain NumPy reference, its gradient, and any division into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.errors import UsageError
from headrace.schemas.events import Sampling
from headrace.schemas.recipe.tables import Choice
from headrace.trainer.losses.cispo_loss import CispoLoss
from headrace.trainer.losses.grpo_loss import GrpoLoss
from headrace.trainer.losses.load_loss import LOSSES, load_loss, try_loss
from headrace.trainer.losses.loss import FunctionLoss, Loss, MicroBatch, Reduction, token_weights
from headrace.trainer.losses.m2po_loss import M2poLoss
from headrace.trainer.losses.objective import STEEPEST, Objective, reference_kl
from headrace.trainer.metrics.training_metrics import Totals
from headrace.trainer.sequences import TokenSequence, UpdateBatch
from headrace.trainer.update_plan import UpdatePlan

CPU = torch.device("cpu")
Floats = NDArray[np.float64]
REFERENCE = -0.1
"""By how many nats version 0 finds each token likelier than the weights before the update do."""


def update_of(lengths: list[int], seed: int, lag: float = 0.3) -> tuple[UpdateBatch, Floats]:
    """An update with sequences of so many sampled tokens, and new logprobs for all of them."""
    random = np.random.default_rng(seed)
    sequences = [
        TokenSequence(
            tokens=np.arange(length + 1),
            positions=np.arange(1, length + 1),
            behaviour=-(3 * random.random(length) + 0.1).astype(np.float32),
            advantages=random.normal(size=length).astype(np.float32),
            versions=random.integers(0, 4, length),
            samplings=((Sampling(max_tokens=1), length),),
            demonstrated=np.zeros(length, dtype=np.bool_),
            sample=number,
            group=number // 2,
        )
        for number, length in enumerate(lengths)
    ]
    sequences = [
        replace(
            one,
            teacher=one.behaviour
            + np.float32(TEACHER) * np.arange(len(one.behaviour), dtype=np.float32),
        )
        for one in sequences
    ]
    behaviour = np.concatenate([one.behaviour for one in sequences]).astype(np.float64)
    return UpdateBatch(sequences, newest=3), behaviour + lag * random.normal(size=sum(lengths))


def evaluate(
    loss: Loss,
    update: UpdateBatch,
    proximal: Floats,
    new: Floats,
    micro_batches: list[list[int]] | None = None,
    totals: Totals | None = None,
) -> tuple[float, torch.Tensor]:
    """The reduced loss in float64, and its gradient by the new logprobs of the update's tokens."""
    count = len(update.sequences)
    plan = UpdatePlan(update, micro_batches or [list(range(count))], loss, CPU, read=0)
    plan._all = replace(plan._all, behaviour=plan._all.behaviour.double())
    plan.proximal = torch.from_numpy(proximal)
    plan.reference = torch.from_numpy(REFERENCE + proximal) if loss.needs_reference else None
    logprobs = torch.from_numpy(new)
    everything = torch.arange(len(new))
    prepared = loss.prepare(plan.tokens(everything, logprobs), logprobs) if loss.prepares else None
    value, gradient = 0.0, torch.zeros_like(logprobs)
    for _, tokens in plan.micro_batches:
        leaf = logprobs[tokens].requires_grad_()
        batch = plan.tokens(tokens, leaf.detach(), prepared)
        part = (plan.weights[tokens].double() * loss.terms(batch, leaf)).sum()
        [gradient[tokens]] = torch.autograd.grad(part, leaf)
        value += part.item()
        if totals is not None:
            found = Objective(part, part.detach(), gradient[tokens], None)
            totals.add(batch, found, leaf.detach(), torch.zeros(len(leaf)))
    return value, gradient


def reduced(terms: list[Floats], reduction: str, constant: int = 1024) -> float:
    """The three reductions, as the papers write them."""
    if reduction == "sequence":
        return float(np.mean([one.mean() for one in terms]))
    total = sum(float(one.sum()) for one in terms)
    if reduction == "constant":
        return total / len(terms) / constant
    return total / sum(len(one) for one in terms)


Reference = Callable[[Floats, Floats, Floats, Floats], Floats]
"""Maps behaviour, proximal, advantages and new logprobs of a sequence to its terms."""


def clip(ratio: Floats, advantage: Floats, low: float, high: float) -> Floats:
    return -np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


def numpy_grpo(b: Floats, p: Floats, a: Floats, n: Floats) -> Floats:
    return np.minimum(np.exp(p - b), 1.5) * clip(np.exp(n - p), a, 0.1, 0.3)


def numpy_gspo(b: Floats, p: Floats, a: Floats, n: Floats) -> Floats:
    return clip(np.exp(np.mean(n - b)) * np.ones_like(a), a, 0.05, 0.1)


def numpy_cispo(b: Floats, p: Floats, a: Floats, n: Floats) -> Floats:
    return -np.clip(np.exp(n - b), 0.8, 1.2) * a * n


def numpy_reinforce(b: Floats, p: Floats, a: Floats, n: Floats) -> Floats:
    return -np.minimum(np.exp(n - b), 1.2) * a * n


TEACHER = 0.3
"""How much more likely the teacher of these tests finds each token than the engine does, in
nats."""


def numpy_distill(b: Floats, p: Floats, a: Floats, n: Floats) -> Floats:
    teacher = b + TEACHER * np.arange(len(b))
    return -np.minimum(np.exp(n - b), 1.2) * (0.5 * np.clip(teacher - n, -1, 1) + 2 * a) * n


def numpy_icepop(b: Floats, p: Floats, a: Floats, n: Floats) -> Floats:
    k = np.exp(p - b)
    k[(k < 0.8) | (k > 1.25)] = 0
    return k * clip(np.exp(n - p), a, 0.1, 0.3)


CASES: list[tuple[str, dict[str, Any], str, Reference]] = [
    ("grpo", {"clip_low": 0.1, "clip_high": 0.3, "importance_cap": 1.5}, "token", numpy_grpo),
    ("dr_grpo", {"clip_low": 0.1, "clip_high": 0.3, "importance_cap": 1.5}, "constant", numpy_grpo),
    ("gspo", {"clip_low": 0.05, "clip_high": 0.1}, "sequence", numpy_gspo),
    ("cispo", {"clip_low": 0.2, "clip_high": 0.2}, "token", numpy_cispo),
    ("icepop", {"clip_low": 0.1, "clip_high": 0.3, "mask_low": 0.8, "mask_high": 1.25}, "token",
     numpy_icepop),
    ("reinforce", {"importance_cap": 1.2}, "token", numpy_reinforce),
    ("distill", {"coefficient": 0.5, "reward_coefficient": 2, "clip": 1, "importance_cap": 1.2},
     "token", numpy_distill),
]  # fmt: skip


@pytest.mark.parametrize("reduction", [None, "token", "sequence", "constant"])
@pytest.mark.parametrize(
    ("name", "options", "default", "formula"), CASES, ids=[c[0] for c in CASES]
)
def test_each_loss_is_its_formula_in_numpy(
    name: str, options: dict[str, Any], default: str, formula: Reference, reduction: str | None
) -> None:
    lengths = [3, 1, 7, 20, 9]
    update, proximal = update_of(lengths, seed=1)
    new = proximal + 0.2 * np.random.default_rng(2).normal(size=len(proximal))
    chosen = {} if reduction is None else {"reduction": reduction, "constant": 50}
    loss = load_loss({"use": name, **options, **chosen})
    ends = np.cumsum(lengths)[:-1]
    parts = [np.split(one, ends) for one in (proximal, new)]
    terms = [
        formula(one.behaviour.astype(np.float64), p, one.advantages.astype(np.float64), n)
        for one, p, n in zip(update.sequences, *parts, strict=True)
    ]

    value, _ = evaluate(loss, update, proximal, new)

    expected = reduced(terms, reduction or default, 1024 if reduction is None else 50)
    assert value == pytest.approx(expected, rel=1e-6, abs=1e-9)


def numpy_dpo(update: UpdateBatch, proximal: Floats, new: Floats, beta: float) -> tuple[Any, Any]:
    """The loss, and its gradient by the logprob of each sample, pair after pair."""
    ends = np.cumsum([len(one.behaviour) for one in update.sequences])[:-1]
    gains = np.array([part.sum() for part in np.split(new - (REFERENCE + proximal), ends)])
    means = [one.advantages.mean() for one in update.sequences]
    value, gradient = 0.0, np.zeros(len(gains))
    for group in {one.group for one in update.sequences}:
        members = [one.sample for one in update.sequences if one.group == group]
        pairs = [(w, i) for w in members for i in members if means[w] > means[i]]
        for won, lost in pairs:
            share = len(members) / len(gains) / len(pairs)
            margin = beta * (gains[won] - gains[lost])
            value += share * np.log1p(np.exp(-margin))
            gradient[won] -= share * beta / (1 + np.exp(margin))
            gradient[lost] += share * beta / (1 + np.exp(margin))
    return value, gradient


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=9),
    groups=st.lists(st.integers(0, 3), min_size=9, max_size=9),
    seed=st.integers(0, 99),
)
def test_dpo_prefers_the_better_sample_of_each_pair(
    lengths: list[int], groups: list[int], seed: int
) -> None:
    update, proximal = update_of(lengths, seed)
    numbered = zip(update.sequences, groups, strict=False)
    update = replace(update, sequences=[replace(one, group=group) for one, group in numbered])
    new = proximal + np.random.default_rng(seed).normal(size=len(proximal))

    value, gradient = evaluate(load_loss({"use": "dpo", "beta": 0.3}), update, proximal, new)

    expected, by_sample = numpy_dpo(update, proximal, new, 0.3)
    assert value == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert gradient.numpy() == pytest.approx(np.repeat(by_sample, lengths), rel=1e-6, abs=1e-9)


def test_dpo_refuses_a_reduction_that_would_not_be_dpo() -> None:
    with pytest.raises(UsageError, match="leave the option `reduction` out"):
        load_loss({"use": "dpo", "reduction": "token"})


def test_m2po_clips_what_moves_away_until_the_second_moment_of_the_update_is_low() -> None:
    update, new = update_of([5, 30, 12], seed=3, lag=0.4)
    behaviour = np.concatenate([one.behaviour for one in update.sequences]).astype(np.float64)
    advantages = np.concatenate([one.advantages for one in update.sequences]).astype(np.float64)
    log_ratio = new - behaviour
    away = log_ratio * advantages > 0
    low, high = 0.0, 10.0
    for _ in range(100):  # bisection
        bound = (low + high) / 2
        mean = np.minimum(log_ratio[away] ** 2, bound**2).mean()
        low, high = (bound, high) if mean <= 0.04 else (low, bound)
    clipped = away & (np.abs(log_ratio) > low)
    assert 0 < clipped.sum() < away.sum()

    value, gradient = evaluate(M2poLoss(), update, new, new)

    ratio = np.where(clipped, np.exp(np.sign(log_ratio) * low), np.exp(log_ratio))
    assert value == pytest.approx(-(ratio * advantages).mean(), rel=1e-6)
    assert (gradient == 0).numpy().tolist() == clipped.tolist()


def test_m2po_never_clips_ratios_within_its_options() -> None:
    """Here between 0.7 and 1.5, however small the moment."""
    update, new = update_of([5, 30, 12], seed=3, lag=0.4)
    behaviour = np.concatenate([one.behaviour for one in update.sequences]).astype(np.float64)
    advantages = np.concatenate([one.advantages for one in update.sequences]).astype(np.float64)

    loss = M2poLoss(threshold=1e-6, clip_low=0.3, clip_high=0.5)
    value, gradient = evaluate(loss, update, new, new)

    ratio = np.exp(new - behaviour)
    assert value == pytest.approx(clip(ratio, advantages, 0.3, 0.5).mean(), rel=1e-6)
    clipped = ((ratio > 1.5) & (advantages > 0)) | ((ratio < 0.7) & (advantages < 0))
    assert 0 < clipped.sum() < ((new - behaviour) * advantages > 0).sum()
    assert (gradient == 0).numpy().tolist() == clipped.tolist()


@pytest.mark.parametrize("lag", [0.5, 5.0, 50.0])
def test_m2po_never_clips_below_the_root_of_its_threshold(lag: float) -> None:
    update, new = update_of([5, 30, 12], seed=3, lag=lag)
    behaviour = np.concatenate([one.behaviour for one in update.sequences]).astype(np.float64)
    new[::4] = behaviour[::4] + 0.199 * np.sign(new[::4] - behaviour[::4])
    _, gradient = evaluate(M2poLoss(), update, new, new)
    near = np.abs(new - behaviour) < 0.2
    assert gradient.numpy()[near].all()
    assert (gradient == 0).any()


def test_m2po_clips_nothing_if_the_second_moment_is_low() -> None:
    update, new = update_of([5, 30, 12], seed=3, lag=0.05)
    _, gradient = evaluate(M2poLoss(), update, new, new)
    assert gradient.all()
    for one in update.sequences:
        one.advantages[:] = 0  # no token moves away
    assert evaluate(M2poLoss(), update, new + 1, new + 1)[0] == 0


def test_m2po_survives_ratios_that_overflow() -> None:
    update, new = update_of([4], seed=3, lag=0.0)
    update.sequences[0].advantages[:] = [1, 1, -1, -1]
    far = new + np.array([0.0, 800.0, 0.0, -800.0])
    value, gradient = evaluate(M2poLoss(), update, far, far)
    assert np.isfinite(value)
    assert gradient[[1, 3]].eq(0).all()
    far = new + np.array([0.0, -800.0, 800.0, 0.0])
    value, gradient = evaluate(M2poLoss(), update, far, far)
    assert np.isfinite(value)
    assert gradient.isfinite().all()


ALL: list[Choice] = [
    *LOSSES,
    {"use": "grpo", "reduction": "sequence"},
    {"use": "gspo", "clip_low": 0.1, "clip_high": 0.1, "reduction": "constant"},
]


@pytest.mark.parametrize("choice", ALL, ids=str)
@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
    seed=st.integers(0, 99),
)
def test_no_result_depends_on_how_sequences_fall_into_micro_batches(
    choice: Choice, lengths: list[int], order: Any, seed: int
) -> None:
    update, proximal = update_of(lengths, seed)
    new = proximal + 0.3 * np.random.default_rng(seed).normal(size=len(proximal))
    shuffled = list(range(len(lengths)))
    order.shuffle(shuffled)
    cut = order.randint(0, len(shuffled))
    divided = [part for part in (shuffled[:cut], shuffled[cut:]) if part]
    loss = load_loss(choice)
    whole, parts = Totals(loss), Totals(loss)

    value, gradient = evaluate(loss, update, proximal, new, totals=whole)
    again, same = evaluate(loss, update, proximal, new, divided, totals=parts)

    assert again == pytest.approx(value, rel=1e-6, abs=1e-9)
    torch.testing.assert_close(same, gradient, rtol=1e-6, atol=1e-12)
    assert parts.metrics() == pytest.approx(whole.metrics(), rel=1e-5, abs=1e-6)


CLIPPING: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}), ("dr_grpo", {}), ("gspo", {"clip_low": 0.02, "clip_high": 0.02}), ("cispo", {}),
    ("icepop", {"mask_low": 0.9, "mask_high": 1.1}), ("m2po", {"threshold": 0.02}),
    ("reinforce", {}), ("distill", {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), CLIPPING, ids=[one[0] for one in CLIPPING])
def test_the_clip_fraction_is_the_share_of_tokens_without_a_gradient(
    name: str, options: dict[str, Any]
) -> None:
    """Apart from tokens whose advantage is 0, which teach nothing anyway."""
    update, proximal = update_of([10, 3, 25, 1, 8], seed=7)
    update.sequences[0].advantages[:4] = 0.0
    new = proximal + 0.3 * np.random.default_rng(8).normal(size=len(proximal))
    loss = load_loss({"use": name, **options})
    totals = Totals(loss)
    _, gradient = evaluate(loss, update, proximal, new, totals=totals)

    metrics = totals.metrics()

    advantages = np.concatenate([one.advantages for one in update.sequences])
    without = ((gradient == 0).numpy() & (advantages != 0)).mean()
    assert metrics["clip_fraction"] == pytest.approx(without)
    assert (without > 0) == (name not in ("cispo", "reinforce", "distill"))
    both = metrics["clip_low_fraction"] + metrics["clip_high_fraction"]
    assert both == pytest.approx(metrics["clip_fraction"])


def test_the_clip_respects_the_sign_of_the_advantage() -> None:
    """Ratios 1.5, 0.5, 1.5, 0.5 with clip 0.2 below and 0.3 above; advantages +, -, -, +.

    The surrogates: min(1.5, 1.3), min(-0.5, -0.8), min(-1.5, -1.3), min(0.5, 0.8). The first is
    clipped from above, the second from below, and the others go back towards 1.
    """
    update, _ = update_of([4], seed=0)
    one = update.sequences[0]
    one.behaviour[:] = 0.0
    one.advantages[:] = [1, -1, -1, 1]
    loss = GrpoLoss(clip_low=0.2, clip_high=0.3)
    totals = Totals(loss)

    ratios = np.array([1.5, 0.5, 1.5, 0.5])
    value, gradient = evaluate(loss, update, np.zeros(4), np.log(ratios), totals=totals)

    assert value == pytest.approx(-(1.3 - 0.8 - 1.5 + 0.5) / 4)
    assert gradient.tolist() == pytest.approx([0.0, 0.0, 1.5 / 4, -0.5 / 4])
    metrics = totals.metrics()
    assert metrics["clip_low_fraction"] == metrics["clip_high_fraction"] == 0.25


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_weights_give_tokens_sequences_or_a_constant_the_same_say(lengths: list[int]) -> None:
    samples = range(len(lengths))
    assert token_weights(lengths, samples, "token", 7).sum() == pytest.approx(1)
    by_sequence = np.split(token_weights(lengths, samples, "sequence", 7), np.cumsum(lengths)[:-1])
    assert [one.sum() for one in by_sequence] == pytest.approx([1 / len(lengths)] * len(lengths))
    assert token_weights(lengths, samples, "constant", 7) == pytest.approx(1 / len(lengths) / 7)


@pytest.mark.parametrize("reduction", ["token", "sequence", "constant"])
def test_a_sample_of_many_sequences_weighs_as_much_as_one_of_a_single_one(
    reduction: Reduction,
) -> None:
    """An agent with sub-agents has no more say than one that does all in one conversation."""
    whole = token_weights([6, 4], [0, 1], reduction, 7)
    parts = token_weights([1, 4, 3, 2], [0, 1, 0, 0], reduction, 7)
    assert parts[[0, 5, 6, 7, 8, 9]] == pytest.approx(whole[:6])
    assert parts[1:5] == pytest.approx(whole[6:])


def test_the_indices_say_what_a_token_belongs_to() -> None:
    update, _ = update_of([2, 1, 3], seed=0)
    plan = UpdatePlan(update, [[2, 0], [1]], GrpoLoss(), CPU, read=0)
    [(_, tokens), _] = plan.micro_batches

    batch = plan.tokens(tokens, torch.zeros(5))

    assert batch.tokens.tolist() == [3, 4, 5, 0, 1]
    assert batch.sequences.tolist() == batch.samples.tolist() == batch.turns.tolist()
    assert batch.sequences.tolist() == [2, 2, 2, 0, 0]
    assert batch.groups.tolist() == [1, 1, 1, 0, 0]
    assert batch.lengths.tolist() == [3, 3, 3, 2, 2]
    assert batch.staleness.tolist() == (3 - batch.versions).tolist()
    values = torch.tensor([1.0, 2.0, 6.0, 1.0, 2.0])
    assert batch.sequence_mean(values).tolist() == [3.0, 3.0, 3.0, 1.5, 1.5]


def test_the_kl_divergence_from_the_reference_is_k3() -> None:
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    terms = reference_kl(new, torch.tensor([-1.5, -2.0]))
    assert terms.tolist() == pytest.approx([np.exp(-0.5) - 1 + 0.5, 0.0])
    [gradient] = torch.autograd.grad(terms.sum(), new)
    assert gradient.tolist() == pytest.approx([1 - np.exp(-0.5), 0.0])


@given(st.floats(-200, 200, width=32))
def test_the_kl_divergence_from_the_reference_is_finite_and_holds_on(difference: float) -> None:
    """Up to STEEPEST it is k3 exactly. Beyond it the gradient stays, and does not grow."""
    new = torch.tensor([0.0], requires_grad=True)
    [term] = reference_kl(new, torch.tensor([difference]))
    [gradient] = torch.autograd.grad(term, new)
    slope = np.exp(min(difference, STEEPEST)) - 1
    assert gradient.item() == pytest.approx(-slope, rel=1e-5, abs=1e-5)
    if difference <= STEEPEST:
        assert term.item() == pytest.approx(np.exp(difference) - 1 - difference, rel=1e-4, abs=1e-5)
    else:
        assert np.exp(STEEPEST) < term.item() < np.inf


def test_the_mean_gradient_of_the_divergence_is_that_of_the_other_direction() -> None:
    """Over all tokens, weighted by the new policy's probabilities."""
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([1.0, 0.5, -0.5, 0.0], dtype=torch.float64).log_softmax(0)
    new = logits.log_softmax(0)
    terms = reference_kl(new, reference)
    assert (new.exp() * terms).sum().item() == pytest.approx(
        (new.exp() * (new - reference)).sum().item()
    )
    [mean] = torch.autograd.grad((new.exp().detach() * terms).sum(), logits, retain_graph=True)
    [other] = torch.autograd.grad((reference.exp() * (reference - new)).sum(), logits)
    assert torch.allclose(mean, other)


def test_engine_and_trainer_are_compared_on_fresh_tokens_alone() -> None:
    update, _ = update_of([100, 100], seed=5)
    fresh, stale = update.sequences
    fresh.versions[:], stale.versions[:] = 3, 1
    proximal = np.concatenate([fresh.behaviour + 0.01, stale.behaviour + 1.0]).astype(np.float64)
    proximal[0] += 0.5
    totals = Totals(GrpoLoss())
    evaluate(GrpoLoss(), update, proximal, proximal, totals=totals)

    metrics = totals.metrics()

    assert metrics["engine_gap_mean"] == pytest.approx(0.015, rel=1e-3)
    assert metrics["engine_gap_p99"] == pytest.approx(0.01, rel=1e-3)
    assert metrics["engine_kl"] == pytest.approx(
        (np.exp(0.51) - 1.51 + 99 * 5.0e-5) / 100, rel=1e-2
    )
    weights = np.concatenate([np.exp([0.51] + [0.01] * 99), np.full(100, np.e)])
    assert metrics["effective_sample_size"] == pytest.approx(
        weights.sum() ** 2 / (200 * (weights**2).sum()), rel=1e-4
    )
    assert metrics["importance_truncated"] == 0.5
    assert metrics["importance_max"] == 2.0


def test_the_expected_gradient_of_distillation_is_that_of_the_reverse_kl() -> None:
    """Over all actions of one state, each weighed by the probability that the engine drew it."""
    random = np.random.default_rng(4)
    logits, behaviour, teacher = (torch.tensor(random.normal(size=6)) for _ in range(3))
    logits.requires_grad_()
    new = logits.log_softmax(-1)
    engine, known = behaviour.log_softmax(-1), teacher.log_softmax(-1)
    update, _ = update_of([6], seed=0)
    plan = UpdatePlan(update, [[0]], GrpoLoss(), CPU, read=0)
    batch = replace(plan.tokens(torch.arange(6), new), behaviour=engine, teacher=known)
    loss = load_loss({"use": "distill", "importance_cap": 1e9, "clip": 1e9})

    terms = loss.terms(batch, new)

    [found] = torch.autograd.grad((engine.exp() * terms).sum(), logits, retain_graph=True)
    divergence = (new.exp() * (new - known)).sum()
    [expected] = torch.autograd.grad(divergence, logits)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_the_divergence_from_the_teacher_is_measured() -> None:
    update, new = update_of([3, 2], seed=0)
    totals = Totals(GrpoLoss())
    evaluate(GrpoLoss(), update, new, new, totals=totals)
    assert totals.metrics()["teacher_kl"] == pytest.approx(-TEACHER * (0 + 1 + 2 + 0 + 1) / 5)


def test_the_weights_that_cispo_clips_are_counted() -> None:
    """They keep their gradient, so clip_fraction does not see them."""
    update, _ = update_of([100], seed=5)
    proximal = update.sequences[0].behaviour.astype(np.float64)
    proximal[:25] += 1.0
    loss = CispoLoss(clip_high=1.5)
    totals = Totals(loss)
    evaluate(loss, update, proximal, proximal, totals=totals)
    metrics = totals.metrics()
    assert (metrics["clip_fraction"], metrics["importance_truncated"]) == (0, 0.25)
    assert metrics["importance_max"] == 2.5


def own(batch: MicroBatch, logprobs: torch.Tensor) -> torch.Tensor:
    return -batch.advantages * logprobs


def scalar(batch: MicroBatch, logprobs: torch.Tensor) -> torch.Tensor:
    return own(batch, logprobs).sum()


def constant_loss(batch: MicroBatch, logprobs: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(logprobs.detach())


class OwnLoss(Loss):
    """A loss of a user."""

    strength: float
    """How strong it is."""

    def terms(self, batch: MicroBatch, logprobs: torch.Tensor) -> torch.Tensor:
        """The terms."""
        return self.strength * own(batch, logprobs)


@pytest.mark.parametrize("choice", [*LOSSES, f"{__name__}:own"])
def test_a_loss_is_found_by_name_and_by_path_and_can_be_tried(choice: str) -> None:
    try_loss(choice)
    assert isinstance(load_loss(choice), Loss)


def test_options_go_to_a_users_class_and_the_reduction_to_a_users_function() -> None:
    mine = load_loss({"use": f"{__name__}:OwnLoss", "strength": 2.0})
    assert isinstance(mine, OwnLoss)
    assert mine.strength == 2.0
    function = load_loss({"use": f"{__name__}:own", "reduction": "sequence"})
    assert isinstance(function, FunctionLoss)
    assert function.reduction == "sequence"


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        ({"use": "gspo", "low": 0.1}, "'gspo': low: no such key. Its options are .*clip_low"),
        ({"use": "grpo", "clip_low": -1}, "loss 'grpo': clip_low: Input should be greater than 0"),
        ({"use": "grpo", "reduction": "mean"}, "reduction: Input should be 'token'"),
        ({"use": f"{__name__}:OwnLoss"}, "strength: Field required"),
        ({"use": f"{__name__}:own", "strength": 1.0}, "strength: no such key"),
        (f"{__name__}:scalar", r"it returned shape \(\) for 4 tokens"),
        (f"{__name__}:constant_loss", "no gradient"),
        (f"{__name__}:CPU", "neither a function nor a subclass"),
        ("ppg", "no loss 'ppg'"),
    ],
)  # fmt: skip
def test_an_unusable_loss_is_refused_with_what_is_wrong(choice: Choice, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        try_loss(choice)
