"""The critic in the learner: its gradients, and what depends on it and what does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file
from torch import Tensor

from headrace.errors import HeadraceError, UsageError
from headrace.schemas.recipe.learning.critic_settings import CriticSettings
from headrace.schemas.recipe.policy import Policy
from headrace.services.models.weights import model_folder
from headrace.trainer.critic.critic import Critic, value_terms
from headrace.trainer.learner import Learner
from headrace.trainer.metrics.training_metrics import Totals
from headrace.trainer.model_loading import load_model
from headrace.trainer.sequences import TokenSequence, UnusableBatch
from tests.tiers import first_in_every_change
from tests.unit.trainer.test_estimates import reference
from tests.unit.trainer.test_learner import (
    ACTIONS,
    COLD,
    demonstrated,
    fail_halfway,
    limit_memory,
    sequence,
    state,
    update,
)

FOLDER = model_folder("tiny-llama")
TURNS = 3


def learner(critic: dict[str, Any] | None = None, **changes: Any) -> Learner:
    training = {"learning_rate": 1e-2, "device": "cpu", "critic": critic or {}}
    tree = {"model": "tiny-llama", "groups": {"advantage": "rewards"}, **changes}
    tree["training"] = training | changes.get("training", {})
    return Learner(FOLDER, Policy.model_validate(tree))


def rewarded(seed: int, turns: int = 3, **fields: Any) -> TokenSequence:
    """Turns of one drawn token, each with a reward."""
    one = sequence(seed, turns)
    [(sampling, _)] = one.samplings
    rewards = np.random.default_rng(seed).normal(size=turns).astype(np.float32)
    return replace(
        one,
        samplings=((sampling, 1),) * turns,
        turns=tuple(range(turns)),
        rewards=rewards,
        advantages=np.ones(turns, dtype=np.float32),
        **{"sample": seed, **fields},
    )


def batch(count: int = 6) -> list[TokenSequence]:
    return [rewarded(seed, 1 + seed % 4) for seed in range(count)]


def taught() -> TokenSequence:
    """A demonstrated sequence."""
    return demonstrated(rewarded(50))


def with_values(one: Learner) -> Learner:
    """The same learner, whose head is not 0 any more."""
    random = torch.Generator().manual_seed(1)
    critic = one._critic
    assert critic is not None
    critic._weights.data = torch.randn(critic._weights.shape, generator=random)
    return one


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_value_loss_is_that_of_a_plain_reference(clip: float | None) -> None:
    random = np.random.default_rng(0)
    new, old, returns = random.normal(size=(3, 200))
    terms = []
    for value, before, target in zip(new, old, returns, strict=True):
        squares = [(value - target) ** 2]
        if clip is not None:
            squares.append((before + min(max(value - before, -clip), clip) - target) ** 2)
        terms.append(max(squares) / 2)
    before, targets = torch.from_numpy(old), torch.from_numpy(returns)
    leaf = torch.from_numpy(new).requires_grad_()
    found = value_terms(leaf, before, targets, clip)
    np.testing.assert_allclose(found.detach().numpy(), terms, atol=1e-6)
    assert torch.autograd.gradcheck(lambda one: value_terms(one, before, targets, clip), leaf)


def gradients(one: Learner, sequences: list[TokenSequence], max_tokens: int) -> dict[str, Any]:
    """The gradients of an update, before any optimizer sees them."""
    critic, plan = one._critic, one._plan(update(*sequences), max_tokens)
    assert critic is not None
    one._note_start(plan, None, logprobs=False)
    critic.estimate([plan])
    for chosen, tokens in plan.micro_batches:
        one._backward(plan, one._forward.collate(chosen), tokens, None, Totals(one._loss))
    found = {name: master.grad for name, master in one._masters.by_name.items()}
    return found | {"critic": critic._weights.grad}


def plain_forward(model: Any, one: TokenSequence, head: Tensor) -> tuple[Tensor, Tensor]:
    """Logprobs and values [N] of a sequence's tokens, by the formulas."""
    output = model(torch.from_numpy(one.tokens)[None], output_hidden_states=True)
    hidden = output.hidden_states[-1][0, one.positions - 1]
    scores = torch.full_like(output.logits[0, one.positions - 1], -torch.inf)
    scores[:, ACTIONS] = output.logits[0, one.positions - 1][:, ACTIONS] / COLD.temperature
    targets = torch.from_numpy(one.tokens[one.positions])
    normal = hidden / hidden.square().mean(-1, keepdim=True).sqrt()
    values = normal @ head[:-1] / hidden.shape[-1] + head[-1]
    return scores.log_softmax(-1).gather(1, targets[:, None])[:, 0], values


def plain_gradients(
    sequences: list[TokenSequence], head: Tensor, coefficient: float
) -> dict[str, Tensor]:
    """The gradients of an update by the formulas, with discount 0.9 and lambdas 0.8 and 0.7."""
    model = load_model(FOLDER, 0).eval()
    forward = [plain_forward(model, one, head) for one in sequences]
    logprobs, values = (torch.cat(of) for of in zip(*forward, strict=True))
    steps = [
        (one.rewards.tolist(), of.tolist(), 0.9)
        for one, (_, of) in zip(sequences, forward, strict=True)
        if one.rewards is not None
    ]
    advantages = torch.tensor([a for one in steps for a in reference(*one, 0.8)])
    returns = torch.tensor([a for one in steps for a in reference(*one, 0.7)]) + values.detach()
    advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
    behaviour = torch.from_numpy(np.concatenate([one.behaviour for one in sequences]))
    importance = (logprobs.detach() - behaviour).exp().clamp(max=2)
    weights = torch.from_numpy(np.concatenate([one.advantages for one in sequences]))
    policy_loss = -(weights * importance * advantages * logprobs).mean()
    value_loss = (weights * (values - returns).square()).mean() / 2
    names, parameters = zip(*model.named_parameters(), strict=True)
    whole = policy_loss + coefficient * value_loss
    found = torch.autograd.grad(whole, parameters, retain_graph=True)
    [of_head] = torch.autograd.grad(value_loss, head)
    return {**dict(zip(names, found, strict=True)), "critic": of_head}


@pytest.mark.parametrize(("coefficient", "weight"), [(0.0, 1.0), (0.5, 1.0), (0.5, 0.25)])
def test_the_gradient_is_that_of_the_formulas_on_the_plain_model(
    coefficient: float, weight: float
) -> None:
    """Policy loss with advantages by GAE, and the value loss, one sequence at a time."""
    sequences = batch()
    sequences[2:4] = [replace(one, advantages=weight * one.advantages) for one in sequences[2:4]]
    options = {"discount": 0.9, "gae_lambda": 0.8, "value_lambda": 0.7, "coefficient": coefficient}
    for max_tokens in (4096, 8, 1):
        one = with_values(learner(options, training={"loss": "reinforce"}))
        assert one._critic is not None
        head = one._critic._weights.detach().clone().requires_grad_()
        expected = plain_gradients(sequences, head, coefficient)
        found = gradients(one, sequences, max_tokens)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6, msg=name)


def test_a_sample_counts_by_its_weight_for_the_head() -> None:
    """The gradient of the head by NumPy: w and b of V = w * x / H + b, with weighted squares."""
    one = with_values(learner({"discount": 0.9, "value_lambda": 0.7}))
    assert one._critic is not None
    head = one._critic._weights.detach().double().numpy()
    weights = (1.0, 0.25, 0.0625)
    sequences = [
        replace(rewarded(seed, 4), advantages=np.full(4, weight, dtype=np.float32))
        for seed, weight in enumerate(weights)
    ]
    model = load_model(FOLDER, 0).eval()
    expected = np.zeros_like(head)
    for sample, weight in zip(sequences, weights, strict=True):
        with torch.no_grad():
            output = model(torch.from_numpy(sample.tokens)[None], output_hidden_states=True)
        hidden = output.hidden_states[-1][0, sample.positions - 1].double().numpy()
        inputs = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True)) / hidden.shape[-1]
        values = inputs @ head[:-1] + head[-1]
        assert sample.rewards is not None
        advantages = reference(sample.rewards.tolist(), values.tolist(), 0.9, 0.7)
        errors = weight * -np.array(advantages) / 12
        expected += np.append(errors @ inputs, errors.sum())
    found = gradients(one, sequences, 4096)["critic"].numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)


def test_samples_and_turns_may_be_split_and_mixed() -> None:
    """Which sequence of a sample comes first changes nothing."""
    first, second = rewarded(1, 2, sample=0), replace(rewarded(2, 2, sample=0), turns=(2, 3))
    other = rewarded(3, 3, sample=1)
    whole = gradients(with_values(learner()), [first, second, other], 4096)
    mixed = gradients(with_values(learner()), [second, other, first], 4)
    for name, gradient in whole.items():
        torch.testing.assert_close(mixed[name], gradient, rtol=1e-3, atol=1e-6)
    apart = [first, replace(second, sample=2), other]
    assert not torch.allclose(
        gradients(with_values(learner()), apart, 4096)["critic"], whole["critic"]
    )


def test_metrics_do_not_depend_on_micro_batches_and_padding() -> None:
    found = []
    for max_tokens in (4096, 20, 1):
        one = learner(training={"max_tokens": max_tokens, "minibatches": 2, "epochs": 2})
        sequences = [
            *batch(9),
            replace(
                demonstrated(sequence(50)), sample=9, turns=(0,), rewards=np.zeros(3, np.float32)
            ),
        ]
        one.train([update(*batch(4))])
        found.append(one.train([update(*sequences[:5]), update(*sequences[5:])]))
    for name in ("value_loss", "value_mean", "explained_variance", "critic_grad_norm", "grad_norm"):
        assert found[1][name] == pytest.approx(found[0][name], rel=2e-3), name
        assert found[2][name] == pytest.approx(found[0][name], rel=2e-3), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_checkpoints_have_the_critic_and_published_weights_have_not(
    lora: dict[str, int] | None, dtype: str, tmp_path: Path
) -> None:
    tree = {"lora": lora, "dtype": dtype}
    one = learner({"warmup_updates": 1}, **tree)
    plain = Policy.model_validate({"model": "tiny-llama", **tree})
    names = load(Learner(FOLDER, plain).weights()).keys()
    for _ in range(3):
        one.train([update(*batch())])
    kept = state(one, tmp_path)
    again = learner({"warmup_updates": 1}, **tree)
    again.load(tmp_path / "state")
    (tmp_path / "again").mkdir()
    assert state(again, tmp_path / "again") == kept
    assert load(one.weights()).keys() == names
    assert load_file(tmp_path / "state")["critic.weights"].abs().max() > 0

    for each in (one, again):
        each.train([update(*batch(4))])
    assert again.weights() == one.weights()
    assert state(again, tmp_path) == state(one, tmp_path)


def test_a_checkpoint_without_a_critic_is_refused(tmp_path: Path) -> None:
    Learner(FOLDER, Policy(model="tiny-llama")).save(tmp_path / "state")
    with pytest.raises(UsageError, match="has no critic"):
        learner().load(tmp_path / "state")


def test_only_the_critic_learns_while_it_warms_up() -> None:
    """Updates of demonstrations don't count, and teach the policy."""
    one = learner({"warmup_updates": 2}, training={"warmup_updates": 2})
    before = one.weights()
    mixed = [*batch(), taught()]
    losses = [one.train([update(*mixed)])["value_loss"] for _ in range(2)]
    assert one.weights() == before
    assert losses[1] < losses[0]
    assert one.updates_done == 0
    one.train([update(*mixed)])
    assert one.weights() != before
    assert one.updates_done == 1
    assert one._optimizer.param_groups[0]["lr"] == 1e-2 / 2

    other = learner({"warmup_updates": 1})
    metrics = other.train([update(taught())])
    assert other.weights() != before
    assert "value_loss" not in metrics
    assert other._critic is not None
    assert other._critic.warming


def test_the_values_approach_the_returns_of_one_batch() -> None:
    """Also with a head alone, if the policy's weights stay as they are."""
    one = learner({"coefficient": 0.0, "warmup_updates": 1000})
    metrics = [one.train([update(*batch(12))]) for _ in range(60)]
    assert metrics[0]["value_mean"] == 0
    assert metrics[-1]["value_mean"] == pytest.approx(metrics[-1]["return_mean"], abs=0.1)
    assert metrics[-1]["explained_variance"] > 0.3


def test_advantages_are_rewards_to_come_minus_values_if_not_normalized() -> None:
    one = with_values(learner({"normalize": False}))
    plan = one._plan(update(*(sequences := batch())), 4096)
    one._note_start(plan, None, logprobs=False)
    assert one._critic is not None
    one._critic.estimate([plan])
    rewards = [single.rewards for single in sequences]
    to_come = np.concatenate([np.cumsum(of[::-1])[::-1] for of in rewards if of is not None])
    tokens = torch.arange(len(to_come))
    assert plan.values is not None
    expected = torch.from_numpy(to_come) - plan.values
    torch.testing.assert_close(plan.tokens(tokens, plan.values).advantages, expected)


def test_an_update_of_the_critic_is_undone_if_a_later_one_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = learner({"warmup_updates": 100}, training={"minibatches": 2})
    assert one._critic is not None
    kept, norms = state(one, tmp_path), iter([1.0, float("nan")])
    monkeypatch.setattr(one._critic, "clip_gradient", lambda _: torch.tensor(next(norms)))
    with pytest.raises(UnusableBatch, match="not finite"):
        one.train([update(*batch(2)), update(*batch(3))])
    assert one._critic._weights.grad is None
    assert state(one, tmp_path) == kept


def test_an_update_that_fails_after_the_critics_is_undone_or_ends_the_trainer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a single update no copy is left."""
    one = learner(training={"minibatches": 2})
    kept, weights = state(one, tmp_path), one.weights()
    fail_halfway(one, monkeypatch)
    parts = [update(rewarded(seed, sample=0)) for seed in range(2)]
    with pytest.raises(UnusableBatch, match="out of memory"):
        one.train(parts)
    assert (state(one, tmp_path), one.weights()) == (kept, weights)
    with pytest.raises(HeadraceError, match="continues from the newest checkpoint"):
        one.train(parts[:1])


def test_a_sample_that_does_not_fit_into_memory_leaves_the_others_as_they_would_be() -> None:
    small, whole = learner(), learner()
    limit_memory(small, 8)
    metrics = small.train([update(*batch(6), rewarded(9, 7))])
    expected = whole.train([update(*batch(6))])
    assert metrics["dropped_samples"] == 1
    assert metrics["memory_retries"] > 1
    for name in ("value_loss", "return_mean", "loss", "grad_norm", "critic_grad_norm"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name


def test_values_mean_the_same_for_every_width_and_scale() -> None:
    """An update moves a value by at most twice the learning rate."""
    for width in (8, 4096):
        critic = Critic(CriticSettings(), width, torch.device("cpu"), (0.9, 0.95))
        hidden = 1000 * torch.randn((1, width), generator=torch.Generator().manual_seed(0))
        loss = (critic.values(hidden) - 1).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        critic.step()
        moved = critic.values(hidden).item()
        assert 0.05 < moved <= 0.1 + 1e-6
        assert critic.values(hidden / 1e3).item() == pytest.approx(moved, rel=1e-4)


@pytest.mark.parametrize(
    ("groups", "critic", "match"),
    [
        ({"advantage": "grpo"}, {}, 'set groups.advantage = "rewards"'),
        ({"advantage": "my:own"}, {}, 'set groups.advantage = "rewards"'),
        ({"advantage": "rewards"}, None, "add the table `training.critic`"),
        (
            {"advantage": "rewards", "filters": ["zero_advantage"]},
            {},
            "drop every group without a reward",
        ),
        ({"advantage": "rewards"}, {"gae_lambda": 1.5}, "gae_lambda"),
        ({"advantage": "rewards"}, {"layers": 2}, "layers"),
    ],
)
def test_recipes_whose_critic_can_not_learn_are_refused(
    groups: dict[str, Any], critic: dict[str, Any] | None, match: str
) -> None:
    tree = {"model": "m", "groups": groups, "training": {"critic": critic}}
    with pytest.raises(ValueError, match=match):
        Policy.model_validate(tree)
    Policy.model_validate({**tree, "groups": {"advantage": "rewards"}, "training": False})


def play(one: Learner, random: np.random.Generator, samples: int) -> list[TokenSequence]:
    """Episodes of three turns, each of another task. A turn's reward is 1 for the right answer.

    The right answer to "a" is "L", to "b" it is "D", and so on.
    """
    questions = random.integers(0, len(ACTIONS), (samples, TURNS))
    tokens = np.zeros((samples, 2 * TURNS), dtype=np.int64)
    tokens[:, ::2] = 97 + questions
    answers, logprobs = np.zeros_like(questions), np.zeros(questions.shape, dtype=np.float32)
    for number in range(TURNS):
        with torch.no_grad():
            logits = one._model(torch.from_numpy(tokens[:, : 2 * number + 1])).logits
        of = logits[:, -1, ACTIONS].double().log_softmax(-1).numpy()
        answers[:, number] = [random.choice(len(ACTIONS), p=np.exp(row)) for row in of]
        logprobs[:, number] = of[np.arange(samples), answers[:, number]]
        tokens[:, 2 * number + 1] = np.array(ACTIONS)[answers[:, number]]
    plain = COLD.model_copy(update={"temperature": 1.0})
    return [
        replace(
            rewarded(sample, TURNS),
            tokens=tokens[sample],
            behaviour=logprobs[sample],
            samplings=((plain, 1),) * TURNS,
            rewards=(answers[sample] == questions[sample]).astype(np.float32),
        )
        for sample in range(samples)
    ]


@pytest.mark.parametrize("gae_lambda", first_in_every_change([0.5, 1.0]))
@pytest.mark.slow
def test_a_policy_learns_from_one_sample_of_each_task(gae_lambda: float) -> None:
    """The samples of a group could not be compared: there is only one."""
    one = learner({"gae_lambda": gae_lambda}, training={"learning_rate": 3e-3, "minibatches": 2})
    random = np.random.default_rng(0)
    rewards = []
    for _ in range(30):
        played = play(one, random, 64)
        rewards.append(float(np.mean([single.rewards for single in played])))
        metrics = one.train([update(*played[::2]), update(*played[1::2])])
    assert rewards[0] < 0.4
    assert rewards[-1] > 0.8
    assert metrics["value_mean"] > 1
