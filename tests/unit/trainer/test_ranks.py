"""One model in several processes: the same weights as in one, and checkpoints of any size."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.schemas.recipe.policy import Policy
from headrace.services.models.weights import model_folder
from headrace.trainer.ranks.rank_group import outside_rank
from headrace.trainer.sequences import UnusableSample

PROGRAM = Path(__file__).with_name("ranks_program.py")
TOLERANCE = 1e-6
"""The largest difference of a weight after 5 versions, in float32."""


class Orders:
    """Orders for one start of the program, and the folders with what came out."""

    def __init__(self, folder: Path, **training: Any) -> None:
        self.folder = folder
        self.training = {"learning_rate": 1e-4, "device": "cpu", "max_tokens": 64, **training}
        self.orders: list[dict[str, Any]] = []

    def add(self, name: str, size: int, policy: dict[str, Any] | None = None, **more: Any) -> Path:
        (self.folder / name).mkdir()
        settings = {"model": "tiny-llama", "training": self.training} | (policy or {})
        self.orders.append(
            {"size": size, "policy": settings, "folder": str(self.folder / name), **more}
        )
        return self.folder / name

    def run(self) -> None:
        command = [sys.executable, str(PROGRAM), json.dumps(self.orders)]
        alone = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(command, check=True, timeout=1500, env=os.environ | alone)

    def offloaded(self) -> dict[str, Any]:
        """A recipe refuses `offload` on a CPU that it names."""
        return {"training": self.training | {"device": "auto", "offload": True}}


def distance(one: Path, another: Path) -> float:
    first, second = load_file(one / "weights"), load_file(another / "weights")
    assert first.keys() == second.keys()
    return max(float((first[name].float() - second[name].float()).abs().max()) for name in first)


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result").read_text())
    return found


def a_folder(folder: Path, **config: Any) -> Path:
    """A model folder with random weights in bfloat16, in several files."""
    source = model_folder("tiny-llama")
    made: Any = AutoConfig.from_pretrained(source, **config)
    torch.manual_seed(1)
    make: Any = AutoModelForCausalLM.from_config
    model = make(made, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100KB")
    shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.mark.long
def test_each_rank_reads_its_shard_alone(tmp_path: Path) -> None:
    """With tied embeddings, too. With the shards in the host's memory the same, bit by bit."""
    orders = Orders(tmp_path)
    results = []
    for tied in (False, True):
        model = a_folder(tmp_path / f"model-{tied}", tie_word_embeddings=tied)
        policy = {"model": str(model), "training": orders.training, "dtype": "float32"}
        results.append(
            [
                orders.add(f"{tied}-{name}", size, settings, versions=2, never_whole=True)
                for name, size, settings in (
                    ("one", 1, policy),
                    ("two", 2, policy),
                    ("offloaded", 2, policy | orders.offloaded()),
                )
            ]
        )
        orders.orders[-3].pop("never_whole")
    orders.run()
    for one, two, offloaded in results:
        assert 0 < distance(one, two) < TOLERANCE
        assert (offloaded / "weights").read_bytes() == (two / "weights").read_bytes()


def test_an_adapter_is_refused_in_several_processes() -> None:
    with pytest.raises(ValidationError, match="an adapter is trained in one process"):
        Policy.model_validate({"model": "m", "lora": {}, "training": {"processes": 2}})


def test_another_program_may_have_started_the_ranks() -> None:
    assert outside_rank({"RANK": "3", "WORLD_SIZE": "8"}) == (3, 8)
    assert outside_rank({"WORLD_SIZE": "8"}) is None


@pytest.mark.slow
def test_two_ranks_train_as_one_process_and_checkpoints_move_between_them(tmp_path: Path) -> None:
    orders = Orders(tmp_path, minibatches=2)
    one = orders.add("one", 1, save=str(tmp_path / "one.safetensors"))
    two = orders.add("two", 2, save=str(tmp_path / "two-ranks"))
    again = orders.add("again", 2)
    of_two = orders.add("of-two", 1, load=str(tmp_path / "two-ranks"), first=6, versions=2)
    of_one = orders.add("of-one", 2, load=str(tmp_path / "one.safetensors"), first=6, versions=2)
    onward = orders.add("onward", 2, load=str(tmp_path / "two-ranks"), first=6, versions=2)
    saved = {"load": str(tmp_path / "two-ranks"), "save": str(tmp_path / "offloaded")}
    kept = orders.add("kept", 2, orders.offloaded(), first=6, versions=1, **saved)
    freed = orders.add("freed", 2, load=str(tmp_path / "offloaded"), first=7, versions=1)
    orders.run()
    assert 0 < distance(one, two) < TOLERANCE
    assert (two / "weights").read_bytes() == (again / "weights").read_bytes()
    for folder in (one, two):
        assert (folder / "streamed").read_bytes() == (folder / "weights").read_bytes()
    assert result(one)["updates"] == result(two)["updates"] == 10
    assert result(of_one)["updates"] == result(of_two)["updates"] == 14
    assert distance(of_one, of_two) < TOLERANCE
    assert distance(onward, of_two) < TOLERANCE
    assert (freed / "weights").read_bytes() == (onward / "weights").read_bytes()
    assert (kept / "weights").read_bytes() != (two / "weights").read_bytes()
    measured = result(one)["cross_entropy"]
    assert measured > 0
    assert result(two)["cross_entropy"] == pytest.approx(measured, abs=1e-5)
    alone, shared = result(one)["metrics"], result(two)["metrics"]
    assert shared.pop("processes") == 2
    assert shared == pytest.approx(alone, rel=1e-3, abs=1e-5)
    for first, second in zip(result(one)["logprobs"], result(two)["logprobs"], strict=True):
        assert second == pytest.approx(first, abs=1e-4)


LOSSES: dict[str, dict[str, Any]] = {
    "sequence-mean": {"loss": "gspo"},
    "constant": {"loss": "dr_grpo"},
    "prepared": {"loss": "m2po", "epochs": 2},
    "pairs": {"loss": "dpo", "epochs": 2},
    "regularized": {"kl_coefficient": 0.1, "entropy_bonus": 0.01},
    "critic": {"critic": {"warmup_updates": 1}},
}


@pytest.mark.long
def test_every_aggregation_equals_that_of_one_process(tmp_path: Path) -> None:
    orders = Orders(tmp_path)
    made = {}
    for name, training in LOSSES.items():
        settings: dict[str, Any] = {"training": orders.training | training}
        if "critic" in training:
            settings["groups"] = {"advantage": "rewards"}
        made[name] = [orders.add(f"{name}-{size}", size, settings) for size in (1, 2, 4)]
    again = orders.add("again", 4, {"training": orders.training | LOSSES["prepared"]})
    kept = {"training": orders.offloaded()["training"] | LOSSES["regularized"]}
    offloaded = orders.add("offloaded", 2, kept)
    orders.run()
    for name, (one, two, four) in made.items():
        print(f"{name:<14} 2 ranks {distance(one, two):.1e}  4 ranks {distance(one, four):.1e}")
        assert distance(one, two) < TOLERANCE
        assert distance(one, four) < TOLERANCE
    assert (made["prepared"][2] / "weights").read_bytes() == (again / "weights").read_bytes()
    two = made["regularized"][1]
    assert (offloaded / "weights").read_bytes() == (two / "weights").read_bytes()


@pytest.mark.long
def test_a_checkpoint_of_two_ranks_goes_on_in_one_and_in_four(tmp_path: Path) -> None:
    """With the moments of AdamW: they go into the versions that are trained after it."""
    orders = Orders(tmp_path)
    orders.add("saved", 2, save=str(tmp_path / "saved-by-two"))
    onward: dict[str, Any] = {
        "load": str(tmp_path / "saved-by-two"), "first": 6, "versions": 2,
    }  # fmt: skip
    straight = orders.add("straight", 1, versions=7)
    one, two, four, again = (
        orders.add(f"{number}-of-{size}", size, **onward)
        for number, size in enumerate((1, 2, 4, 4))
    )
    orders.run()
    for folder in (one, two, four):
        print(f"{folder.name} differs from one process by {distance(straight, folder):.1e}")
        assert 0 < distance(straight, folder) < TOLERANCE
        assert result(folder)["updates"] == result(straight)["updates"]
    assert (four / "weights").read_bytes() == (again / "weights").read_bytes()


@pytest.mark.long
def test_bfloat16_stays_near_and_a_checkpoint_of_two_ranks_is_the_same_in_four(
    tmp_path: Path,
) -> None:
    orders = Orders(tmp_path)
    rounded = {"dtype": "bfloat16"}
    one = orders.add("one", 1, rounded)
    two = orders.add("two", 2, rounded, save=str(tmp_path / "saved"))
    offloaded = orders.add("offloaded", 2, rounded | orders.offloaded())
    four = orders.add("four", 4, rounded, load=str(tmp_path / "saved"), first=6, versions=0)
    orders.run()
    # A bfloat16 has 8 bits, so weights that differ by 1e-6 may be rounded to different ones.
    assert distance(one, two) < 2**-7
    for other in (four, offloaded):
        assert (other / "weights").read_bytes() == (two / "weights").read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=str)
def test_a_rank_that_stops_or_dies_ends_the_others_in_time(tmp_path: Path, number: int) -> None:
    orders = Orders(tmp_path)
    folder = orders.add("lost", 3, timeout_s=8.0, stop=2, signal=number)
    orders.run()
    assert ": rank 2 does not answer." in result(folder)["error"]


def test_an_error_about_a_sample_reaches_another_process_whole() -> None:
    made, arguments = UnusableSample(3, "too long").__reduce__()
    again = made(*arguments)
    assert (again.sample, str(again)) == (3, "too long")


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=str)
def test_a_rank_that_stops_while_weights_are_written_is_named(tmp_path: Path, number: int) -> None:
    orders = Orders(tmp_path)
    lost: dict[str, Any] = {"stop": 1, "stop_at": "write_weights", "signal": number}
    folder = orders.add("lost", 3, timeout_s=8.0, versions=0, **lost)
    orders.run()
    assert ": rank 1 does not answer." in result(folder)["error"]
    assert not (folder / "weights").exists()


@pytest.mark.long
def test_a_publication_takes_little_memory_beside_the_shards(tmp_path: Path) -> None:
    """Whole weights, then a delta, of a model in which no tensor is a large part."""
    size = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16}
    model = a_folder(tmp_path / "model", **size, num_attention_heads=8, num_key_value_heads=8)
    tensors = [load_file(path) for path in model.glob("*.safetensors")]
    shard = 4 * sum(one.numel() for file in tensors for one in file.values()) // 2
    orders = Orders(tmp_path, learning_rate=1e-7)  # few bfloat16 weights change
    policy = {"model": str(model), "training": orders.training, "dtype": "bfloat16"}
    folder = orders.add("measured", 2, policy, measured=True, versions=0)
    orders.run()
    found = {path.name: int(path.read_text()) / shard for path in folder.glob("memory-*")}
    print(f"shard {shard / 2**20:.0f} MiB; peaks in shards: {found}")
    assert len(found) == 4
    assert max(found.values()) <= 0.3
