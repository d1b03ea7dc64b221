"""The learner: what a batch does to the weights, and what it does not."""

from __future__ import annotations

import json
import pickle
import resource
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from headrace.errors import HeadraceError, UsageError
from headrace.schemas.events import Sampling
from headrace.schemas.packed import pack_i32
from headrace.schemas.recipe.policy import Policy, Training
from headrace.services.models.json_schema import GrammarState, Schemas
from headrace.services.models.weights import ADAPTER, model_folder, weights_digest
from headrace.trainer.collate import collate
from headrace.trainer.learner import Learner
from headrace.trainer.losses.load_loss import load_loss
from headrace.trainer.losses.loss import Loss, MicroBatch
from headrace.trainer.model_loading import load_model, position_limit
from headrace.trainer.sequences import Stopped, TokenSequence, UnusableBatch, UpdateBatch

FOLDER = model_folder("tiny-llama")
ACTIONS = list(b"LDRU")
COLD = Sampling(max_tokens=1, temperature=0.5, allowed=pack_i32(ACTIONS))
OPEN = Sampling(max_tokens=1)


def sequence(seed: int, turns: int = 3, sampling: Sampling = COLD) -> TokenSequence:
    """Turns of one token of context and one drawn token."""
    random = np.random.default_rng(seed)
    tokens = random.integers(97, 113, 2 * turns)
    tokens[1::2] = random.choice(ACTIONS, turns)
    return TokenSequence(
        tokens=tokens,
        positions=np.arange(1, 2 * turns, 2),
        behaviour=np.full(turns, np.log(0.25), dtype=np.float32),
        advantages=random.normal(size=turns).astype(np.float32),
        versions=np.zeros(turns, dtype=np.int64),
        samplings=((sampling, turns),),
        demonstrated=np.zeros(turns, dtype=np.bool_),
    )


def update(*sequences: TokenSequence) -> UpdateBatch:
    return UpdateBatch(sequences)


def learner(**training: Any) -> Learner:
    settings = {"learning_rate": 1e-2, "device": "cpu", **training}
    return Learner(FOLDER, Policy.model_validate({"model": "tiny-llama", "training": settings}))


def state(one: Learner, tmp_path: Path) -> bytes:
    """All that training continues from."""
    one.save(tmp_path / "state")
    return weights_digest(tmp_path / "state")


def infinite_loss(batch: MicroBatch, logprobs: torch.Tensor) -> torch.Tensor:
    """Diverges on batches of a negative first advantage; else learns."""
    loss = -logprobs * batch.advantages
    return loss / 0 if batch.advantages[0] < 0 else loss


def exhausting_loss(batch: MicroBatch, logprobs: torch.Tensor) -> torch.Tensor:
    """Wants more memory than there is."""
    return logprobs * torch.empty(2**60).sum()


def test_version_0_follows_from_the_seed() -> None:
    first, again = learner().weights(), learner().weights()
    other = Learner(FOLDER, Policy(model="tiny-llama", seed=1)).weights()
    assert first == again
    assert weights_digest(first) != weights_digest(other)


def test_weights_beside_the_configuration_are_version_0(tmp_path: Path) -> None:
    weights = Learner(FOLDER, Policy(model="tiny-llama", seed=5)).weights()
    for file in FOLDER.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(weights)
    loaded = Learner(tmp_path, Policy(model=str(tmp_path), seed=0)).weights()
    assert weights_digest(loaded) == weights_digest(weights)


@pytest.mark.parametrize("damage", ["cut", "empty", "pickle", "lacking", "misshapen"])
def test_weights_that_are_not_whole_are_refused(damage: str, tmp_path: Path) -> None:
    weights = Learner(FOLDER, Policy(model="tiny-llama")).weights()
    tensors = load(weights)
    name = next(iter(tensors))
    match damage:
        case "cut":
            weights = weights[:-100]
        case "empty":
            weights = b""
        case "pickle":
            weights = pickle.dumps(tensors)
        case "lacking":
            weights = save({other: one for other, one in tensors.items() if other != name})
        case "misshapen":
            weights = save({**tensors, name: tensors[name][:1].clone()})
    for file in FOLDER.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(weights)

    with pytest.raises(UsageError, match="can't be loaded"):
        load_model(tmp_path, 0)


def test_published_weights_have_the_policys_dtype_and_fit_the_model() -> None:
    one = Learner(FOLDER, Policy(model="tiny-llama", dtype="bfloat16"))
    assert one.train([update(sequence(0), sequence(1))])["tokens"] == 6
    tensors = load(one.weights())
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert set(tensors) == set(load_model(FOLDER, 0).state_dict())


def test_the_logprobs_are_those_of_the_whole_model_by_temperature_and_mask() -> None:
    """Padding, chosen positions and mixed samplings give what one plain forward each gives."""
    model = load_model(FOLDER, 0).eval()
    sequences = [sequence(0, 5), sequence(1, 2, OPEN), sequence(2, 1)]
    one = learner()
    inputs = collate(sequences, one.vocabulary, torch.device("cpu"))
    logprobs, entropies = one._forward.logprobs(inputs)

    expected, entropy = [], []
    for single in sequences:
        logits = model(torch.from_numpy(single.tokens)[None]).logits[0]
        [(sampling, _)] = single.samplings
        for position in single.positions:
            scores = logits[position - 1] / sampling.temperature
            if sampling.allowed:
                kept = torch.full_like(scores, -torch.inf)
                kept[ACTIONS] = scores[ACTIONS]
                scores = kept
            probabilities = scores.softmax(-1)
            expected.append(probabilities[single.tokens[position]].log())
            probabilities = probabilities[probabilities > 0]
            entropy.append(-(probabilities * probabilities.log()).sum())
    torch.testing.assert_close(logprobs, torch.stack(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropies, torch.stack(entropy), rtol=1e-4, atol=1e-5)


def test_the_bonus_alone_raises_the_entropy() -> None:
    """The later advantages are 0, so there is no other gradient."""
    one = learner(entropy_bonus=0.1)
    for _ in range(5):
        one.train([update(sequence(9))])
    equal = [sequence(seed) for seed in range(4)]
    for other in equal:
        other.advantages[:] = 0.0

    metrics = [one.train([update(*equal)]) for _ in range(5)]

    assert metrics[0]["loss"] == pytest.approx(-0.1 * metrics[0]["entropy"])
    assert metrics[-1]["entropy"] > metrics[0]["entropy"]


@pytest.mark.parametrize("bonus", [0.0, 0.05])
def test_how_tokens_fall_into_micro_batches_changes_only_rounding(bonus: float) -> None:
    batch = [update(*(sequence(seed, 1 + seed % 4) for seed in range(12)))]
    whole = learner(max_tokens=4096, entropy_bonus=bonus)
    cut = learner(max_tokens=8, entropy_bonus=bonus)
    one, many = whole.train(batch), cut.train(batch)
    for name, value in one.items():
        assert many[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    for name, tensor in load(whole.weights()).items():
        torch.testing.assert_close(load(cut.weights())[name], tensor, rtol=0.05, atol=2e-3)


def test_the_same_batches_give_the_same_weights_bit_by_bit(tmp_path: Path) -> None:
    batches = [[update(*(sequence(8 * n + i) for i in range(8)))] for n in range(3)]
    first, second = learner(), learner()
    for batch in batches:
        assert first.train(batch) == second.train(batch)
    assert first.weights() == second.weights()
    assert state(first, tmp_path) == state(second, tmp_path)


def test_training_makes_what_was_good_likelier() -> None:
    one = learner()
    tokens = np.array([97, ACTIONS[2]])
    good = TokenSequence(
        tokens,
        np.array([1]),
        np.array([np.log(0.25)], dtype=np.float32),
        np.array([1.0], dtype=np.float32),
        np.array([0]),
        ((Sampling(max_tokens=1, allowed=pack_i32(ACTIONS)), 1),),
        np.array([False]),
    )
    for _ in range(5):
        metrics = one.train([update(good)])
    inputs = collate([good], one.vocabulary, torch.device("cpu"))
    assert one._forward.logprobs(inputs)[0].exp().item() > 0.9
    assert metrics["importance_max"] == 2.0


def test_later_updates_are_held_to_the_policy_at_the_batchs_start() -> None:
    """The second update sees ratios other than 1, and clips; the first never does."""
    same = update(*(sequence(seed) for seed in range(8)))
    assert learner().train([same])["clip_fraction"] == 0
    for settings in ({"minibatches": 3}, {"epochs": 3}):
        updates = [same] * settings.get("minibatches", 1)
        assert learner(learning_rate=0.05, **settings).train(updates)["clip_fraction"] > 0


def test_a_version_records_the_learning_rate_of_its_last_update() -> None:
    one = learner(schedule="linear", total_updates=2)
    found = [one.train([update(sequence(seed))]) for seed in range(3)]
    assert [metrics["learning_rate"] for metrics in found] == pytest.approx([5e-3, 0, 0])
    before = one.weights()
    one.train([update(sequence(9))])
    assert one.weights() == before
    flat = replace(sequence(1), advantages=np.zeros_like(sequence(1).advantages))
    assert "learning_rate" not in one.train([update(flat)]), "no update had a gradient"


def test_warmup_raises_the_learning_rate_step_by_step() -> None:
    one = learner(warmup_updates=4)
    rates = []
    for seed in range(6):
        one.train([update(sequence(seed))])
        rates.append(one._optimizer.param_groups[0]["lr"] / 1e-2)
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


@pytest.mark.parametrize("choice", ["grpo", "gspo", "cispo", "m2po", "icepop", "reinforce"])
@pytest.mark.parametrize("reduction", ["token", "sequence", "constant"])
def test_gradients_do_not_depend_on_micro_batches(choice: str, reduction: str) -> None:
    """Also beside demonstrations, and in the last of several updates."""
    taught = demonstrated(sequence(50, 2))
    sampled = [sequence(seed, 1 + seed % 4) for seed in range(12)]
    updates = [update(*sampled[:7], taught), update(*sampled[7:])]
    found = []
    for max_tokens in (4096, 20, 1):
        loss = {"use": choice, "reduction": reduction}
        one = learner(loss=loss, max_tokens=max_tokens, minibatches=2, kl_coefficient=0.1)
        metrics = one.train(updates)
        found.append((metrics["loss"], metrics["grad_norm"], metrics["clip_fraction"]))
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    assert found[2] == pytest.approx(found[0], rel=1e-3)


def test_dpo_compares_with_version_0_without_a_kl_divergence() -> None:
    one = learner(loss="dpo", max_tokens=20)
    group = [
        replace(sequence(seed, 4), sample=seed, advantages=np.full(4, better, dtype=np.float32))
        for seed, better in enumerate([1.0, -1.0, 1.0, -1.0])
    ]
    losses = [one.train([update(*group)])["loss"] for _ in range(40)]

    assert losses[0] == pytest.approx(np.log(2), rel=1e-5)  # version 0 against itself
    assert losses[-1] < 0.9 * losses[0]


def test_the_second_update_of_m2po_is_prepared_with_the_weights_of_the_first() -> None:
    seen: list[torch.Tensor] = []

    class Watching(Loss):
        """Keeps the logprobs that updates are prepared with."""

        def prepare(self, update: MicroBatch, logprobs: torch.Tensor) -> None:
            seen.append(logprobs - update.proximal)

        def terms(self, batch: MicroBatch, logprobs: torch.Tensor) -> torch.Tensor:
            return -batch.advantages * logprobs

    one = learner(epochs=2)
    one._loss = Watching()
    one.train([update(sequence(0), demonstrated(sequence(1)))])
    assert [len(each) for each in seen] == [3, 3]
    assert not seen[0].any()
    assert seen[1].abs().max() > 1e-3


def test_an_update_whose_tokens_are_all_masked_is_counted() -> None:
    """Nothing else says so: no batch is skipped, and the weights stay."""
    batch = [update(sequence(0)), update(sequence(1))]
    masking = learner(loss={"use": "icepop", "mask_low": 1, "mask_high": 1}, minibatches=2)
    before = masking.weights()
    metrics = masking.train(batch)
    assert (metrics["masked_updates"], metrics["clip_fraction"]) == (2, 1)
    assert masking.weights() == before
    assert learner(loss={"use": "icepop", "mask_low": 0}).train(batch)["masked_updates"] == 0
    for one in batch:
        one.sequences[0].advantages[:] = 0.0
    assert masking.train(batch)["masked_updates"] == 0, "there is nothing to mask"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_the_reference_is_version_0_also_after_a_restart(
    lora: dict[str, int] | None, dtype: str, tmp_path: Path
) -> None:
    """Without another gradient, the policy returns to version 0."""
    tree = {"model": "tiny-llama", "lora": lora, "dtype": dtype}
    plain = {"learning_rate": 1e-2, "device": "cpu"}
    moved = Learner(FOLDER, Policy.model_validate({**tree, "training": plain}))
    batch = [update(*(sequence(seed) for seed in range(4)))]
    for _ in range(10):
        moved.train(batch)
    moved.save(tmp_path / "state")
    held = Learner(
        FOLDER, Policy.model_validate({**tree, "training": {**plain, "kl_coefficient": 1.0}})
    )
    assert held.train(batch)["reference_kl"] == pytest.approx(0, abs=1e-6)
    held.load(tmp_path / "state")
    for one in batch[0].sequences:
        one.advantages[:] = 0.0
    divergences = [held.train(batch)["reference_kl"] for _ in range(20)]
    assert divergences[0] > 0.1
    assert divergences[-1] < divergences[0] / 4


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_restart_with_another_version_0_is_refused(
    lora: dict[str, int] | None, tmp_path: Path
) -> None:
    """The model folder was changed meanwhile: its weights, or the adapter that it starts from."""

    def made(folder: Path, **coefficient: float) -> Learner:
        training = {"learning_rate": 1e-2, "device": "cpu", **coefficient}
        tree = {"model": "tiny-llama", "lora": lora, "training": training}
        return Learner(folder, Policy.model_validate(tree))

    changed = tmp_path / "changed"
    shutil.copytree(FOLDER, changed)
    base = Learner(FOLDER, Policy(model="tiny-llama")).weights()
    (changed / "model.safetensors").write_bytes(base)
    name = "model.safetensors" if lora is None else ADAPTER
    other = made(FOLDER)
    other.train([update(sequence(0))])
    (changed / name).write_bytes(other.weights())

    made(FOLDER, kl_coefficient=0.1).save(tmp_path / "state")
    made(FOLDER, kl_coefficient=0.1).load(tmp_path / "state")
    made(changed).load(tmp_path / "state")
    with pytest.raises(UsageError, match="other weights than when the run started"):
        made(changed, kl_coefficient=0.1).load(tmp_path / "state")
    made(FOLDER).save(tmp_path / "without")
    made(changed, kl_coefficient=0.1).load(tmp_path / "without")


def test_a_stop_while_the_reference_is_measured_leaves_the_own_weights() -> None:
    one, stop = learner(kl_coefficient=1.0), threading.Event()
    one.train([update(sequence(0))])
    weights = one.weights()
    stop.set()
    with pytest.raises(Stopped):
        one.train([update(sequence(0))], stop)
    assert one.weights() == weights


def test_epochs_train_on_each_minibatch_again() -> None:
    one = learner(epochs=3, minibatches=2, loss="reinforce")
    metrics = one.train([update(sequence(0)), update(sequence(1))])
    assert one.updates_done == 6
    assert metrics["tokens"] == 3 * 6


def fail_halfway(one: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer changes some weights, then memory is exhausted."""

    def exhaust() -> None:
        with torch.no_grad():
            one._parameters[0].add_(1.0)
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(one._optimizer, "step", exhaust)


def test_a_single_update_that_fails_in_the_optimizer_ends_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An update has changed half of the weights, and no copy exists: don't publish them."""
    one = learner()
    fail_halfway(one, monkeypatch)
    with pytest.raises(HeadraceError, match="continues from the newest checkpoint"):
        one.train([update(sequence(0))])


def test_one_of_several_updates_that_fails_in_the_optimizer_is_undone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = learner(minibatches=2)
    kept, weights = state(one, tmp_path), one.weights()
    fail_halfway(one, monkeypatch)
    with pytest.raises(UnusableBatch, match="out of memory"):
        one.train([update(sequence(0)), update(sequence(1))])
    assert (state(one, tmp_path), one.weights(), one.updates_done) == (kept, weights, 0)


def limit_memory(one: Learner, tokens: int) -> list[int]:
    """Lets the model read at most so many tokens at once. Returns the sizes that it was given."""
    sizes: list[int] = []

    def refuse(module: Any, args: Any, given: dict[str, Any]) -> None:
        sizes.append(given["input_ids"].numel())
        if sizes[-1] > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")

    one._model.register_forward_pre_hook(refuse, with_kwargs=True)
    return sizes


def named(seed: int, turns: int) -> TokenSequence:
    return replace(sequence(seed, turns), sample=seed, name=f"task 7 sample {seed}")


@pytest.mark.parametrize("updates", [1, 2])
def test_a_micro_batch_that_is_too_large_for_the_memory_is_divided(updates: int) -> None:
    batch = [update(*(named(4 * n + i, 1 + i) for i in range(4))) for n in range(updates)]
    small, divided = learner(max_tokens=10, minibatches=updates), learner(minibatches=updates)
    sizes = limit_memory(divided, 10)

    metrics, expected = divided.train(batch), small.train(batch)

    assert metrics.pop("memory_retries") > expected.pop("memory_retries") == 0
    assert metrics == expected
    assert divided.weights() == small.weights()
    assert max(sizes) == 20, "nothing is padded"
    sizes.clear()
    divided.train([update(named(0, 2))])
    assert sizes == [4]


@pytest.mark.parametrize("updates", [1, 2])
def test_a_sample_that_does_not_fit_the_memory_costs_only_itself(
    updates: int, caplog: pytest.LogCaptureFixture
) -> None:
    """All sequences of the sample are dropped."""
    fitting = [update(*(named(4 * n + i, 2) for i in range(3))) for n in range(updates)]
    long = named(90, 30)
    short = replace(named(91, 1), sample=long.sample, name=long.name)
    batch = [update(*fitting[0].sequences, short, long), *fitting[1:]]
    one, other = learner(minibatches=updates), learner(minibatches=updates)
    limit_memory(one, 16)

    metrics, expected = one.train(batch), other.train(fitting)

    assert (metrics["dropped_samples"], expected["dropped_samples"]) == (1, 0)
    assert metrics["dropped_samples_memory"] == 1
    assert metrics["tokens"] == expected["tokens"] == 6 * updates
    assert "task 7 sample 90: cpu is out of memory" in caplog.text
    for name, tensor in load(one.weights()).items():
        torch.testing.assert_close(tensor, load(other.weights())[name], atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16},
        {
            "model_type": "opt", "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 32,
            "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16,
        },
    ],
)  # fmt: skip
def test_a_sample_beyond_the_table_of_positions_costs_only_itself(
    config: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends = {"bos_token_id": 257, "eos_token_id": 257, "pad_token_id": 256}
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 258, **config, **ends}))
    one = Learner(tmp_path, Policy(model=str(tmp_path), training=Training(device="cpu")))
    fits, beyond = named(0, 8), named(1, 9)

    metrics = one.train([update(fits, beyond)])

    assert (metrics["dropped_samples"], metrics["tokens"]) == (1, 8)
    assert "has 18 tokens, but the model has positions for 16" in caplog.text
    computed = learner()
    assert position_limit(computed._model) is None, "Llama computes positions"


def test_if_no_sample_fits_the_memory_the_batch_is_unusable(tmp_path: Path) -> None:
    one = learner(minibatches=2)
    kept = state(one, tmp_path)
    sizes = limit_memory(one, 3)
    with pytest.raises(UnusableBatch, match=r"none of its samples .* out of memory"):
        one.train([update(*(named(seed, 2) for seed in range(4))), update(named(9, 3))])
    assert state(one, tmp_path) == kept
    assert len(sizes) < 12


def test_a_sample_whose_masks_cant_be_recomputed_costs_only_itself() -> None:
    """Its answer does not follow its schema."""
    bad = replace(sequence(1, sampling=Sampling(max_tokens=1, json_schema="true")), sample=1)
    one, other = learner(), learner()
    metrics = one.train([update(named(0, 3), bad)])
    other.train([update(named(0, 3))])
    assert (metrics["dropped_samples"], metrics["dropped_samples_memory"]) == (1, 0)
    assert one.weights() == other.weights()


def test_masks_are_computed_once_a_batch_and_dropped_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[str] = []
    begin = Schemas.begin

    def counted(schemas: Schemas, schema: str, *rest: Any) -> GrammarState:
        begun.append(schema)
        return begin(schemas, schema, *rest)

    monkeypatch.setattr(Schemas, "begin", counted)
    end = np.array([257], dtype="<i4").tobytes()
    sampling = Sampling(max_tokens=1, json_schema="true", stop_ids=end)
    one, plain = learner(epochs=3), sequence(1, sampling=sampling)
    # An answer that follows this schema may start with any JSON value.
    tokens = plain.tokens.copy()
    tokens[plain.positions] = list(b"123456789")[: len(plain.positions)]
    batch = update(replace(plain, tokens=tokens), sequence(0))
    one.train([batch])
    assert len(begun) == 1
    assert not one._forward._schemas._kept
    one.cross_entropy(batch)
    assert len(begun) == 2
    assert not one._forward._schemas._kept


def test_small_updates_add_up_in_a_bfloat16_model() -> None:
    """Each is far below the distance of two bfloat16 numbers; the optimizer keeps them."""
    settings = {"learning_rate": 1e-5, "device": "cpu"}
    policy = {"model": "tiny-llama", "dtype": "bfloat16", "training": settings}
    one = Learner(FOLDER, Policy.model_validate(policy))
    name, master = next(iter(one._masters.by_name.items()))
    before, model = master.detach().clone(), dict(one._model.named_parameters())
    for _ in range(20):
        one.train([update(sequence(0), sequence(1))])
    assert master.dtype == torch.float32
    assert (master - before).abs().max() > 1e-4
    for name, master in one._masters.by_name.items():
        assert torch.equal(model[name], master.bfloat16())
        assert model[name].grad is None
    for name, tensor in load(one.weights()).items():
        assert torch.equal(tensor, model[name])


@pytest.mark.slow
def test_a_bfloat16_models_gradients_are_added_up_in_float32() -> None:
    """Over many micro-batches, the gradient is that of one float32 model to bfloat16's rounding."""

    def gradients(dtype: str, max_tokens: int) -> torch.Tensor:
        settings = {"learning_rate": 1e-9, "device": "cpu", "max_tokens": max_tokens}
        policy = {"model": "tiny-llama", "dtype": dtype, "training": settings}
        one = Learner(FOLDER, Policy.model_validate(policy))
        one.train([update(*[sequence(5)] * 300)])
        return torch.cat([parameter.grad.flatten() for parameter in one._parameters])  # type: ignore[union-attr]

    exact, many = gradients("float32", 4096), gradients("bfloat16", 6)
    assert (many - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("loss", ["infinite_loss", "exhausting_loss"])
@pytest.mark.parametrize("before", [0, 1])
def test_a_poison_batch_changes_nothing(loss: str, before: int, tmp_path: Path) -> None:
    """Neither in its first update nor, after a good one, in its second."""
    one = learner(minibatches=2)
    one.train([update(sequence(0)), update(sequence(1))])
    kept, weights, done = state(one, tmp_path), one.weights(), one.updates_done
    one._loss = load_loss(f"{__name__}:{loss}")
    good, bad = sequence(2), sequence(3)
    good.advantages[:], bad.advantages[:] = 1.0, -1.0

    with pytest.raises(UnusableBatch, match=r"not finite|out of memory"):
        one.train([*[update(good)] * before, update(bad)])

    assert (state(one, tmp_path), one.weights(), one.updates_done) == (kept, weights, done)


def test_without_a_gradient_momentum_does_not_carry_on(tmp_path: Path) -> None:
    one = learner()
    one.train([update(sequence(0))])
    kept = state(one, tmp_path)
    equal = sequence(1)
    equal.advantages[:] = 0.0

    assert one.train([update(equal)])["grad_norm"] == 0
    assert state(one, tmp_path) == kept


def test_a_stop_drops_the_version_in_the_making() -> None:
    one, stop = learner(minibatches=2), threading.Event()
    weights = one.weights()
    stop.set()
    with pytest.raises(Stopped):
        one.train([update(sequence(0))], stop)
    assert one.weights() == weights


def test_training_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    batches = [[update(*(sequence(4 * n + i) for i in range(4)))] for n in range(6)]
    straight = learner(warmup_updates=5)
    for batch in batches:
        straight.train(batch)
    first = learner(warmup_updates=5)
    for batch in batches[:3]:
        first.train(batch)
    first.save(tmp_path / "state")
    second = learner(warmup_updates=5)
    second.load(tmp_path / "state")
    for batch in batches[3:]:
        second.train(batch)

    assert weights_digest(second.weights()) == weights_digest(straight.weights())


def test_a_disk_that_takes_no_more_is_an_os_error(tmp_path: Path) -> None:
    one = learner()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            one.save(tmp_path / "state")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "state").exists()


def test_the_state_of_another_model_is_refused(tmp_path: Path) -> None:
    learner().save(tmp_path / "state")
    small = Learner(model_folder("small-llama"), Policy(model="small-llama"))
    with pytest.raises(UsageError, match="another model"):
        small.load(tmp_path / "state")


def test_a_device_or_model_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"device 'abacus'.*Set `device`"):
        learner(device="abacus")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="can't be loaded"):
        Learner(tmp_path, Policy(model=str(tmp_path)))
    with pytest.raises(UsageError, match="not trained"):
        Learner(FOLDER, Policy(model="tiny-llama", training=None))


def demonstrated(one: TokenSequence) -> TokenSequence:
    said = np.ones(len(one.positions), dtype=np.bool_)
    none = np.zeros(len(one.positions), dtype=np.float32)
    return replace(one, demonstrated=said, behaviour=none, advantages=none + 1)


def test_demonstrations_are_learned_whatever_the_loss_does() -> None:
    one = learner(loss="tests.unit.trainer.test_learner:no_loss")
    taught = [demonstrated(sequence(seed)) for seed in range(4)]
    surprise = [one.train([update(*taught)])["cross_entropy"] for _ in range(30)]

    assert surprise[0] == pytest.approx(np.log(4), abs=0.5)  # of four allowed actions
    assert surprise[-1] < 0.7 * surprise[0]


def test_a_batch_may_hold_both_what_was_sampled_and_what_was_demonstrated() -> None:
    sampled, taught = sequence(0), demonstrated(sequence(1))
    both, one_by_one = learner(minibatches=2), learner(minibatches=2, max_tokens=1)

    metrics = both.train([update(sampled, taught), update(taught, sampled)])
    one_by_one.train([update(sampled, taught), update(taught, sampled)])

    count = len(sampled.positions) + len(taught.positions)
    assert metrics["tokens"] == 2 * count
    assert metrics["demonstrated_tokens"] == 2 * len(taught.positions)
    for name, tensor in load(both.weights()).items():
        torch.testing.assert_close(tensor, load(one_by_one.weights())[name], atol=1e-3, rtol=0)


def test_the_tokens_that_the_model_reads_are_counted_for_each_update_again() -> None:
    made = update(sequence(0), sequence(1))  # Each second token is trained.
    metrics = learner(epochs=3).train([made])
    assert metrics["tokens_read"] == 3 * sum(len(one.tokens) for one in made.sequences)
    assert metrics["tokens_read"] == 2 * metrics["tokens"]


def test_the_gradient_of_a_demonstration_is_that_of_its_cross_entropy() -> None:
    one, taught = learner(learning_rate=1e-9), demonstrated(sequence(2))
    metrics = one.train([update(taught)])
    assert metrics["loss"] == pytest.approx(metrics["cross_entropy"])
    assert "kl" not in metrics


def test_what_is_demonstrated_alone_may_have_a_learning_rate_of_its_own() -> None:
    one = learner(demonstration_learning_rate=0.02)
    taught, sampled = demonstrated(sequence(0)), sequence(1)
    rates = []
    for made in (update(taught), update(taught, sampled), update(sampled)):
        one.train([made])
        rates.append(one._optimizer.param_groups[0]["lr"])
    assert rates == [0.02, 1e-2, 1e-2]


def no_loss(batch: MicroBatch, logprobs: torch.Tensor) -> torch.Tensor:
    raise AssertionError("there is nothing that was sampled")
