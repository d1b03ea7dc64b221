"""A fine-tuning learns, can be stopped anywhere, and continues to the same weights."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from headrace.errors import HeadraceError, UsageError
from headrace.schemas.recipe.policy import Lora, Policy
from headrace.services.models.weights import ADAPTER, model_folder
from headrace.services.operate.sft.fine_tuning import FineTuning, SftProgress
from headrace.services.operate.sft.run_sft import run_sft
from headrace.services.operate.sft.sft_checkpoints import find_checkpoint
from headrace.services.operate.sft.sft_job import (
    SftJob,
    SftSettings,
    SftTarget,
    make_job,
)
from headrace.services.operate.sft.sft_model import write_model
from headrace.services.operate.sft.sft_rows import read_row
from headrace.services.operate.sft.sft_stop import SftStop
from headrace.services.operate.sft.sft_tokens import RowTokens
from headrace.services.operate.sft.sft_view import SftStatus, SftView
from headrace.trainer.checkpoint import Checkpoints
from headrace.trainer.collate import Inputs
from headrace.trainer.learner import Learner
from headrace.trainer.learning_rate import learning_rate_at
from headrace.trainer.sequences import TokenSequence, UnusableBatch, UpdateBatch

FOLDER = model_folder("tiny-chat")


def a_policy(**training: Any) -> Policy:
    settings = {"device": "cpu", "demonstration_learning_rate": 2e-2, "epochs": 3, **training}
    return Policy.model_validate({"model": "tiny-chat", "training": settings})


def a_job(
    word: str = "yes", policy: Policy | None = None, long: int | None = None, **settings: Any
) -> SftJob:
    """Says a word, whatever is asked. Each update has about two rows of 6 tokens, or one `long`."""
    chosen = policy or a_policy()
    tokens = RowTokens(FOLDER, chosen, 0)
    rows = [{"prompt": f"{number}?", "completion": word} for number in range(10)]
    if long is not None:
        rows[long]["prompt"] *= 10
    sequences = [
        tokens.sequence(read_row(row, "hermes"), number, f"row {number}")
        for number, row in enumerate(rows)
    ]
    given = {"epochs": 2, "batch_tokens": 14, "held_out": 0.2, **settings}
    return make_job("default", chosen, sequences, SftSettings(**given))


class Trial:
    """A learner and its fine-tuning."""

    def __init__(self, folder: Path, job: SftJob) -> None:
        self.now = 0.0
        self.learner = Learner(FOLDER, job.policy)
        self.progress = SftProgress(len(job.plan.updates), job.plan.epoch_ends)
        checkpoints = Checkpoints(folder, 2)
        self.tuning = FineTuning(
            *(self.learner, job.sequences, job.plan, checkpoints, job.digest, self.progress),
            lambda: self.now,
        )
        self.said: list[str] = []
        self.stop = SftStop()
        self.stopping, self.cut = self.stop.stopping, self.stop.cut
        if (found := find_checkpoint(checkpoints, folder, job)) is not None:
            self.tuning.resume(*found)

    def run(self) -> bool:
        return self.tuning.run(self.stop, self.said.append)

    def limit_memory(self, tokens: int) -> None:
        """Gives the device too little memory for larger micro-batches."""
        forward = self.learner._forward
        plain = forward.collate

        def collate(sequences: Sequence[TokenSequence], stop: Any = None) -> Inputs:
            if len(sequences) * max(len(one.tokens) for one in sequences) > tokens:
                raise torch.OutOfMemoryError("can't allocate memory")
            return plain(sequences, stop)

        forward.collate = collate  # type: ignore[method-assign]

    def stop_in(self, update: int, event: threading.Event) -> None:
        """Sets an event as soon as an update begins."""
        plain, begun = self.learner.train, []

        def train(*arguments: Any) -> dict[str, float]:
            begun.append(1)
            if len(begun) == update:
                event.set()
            return plain(*arguments)

        self.learner.train = train  # type: ignore[method-assign, assignment]


def test_it_learns_and_measures_what_is_held_out(tmp_path: Path) -> None:
    trial = Trial(tmp_path, job := a_job())
    assert trial.run()
    progress = trial.progress
    assert progress.losses[-1] < 0.5 * progress.losses[0]
    assert [at for at, _ in progress.held_out] == [0, *job.plan.epoch_ends]
    assert progress.held_out[-1][1] < 0.5 * progress.held_out[0][1]
    assert progress.epoch == 2
    assert progress.tokens == 2 * 8 * 4  # Each of 8 rows has a word of 3 letters and an end.
    assert job.policy.training is not None
    assert trial.progress.rate == pytest.approx(2e-2 / len(job.plan.updates))


@pytest.mark.parametrize("at_once", [False, True])
def test_a_stopped_one_continues_to_the_same_weights(tmp_path: Path, at_once: bool) -> None:
    whole = Trial(tmp_path / "whole", a_job())
    assert whole.run()
    first = Trial(tmp_path / "cut", a_job())
    first.stop_in(5, first.cut if at_once else first.stopping)
    assert not first.run()
    assert first.progress.done == (4 if at_once else 5)
    # The number of threads, for example, may change in between.
    again = Trial(tmp_path / "cut", a_job(policy=a_policy(max_tokens=4096)))
    assert again.progress.continued == first.progress.done
    assert again.run()
    assert again.learner.weights() == whole.learner.weights()
    assert again.progress.facts() == whole.progress.facts()
    assert again.progress.tokens_before == first.progress.tokens


@pytest.mark.parametrize(("left_s", "saved"), [(math.inf, 6), (31.0, 6), (29.0, 4)])
def test_no_last_checkpoint_is_begun_that_would_be_interrupted(
    tmp_path: Path, left_s: float, saved: int
) -> None:
    """A checkpoint takes 30 s. One is written after 4 updates, and the wish to stop comes in 6."""
    trial = Trial(tmp_path, a_job())
    train, save = trial.learner.train, trial.learner.save

    def slow_train(*arguments: Any) -> dict[str, float]:
        # Another checkpoint would be due again, but it must not begin either.
        trial.now += 1000.0 if trial.progress.done == 5 else 15.0
        if trial.progress.done == 5:
            trial.stop.save_by = trial.now + left_s
            trial.stopping.set()
        return train(*arguments)

    def slow_save(path: Path) -> None:
        trial.now += 30.0
        save(path)

    trial.learner.train, trial.learner.save = slow_train, slow_save  # type: ignore
    assert not trial.run()
    assert trial.progress.done == 6
    assert trial.progress.saved == saved
    assert any("no checkpoint of update 6" in line for line in trial.said) == (saved == 4)
    assert Trial(tmp_path, a_job()).progress.done == saved


def test_a_start_removes_interrupted_checkpoints(tmp_path: Path) -> None:
    target = SftTarget(tmp_path / "made", merge=False, force=False)
    (target.checkpoints / "partial-left").mkdir(parents=True)
    without_model = a_policy().model_copy(update={"model": str(tmp_path / "no model")})
    job, status = replace(a_job(), policy=without_model), SftStatus("made")
    with pytest.raises(UsageError, match="no model"):
        asyncio.run(run_sft(job, target, {}, SftView(status, Console(quiet=True)), status))
    assert list(target.checkpoints.iterdir()) == []


@pytest.mark.parametrize(("save_s", "saved"), [(0.0, [3, 6, 8]), (4.0, [3, 7, 8])])
def test_checkpoints_take_little_of_the_time(
    tmp_path: Path, save_s: float, saved: list[int]
) -> None:
    trial, found = Trial(tmp_path, a_job()), list[int]()
    train, save = trial.learner.train, trial.learner.save

    def slow_train(*arguments: Any) -> dict[str, float]:
        trial.now += 20.0
        return train(*arguments)

    def slow_save(path: Path) -> None:
        found.append(trial.progress.done)
        trial.now += save_s
        save(path)

    trial.learner.train, trial.learner.save = slow_train, slow_save  # type: ignore
    assert trial.run()
    assert found == saved


def test_checkpoints_of_other_data_are_not_continued(tmp_path: Path) -> None:
    Trial(tmp_path, a_job()).run()
    for other in (a_job("no"), a_job(seed=1), a_job(learning_rate=1e-5)):
        with pytest.raises(UsageError, match="--restart"):
            Trial(tmp_path, other)


def test_an_update_that_diverges_ends_it(tmp_path: Path) -> None:
    trial = Trial(tmp_path, a_job())
    for parameter in trial.learner._parameters:
        parameter.data.fill_(float("nan"))
    with pytest.raises(HeadraceError, match="update 1 of 8 can't be made"):
        trial.run()


def test_an_update_that_fails_leaves_a_checkpoint_of_those_before(tmp_path: Path) -> None:
    trial = Trial(tmp_path, a_job())
    plain = trial.learner.train

    def train(*arguments: Any) -> dict[str, float]:
        if trial.progress.done == 2:
            raise UnusableBatch("the loss is not finite")
        return plain(*arguments)

    trial.learner.train = train  # type: ignore[method-assign, assignment]
    with pytest.raises(HeadraceError, match="update 3 of 8 can't be made"):
        trial.run()
    assert Trial(tmp_path, a_job()).progress.done == 2


@pytest.mark.parametrize("fits", [12, 6])
def test_what_is_held_out_is_measured_in_parts_that_fit(tmp_path: Path, fits: int) -> None:
    job = a_job(long=3, held_out=0.5, seed=1)
    assert 3 in job.plan.held_out
    whole, parts = Trial(tmp_path / "whole", job), Trial(tmp_path / "parts", job)
    parts.limit_memory(24)
    for one in (whole, parts):
        one.stopping.set()
        one.run()
    [(_, expected)] = whole.progress.held_out
    assert dict(parts.progress.held_out) == pytest.approx({0: expected})

    small = Trial(tmp_path / "small", job)
    small.limit_memory(fits)
    small.stopping.set()
    small.run()
    others = [job.sequences[index] for index in job.plan.held_out if index != 3]
    nats, tokens = whole.learner.cross_entropy(UpdateBatch(others))
    assert dict(small.progress.held_out) == pytest.approx({0: nats / tokens})
    assert "after update 0: 4 of 20 held-out tokens can't be measured" in small.said[0]


def test_a_row_that_does_not_fit_is_left_out(tmp_path: Path) -> None:
    trial = Trial(tmp_path, a_job(long=3, held_out=0))
    trial.limit_memory(12)
    assert trial.run()
    assert trial.progress.dropped == 2  # Once in each epoch.
    assert len(trial.progress.losses) == trial.progress.updates - 2
    left_out = [line for line in trial.said if "left out" in line]
    assert len(left_out) == 2
    assert "left out all its 1 sequences" in left_out[0]


def test_a_tokenizer_of_another_model_is_noticed(tmp_path: Path) -> None:
    job = a_job()
    job.sequences[0].tokens[0] = 300
    with pytest.raises(UsageError, match="the id 300, but the model has only 262"):
        Trial(tmp_path, job)


@pytest.mark.parametrize(("warmup", "rises"), [(0, []), (1, []), (2, [0.5])])
def test_the_learning_rate_reaches_its_highest_and_then_falls(
    warmup: int, rises: list[float]
) -> None:
    job = a_job(warmup=warmup)
    training = job.policy.training
    assert training is not None
    updates = len(job.plan.updates)
    left = updates - len(rises)
    expected = [*rises, *(1 - number / left for number in range(left))]
    rates = [learning_rate_at(training, number, 1.0) for number in range(1, updates + 1)]
    assert rates == pytest.approx(expected)


def test_what_saves_memory_in_a_run_saves_it_here() -> None:
    saving = {"offload": True, "activation_checkpointing": True, "max_tokens": 77}
    training = a_job(policy=a_policy(device="auto", **saving)).policy.training
    assert training is not None
    assert training.model_dump(include=set(saving)) == saving


def test_a_warmup_must_end() -> None:
    with pytest.raises(UsageError, match="--warmup 99 do not fit 8 updates"):
        a_job(warmup=99)


@pytest.mark.parametrize("merge", [False, True])
def test_an_adapter_is_version_0_of_a_run_from_the_folder(tmp_path: Path, merge: bool) -> None:
    policy = a_policy().model_copy(update={"lora": Lora(rank=2)})
    trial = Trial(tmp_path / "checkpoints", job := a_job(policy=policy))
    assert trial.run()
    weights = trial.learner.weights()
    target = SftTarget(tmp_path / "made", merge=merge, force=False)
    file = tmp_path / "weights"
    trial.learner.write_weights(file)
    facts = write_model(job, file, trial.learner.base, 8, trial.progress.facts(), target)
    assert not file.exists()
    assert facts["fine_tuning"]["updates"] == 8
    assert "namespace" not in facts
    started = Learner(target.folder, policy)
    assert (target.folder / ADAPTER).exists() == (not merge)
    assert (started.weights() == weights) == (not merge)
    everything = UpdateBatch(job.sequences)
    before = trial.learner.cross_entropy(everything)
    assert started.cross_entropy(everything) == pytest.approx(before, abs=4e-3)
