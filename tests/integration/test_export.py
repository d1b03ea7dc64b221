"""An exported folder computes what the serving engine computes, and a run starts from a version."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.infra import local
from headrace.schemas.events import PolicyPublished
from headrace.services.inference.engine import EngineSetup
from headrace.services.inference.engines.torch_engine import TorchEngine
from headrace.services.inference.local_weights import LocalWeights
from headrace.services.inference.service import find_published
from headrace.services.inference.tokenizer import Tokenizer
from headrace.services.models.blobs import BlobStore
from headrace.services.models.even_rounding import WIDE_ATTENTION
from headrace.services.models.lora import PREFIX
from headrace.services.models.weights import model_folder, weights_digest
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.export.model_export import export_version
from headrace.services.operate.run_versions import RunVersion, description_of
from tests.commands import cluster_variables
from tests.integration.test_other_teams import headrace
from tests.integration.test_trainer import RECIPE, Bench, on_memory
from tests.integration.test_trainer_adapters import with_adapters

COUNTS = [3, pytest.param(100, marks=pytest.mark.long)]
"""How many prompts are compared."""


def prompts(count: int) -> list[torch.Tensor]:
    random = Random(0)
    return [
        torch.tensor([[random.randrange(256) for _ in range(random.randint(1, 40))]])
        for _ in range(count)
    ]


async def served_logits(
    blobs: BlobStore, version: PolicyPublished, scratch: Path, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The logits of the model that the engine serves a version with."""
    engine = TorchEngine(
        EngineSetup(model_folder("tiny-llama"), 2, device="cpu", dtype=version.dtype)
    )
    await engine.load(LocalWeights(blobs, scratch / "served").weights(version))
    with torch.inference_mode():
        found = [engine._batches[version.policy].model(one).logits for one in inputs]
    await engine.close(0)
    return found


def exported_logits(folder: Path, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    read: Any = AutoModelForCausalLM.from_pretrained
    model = read(folder, dtype="auto", attn_implementation=WIDE_ATTENTION).eval()
    with torch.inference_mode():
        return [model(one).logits for one in inputs]


def furthest(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float((one.float() - other.float()).abs().max()) for one, other in pairs)


def check_tokenizer(folder: Path) -> None:
    text = "Go left.\nThen  right!"
    ids = AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False)
    assert ids == Tokenizer(model_folder("tiny-llama")).encode(text)


def run_version(published: PolicyPublished) -> RunVersion:
    return RunVersion("test", published, description_of("tiny-llama"), {})


@pytest.mark.parametrize("count", COUNTS)
def test_whole_weights_after_deltas_are_the_served_ones_bit_by_bit(
    tmp_path: Path, count: int
) -> None:
    async def scenario(bench: Bench) -> None:
        for number in range(1, 4):
            await bench.submit(number)
        version = (await bench.train(3))[-1]
        assert len(version.deltas) == 3
        inputs = prompts(count)
        served = await served_logits(bench.blobs, version, bench.state, inputs)
        for name, shard_bytes in (("one", 1 << 30), ("several", 40_000)):
            folder = tmp_path / name
            export_version(run_version(version), bench.blobs, folder, shard_bytes=shard_bytes)
            files = list(folder.glob("*.safetensors"))
            assert (len(files) > 1) == (name == "several")
            assert weights_digest(*files) == version.digest
            assert furthest(exported_logits(folder, inputs), served) == 0
            check_tokenizer(folder)

    tree = RECIPE.model_dump(mode="json")
    for policy in tree["policies"].values():
        policy["dtype"] = "bfloat16"
    tree["policies"]["learner"]["training"]["learning_rate"] = 1e-6
    on_memory(scenario, tmp_path, type(RECIPE).model_validate(tree))


@pytest.mark.parametrize("count", COUNTS)
def test_an_adapter_computes_what_is_served_merged_and_apart(tmp_path: Path, count: int) -> None:
    async def scenario(bench: Bench) -> None:
        for number in range(1, 4):
            await bench.submit(number)
        version = (await bench.train(3))[-1]
        assert version.adapter is not None
        inputs = prompts(count)
        served = await served_logits(bench.blobs, version, bench.state, inputs)
        merged, peft = tmp_path / "merged", tmp_path / "peft"
        facts = export_version(run_version(version), bench.blobs, merged, layout="merged")
        assert facts["merged_digest"] == weights_digest(merged / "model.safetensors").hex()
        assert furthest(exported_logits(merged, inputs), served) <= 1e-5
        check_tokenizer(merged)

        export_version(run_version(version), bench.blobs, peft)
        assert weights_digest(peft / "adapter_model.safetensors") == version.digest
        assert weights_digest(peft / "base/model.safetensors") == version.adapter.base_digest
        assert furthest(exported_logits(peft / "base", inputs), served) > 1e-3
        assert not (peft / "config.json").exists()
        check_tokenizer(peft)
        check_formula(peft, load_file(merged / "model.safetensors"))

    on_memory(scenario, tmp_path, with_adapters())


def check_formula(peft: Path, merged: dict[str, torch.Tensor]) -> None:
    """PEFT's own formula, on its names and its description, gives the merged tensors."""
    config = json.loads((peft / "adapter_config.json").read_text())
    base = load_file(Path(config["base_model_name_or_path"]) / "model.safetensors")
    adapter = load_file(peft / "adapter_model.safetensors")
    assert len(adapter) == 2 * len(config["target_modules"])
    for layer in config["target_modules"]:
        a, b = (adapter[f"{PREFIX}{layer}.lora_{one}.weight"] for one in "AB")
        change = b @ a * (config["lora_alpha"] / config["r"])
        assert change.abs().max() > 0
        base[f"{layer}.weight"] += change
    assert base.keys() == merged.keys()
    for name, tensor in base.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-7, rtol=0)


@pytest.mark.long
def test_a_run_starts_from_a_version_of_another_run(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    environment = {
        **cluster_variables(local_stack, state=tmp_path),
        "HEADRACE_MODELS": str(tmp_path / "models"),
    }
    first, second = {"HEADRACE_NAMESPACE": namespace}, {"HEADRACE_NAMESPACE": f"{namespace}-b"}
    lora = "policies.default.lora={'rank': 4}".replace("'", '"')
    short = ("--quiet", "--set", "stop.reward=9", "--set", "stop.versions=2")
    headrace(("run", "quickstart", *short, "--set", lora), environment | first)
    folder = tmp_path / "exported"
    export = ("export", str(folder), "--version", "1", "--merge", "--json")
    facts = json.loads(headrace(export, environment | first))
    assert facts["packages"].keys() >= {"torch", "transformers"}
    assert (facts["namespace"], facts["policy"], facts["version"]) == (namespace, "default", 1)

    model = ("--set", f"policies.default.model=run:{namespace}/default@1")
    headrace(("apply", "quickstart", *short[1:], *model), environment | second)
    # The same recipe goes on with the version that was recorded.
    headrace(("run", "quickstart", *short, *model), environment | second)

    async def read() -> tuple[PolicyPublished | None, str]:
        cluster = ClusterConfig(
            tmp_path, local_stack.bootstrap_servers, local_stack.registry_url,
            namespace=f"{namespace}-b",
        )  # fmt: skip
        async with open_namespace(cluster, "test") as (log, life):
            recipe = life.recipe()
            return await find_published(log, "default", 0), recipe.policies["default"].model

    published, recorded = asyncio.run(read())
    assert published is not None
    assert published.digest.hex() == facts["merged_digest"]
    assert recorded.startswith(f"run:{namespace}/default@1#")
    # A version of that run is described by the same files, from the cache.
    again = json.loads(headrace(("export", str(folder), "--force", "--json"), environment | second))
    assert again["base_model"] == recorded
    check_tokenizer(folder)
