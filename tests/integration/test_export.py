"""An exported folder computes what the serving engine computes, and a run starts from a version."""

from __future__ import annotations

import asyncio
import json
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
from headrace.services.models.lora import PREFIX
from headrace.services.models.weights import model_folder, weights_digest
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.export.model_export import export_version
from tests.integration.test_other_teams import headrace

SHORT = ("--set", "stop.versions=3", "--set", "stop.reward=9")
DELTAS = (
    *("--set", "policies.default.dtype=bfloat16"),
    *("--set", "policies.default.training.learning_rate=1e-6"),
)
LORA = ("--set", 'policies.default.lora={"rank": 4, "alpha": 16, "targets": ["q_proj", "o_proj"]}')


def environment_of(stack: local.LocalStack, folder: Path, namespace: str) -> dict[str, str]:
    return {
        "HEADRACE_BOOTSTRAP_SERVERS": stack.bootstrap_servers,
        "HEADRACE_REGISTRY_URL": stack.registry_url,
        "HEADRACE_NAMESPACE": namespace,
        "HEADRACE_STATE": str(folder),
        "HEADRACE_MODELS": str(folder / "models"),
    }


def cluster_of(stack: local.LocalStack, folder: Path, namespace: str) -> ClusterConfig:
    return ClusterConfig(folder, stack.bootstrap_servers, stack.registry_url, namespace=namespace)


def published(cluster: ClusterConfig, version: int) -> PolicyPublished:
    async def read() -> PolicyPublished:
        async with open_namespace(cluster, "test") as (log, _):
            found = await find_published(log, "default", version)
        assert found is not None
        return found

    return asyncio.run(read())


def prompts(count: int) -> list[torch.Tensor]:
    random = Random(0)
    return [
        torch.tensor([[random.randrange(256) for _ in range(random.randint(1, 40))]])
        for _ in range(count)
    ]


def served_logits(
    cluster: ClusterConfig, version: PolicyPublished, inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The logits of the model that the engine serves a version with."""

    async def serve() -> list[torch.Tensor]:
        engine = TorchEngine(
            EngineSetup(model_folder("tiny-llama"), 2, device="cpu", dtype=version.dtype)
        )
        local_weights = LocalWeights(cluster.open_blobs(), cluster.state / "served")
        await engine.load(local_weights.weights(version))
        with torch.inference_mode():
            found = [engine._batches["default"].model(one).logits for one in inputs]
        await engine.close(0)
        return found

    return asyncio.run(serve())


def exported_logits(folder: Path, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    read: Any = AutoModelForCausalLM.from_pretrained
    model = read(folder, dtype="auto", attn_implementation="sdpa").eval()
    with torch.inference_mode():
        return [model(one).logits for one in inputs]


def furthest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float((one.float() - other.float()).abs().max()) for one, other in pairs)


def check_tokenizer(folder: Path) -> None:
    text = "Go left.\nThen  right!"
    ids = AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False)
    assert ids == Tokenizer(model_folder("tiny-llama")).encode(text)


def check_deltas(cluster: ClusterConfig, tmp_path: Path, count: int) -> None:
    """Whole weights after deltas, as one file and as several, are the served ones bit by bit."""
    version = published(cluster, 3)
    assert version.deltas
    inputs = prompts(count)
    served = served_logits(cluster, version, inputs)
    for name, shard_bytes in (("one", 1 << 30), ("several", 40_000)):
        folder = tmp_path / name
        facts = export_version(
            cluster, None, 3, folder, shard_bytes=shard_bytes, say=lambda line: None
        )
        files = list(folder.glob("*.safetensors"))
        assert (len(files) > 1) == (name == "several")
        assert weights_digest(*files) == version.digest
        assert facts == json.loads((folder / "headrace.json").read_text())
        assert (facts["version"], facts["digest"]) == (3, version.digest.hex())
        assert facts["packages"].keys() >= {"torch", "transformers"}
        assert furthest(exported_logits(folder, inputs), served) == 0
        check_tokenizer(folder)


def check_adapter(cluster: ClusterConfig, tmp_path: Path, count: int) -> None:
    """A merged adapter computes what is served; unmerged, its folder has the served tensors."""
    version = published(cluster, 3)
    assert version.adapter is not None
    inputs = prompts(count)
    served = served_logits(cluster, version, inputs)
    merged, peft = tmp_path / "merged", tmp_path / "peft"
    export_version(cluster, None, None, merged, merge=True, say=lambda line: None)
    assert furthest(exported_logits(merged, inputs), served) <= 1e-5
    check_tokenizer(merged)

    export_version(cluster, None, None, peft, say=lambda line: None)
    assert weights_digest(peft / "adapter_model.safetensors") == version.digest
    assert weights_digest(peft / "base" / "model.safetensors") == version.adapter.base_digest
    assert furthest(exported_logits(peft / "base", inputs), served) > 1e-5
    config = json.loads((peft / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(peft / "base")
    assert not (peft / "config.json").exists()
    check_tokenizer(peft)
    # PEFT's own formula on its own names gives the merged tensors.
    base, adapter = (
        load_file(peft / "base" / "model.safetensors"),
        load_file(peft / "adapter_model.safetensors"),
    )
    whole = load_file(merged / "model.safetensors")
    for layer in config["target_modules"]:
        a, b = (adapter[f"{PREFIX}{layer}.lora_{one}.weight"] for one in "AB")
        change = b @ a * (config["lora_alpha"] / config["r"])
        torch.testing.assert_close(whole[f"{layer}.weight"], base[f"{layer}.weight"] + change)
        assert change.abs().max() > 0


@pytest.mark.parametrize("count", [3, pytest.param(100, marks=pytest.mark.long)])
def test_exported_folders_compute_what_is_served(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str, count: int
) -> None:
    environment = environment_of(local_stack, tmp_path, namespace)
    headrace(("run", "quickstart", *SHORT, *DELTAS, "--quiet"), environment)
    check_deltas(cluster_of(local_stack, tmp_path, namespace), tmp_path, count)
    lora = f"{namespace}-lora"
    headrace(
        ("run", "quickstart", *SHORT, *LORA, "--quiet"),
        environment_of(local_stack, tmp_path, lora),
    )
    check_adapter(cluster_of(local_stack, tmp_path, lora), tmp_path, count)
