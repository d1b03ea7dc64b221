"""Plans: what fits, what to change, and what the command prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.errors import UsageError
from headrace.schemas.recipe.policy import Policy
from headrace.services.models.weights import model_folder
from headrace.services.operate.cli import cli
from headrace.services.operate.plan.memory_parts import GIB
from headrace.services.operate.plan.memory_plan import Gpus, MemoryPlan
from headrace.services.operate.plan.model_shape import read_shape

QWEN3_8B = {
    "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": False, "max_position_embeddings": 40_960,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    source = model_folder("tiny-chat") / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(source.read_bytes())
    return tmp_path


def plan(folder: Path, gpus: str, ram: float | None = None, **changes: Any) -> MemoryPlan:
    vllm = {
        "use": "vllm",
        "options": {"context": 4096, "arguments": {"gpu_memory_utilization": 0.3}},
    }
    keys = {"model": str(folder), "dtype": "bfloat16", "engine": vllm, **changes}
    policy = Policy.model_validate(keys)
    return MemoryPlan({"default": (policy, read_shape(folder))}, Gpus.parse(gpus), ram)


def test_the_parts_of_all_weights_are_those_of_adam_in_mixed_precision(folder: Path) -> None:
    made = plan(folder, "1x80")
    count = 8_190_735_360  # as the model's card says: 8.2 billion
    parts = made.trainer_parts()
    assert read_shape(folder).parameters == count
    assert parts["default: weights"] == 2 * count
    assert parts["default: master weights"] == parts["default: gradients"] == 4 * count
    assert parts["default: optimizer state"] == 8 * count
    assert not made.fits


def test_ranks_share_what_belongs_to_weights_and_each_has_its_own_activations(folder: Path) -> None:
    one = plan(folder, "8x80").trainer_parts()
    eight = plan(folder, "8x80", training={"processes": 8}).trainer_parts()
    assert eight["default: optimizer state"] * 8 == one["default: optimizer state"]
    assert eight["default: activations"] == one["default: activations"]


def test_ranks_load_their_shards_alone_also_if_the_embeddings_are_tied(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(QWEN3_8B | {"tie_word_embeddings": True}))
    made = plan(folder, "8x80", training={"processes": 8})
    assert made.ram_parts() == {
        "default: model while it is loaded": 4 * read_shape(folder).parameters // 8
    }


def test_at_the_sum_of_gradients_the_embeddings_of_a_small_model_count_most(folder: Path) -> None:
    """On GPUs: the gradients in bfloat16, a float32 copy of them, and that of the last layer."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4}
    (folder / "config.json").write_text(json.dumps(QWEN3_8B | sizes))
    training = {"processes": 8, "max_tokens": 128, "activation_checkpointing": True}
    short = {"use": "vllm", "options": {"context": 128}}
    parts = plan(folder, "8x80", engine=short, training=training).trainer_parts()
    shape = read_shape(folder)
    assert parts["default: sum of gradients over ranks"] == (
        6 * shape.outer_parameters + 4 * shape.layer_parameters
    )
    assert "default: logits" not in parts


def test_an_adapter_and_another_trainer_have_no_ranks(folder: Path) -> None:
    adapter = plan(folder, "8x8", lora={})
    assert not any("processes" in text for text, _ in adapter.changes())
    other = plan(folder, "1x80", training={"external": True})
    assert other.trainer_parts() == {}
    assert other.fits
    with pytest.raises(UsageError, match="each process needs a GPU"):
        plan(folder, "4x80", training={"processes": 8})


def test_changes_come_the_cheapest_first_and_end_with_one_that_fits(folder: Path) -> None:
    made = plan(folder, "8x80")
    changes = made.changes()
    totals = [made.gpu_total, *(then.gpu_total for _, then in changes)]
    assert totals == sorted(totals, reverse=True)
    assert "max_tokens" in changes[0][0]
    assert [then.fits for _, then in changes] == [False] * (len(changes) - 1) + [True]
    assert changes[-1][0].startswith("policies.default.training.processes = ")
    assert plan(folder, "1x8").changes()[-1][1].fits is False


def test_offload_moves_the_optimizer_from_the_gpu_to_the_host(folder: Path) -> None:
    count = read_shape(folder).parameters
    made = plan(folder, "1x80", training={"offload": True})
    assert set(made.trainer_parts()) == {
        f"default: {part}" for part in ("weights", "activations", "logits")
    }
    host = {"master weights": 4 * count, "gradients": 4 * count, "optimizer state": 8 * count}
    host |= {"optimizer step": 8 * read_shape(folder).largest, "published weights": 4 * count}
    assert made.ram_parts() == {f"default: {part}": size for part, size in host.items()}
    assert made.ram_of_machine == made.ram_total
    wide = plan(folder, "1x80", dtype="float32", training={"offload": True})
    assert wide.trainer_parts()["default: weights"] == 4 * count
    assert wide.ram_parts()["default: master weights"] == 4 * count


def test_ranks_share_what_is_in_the_host_with_version_0(folder: Path) -> None:
    eight = {"processes": 8, "offload": True, "kl_coefficient": 0.1}
    made = plan(folder, "8x80", training=eight)
    count, version_0 = read_shape(folder).parameters, "default: version 0, for the KL divergence"
    assert version_0 not in made.trainer_parts()
    parts = made.ram_parts()
    assert parts["default: optimizer state"] == 2 * parts[version_0] == count
    assert made.ram_of_machine == 8 * made.ram_total
    alone = plan(folder, "8x80", training=eight | {"processes": 1})
    assert version_0 in alone.trainer_parts()
    assert version_0 not in alone.ram_parts()


def test_offload_is_suggested_before_an_adapter_if_the_host_has_the_memory(folder: Path) -> None:
    for ram in (None, 200.0):
        text, then = plan(folder, "1x80", ram).changes()[-1]
        assert text == "policies.default.training.offload = true"
        assert (then.fits, then.ram_fits) == (True, True)
    assert plan(folder, "1x80", 100.0).changes()[-1][0] == "policies.default.lora = { rank = 16 }"
    names = [
        text.partition(" = ")[0].rpartition(".")[2] for text, _ in plan(folder, "2x8").changes()
    ]
    assert names[-4:] == ["activation_checkpointing", "processes", "offload", "lora"]
    [*_, (_, adapted)] = plan(folder, "2x8").changes()
    Policy.model_validate(adapted.policies["default"][0].model_dump())


def test_without_a_context_of_the_engine_a_sequence_is_as_long_as_the_models(folder: Path) -> None:
    made = plan(folder, "8x80", engine={"use": "vllm"}, training={"max_tokens": 8192})
    assert made.batch_tokens() == {"default": 40_960}
    [(first, then), *_] = made.changes()
    assert first == "policies.default.engine.options.context = 8192"
    assert then.batch_tokens() == {"default": 8192}
    assert then.gpu_total < made.gpu_total
    short = {"use": "vllm", "options": {"context": 4096}}
    assert plan(folder, "8x80", engine=short, training={"max_tokens": 1024}).batch_tokens() == {
        "default": 4096
    }


def test_vllm_takes_its_share_of_the_gpu(folder: Path) -> None:
    parts = plan(folder, "8x80").engine_parts()
    assert sum(parts.values()) == int(0.3 * 80 * GIB)
    # 2 * 36 layers * 8 heads * 128 * 2 bytes
    assert plan(folder, "8x80").cached_tokens()["default"] == parts[
        "default: engine's KV cache"
    ] // (144 * 1024)


def test_an_engine_on_several_gpus_has_a_share_of_the_model_and_of_the_cache_on_each(
    folder: Path,
) -> None:
    def shared(gpus: int, of: str = "8x80") -> MemoryPlan:
        options = {"context": 4096, "tensor_parallel_size": gpus,
                   "arguments": {"gpu_memory_utilization": 0.3}}  # fmt: skip
        return plan(folder, of, engine={"use": "vllm", "options": options})

    one, four = shared(1), shared(4)
    for plan_of, gpus in ((one, 1), (four, 4)):
        weights, cache = plan_of.engine_parts().values()
        assert weights == 2 * 8_190_735_360 // gpus
        assert weights + cache == int(0.3 * 80 * GIB)
        assert plan_of.cached_tokens()["default"] == cache // (144 * 1024 // gpus)
    # Its 8 heads of keys are one for each of 8 GPUs, and two GPUs of 16 share one.
    sixteen, eight = shared(16, "16x80"), shared(8)
    caches = [list(each.engine_parts().values())[1] for each in (eight, sixteen)]
    per_token = [cache // each.cached_tokens()["default"]
                 for cache, each in zip(caches, (eight, sixteen), strict=True)]  # fmt: skip
    assert per_token == [18 * 1024] * 2
    with pytest.raises(UsageError, match=r"tensor_parallel_size is 4, and --gpus says .* are 2"):
        shared(4, "2x80")


@pytest.mark.parametrize("text", ["", "8", "0x80", "8x0", "8x", "eightx80"])
def test_other_spellings_of_gpus_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="8x80"):
        Gpus.parse(text)


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(cli, ["plan", *arguments, "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_the_recipe_for_eight_gpus_fits_them(folder: Path) -> None:
    model = ("--set", f"policies.default.model={folder}")
    code, found = run("qwen3-8b-8xgpu", "--gpus", "1x80", "--engines-apart", *model)
    assert (code, found["gpu_fits"]) == (0, True)
    code, found = run("qwen3-8b-8xgpu", "--gpus", "1x24", "--ram", "8", "--engines-apart", *model)
    assert (code, found["gpu_fits"], found["ram_fits"]) == (3, False, False)
    assert found["changes"]


def test_the_host_of_all_ranks_is_printed(folder: Path) -> None:
    changes = {"model": str(folder), "dtype": "bfloat16", "engine.device": "cpu"}
    changes |= {"training.device": "auto", "training.processes": "2", "training.offload": "true"}
    sets = [f"--set=policies.default.{key}={value}" for key, value in changes.items()]
    result = CliRunner().invoke(cli, ["plan", "quickstart", "--gpus", "2x16", "--ram", "8", *sets])
    assert result.exit_code == 3
    lines = result.stdout.splitlines()
    [one] = [float(line.split()[0]) for line in lines if line.endswith(" of 8 GiB")]
    [both] = [float(line.split()[0]) for line in lines if "for all ranks on one machine" in line]
    assert both == pytest.approx(2 * one, abs=0.2)
    assert not any("offload" in line for line in lines)


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys; from headrace.services.operate.cli import cli;"
        "cli(['plan', 'quickstart', '--gpus', '1x24'], standalone_mode=False);"
        "assert 'torch' not in sys.modules"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "fits" in result.stdout
