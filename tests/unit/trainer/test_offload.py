"""The optimizer in the host's memory: the same weights, and where each tensor is."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from headrace.schemas.recipe.policy import Policy
from headrace.services.models.weights import model_folder
from headrace.services.operate.plan.memory_parts import TrainerMemory
from headrace.services.operate.plan.model_shape import read_shape
from headrace.trainer.forward.master_weights import MasterWeights
from headrace.trainer.learner import Learner
from headrace.trainer.model_loading import load_model
from headrace.trainer.ranks.ranks import Ranks
from tests.unit.trainer.ranks_program import batch
from tests.unit.trainer.test_ranks import a_folder

GIB = 1 << 30
HOST, GPU = torch.device("cpu"), torch.device("cuda", 0)
SETTINGS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "float32", "kl_coefficient": 0.1, "max_tokens": 16, "epochs": 2},
    {"dtype": "bfloat16", "kl_coefficient": 0.1, "max_tokens": 16, "epochs": 2},
]


def policy_of(dtype: str, offload: bool, model: str, **training: Any) -> Policy:
    """A recipe refuses `offload` on a CPU, where it saves nothing. Here it shows the arithmetic.

    In float32 the copies share the memory of the master weights there; in bfloat16 they do not.
    """
    settings = {"learning_rate": 1e-2, "device": "cpu", "max_tokens": 64, **training}
    keys = {"model": model, "dtype": dtype, "training": settings}
    policy = Policy.model_validate(keys)
    assert policy.training is not None
    offloaded = policy.training.model_copy(update={"offload": offload})
    return policy.model_copy(update={"training": offloaded})


def learner(dtype: str, offload: bool, **training: Any) -> Learner:
    return Learner(model_folder("tiny-llama"), policy_of(dtype, offload, "tiny-llama", **training))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_weights_are_equal_and_checkpoints_move_both_ways(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    plain, kept = learner(offload=False, **settings), learner(offload=True, **settings)
    for version in (1, 2):
        assert kept.train(batch(version)) == plain.train(batch(version))
    assert kept.weights() == plain.weights()
    for one, file in ((plain, "plain"), (kept, "kept")):
        one.save(tmp_path / file)
    assert (tmp_path / "kept").read_bytes() == (tmp_path / "plain").read_bytes()
    plain.load(tmp_path / "kept")
    kept.load(tmp_path / "plain")
    kept.train(batch(3))
    plain.train(batch(3))
    assert kept.weights() == plain.weights()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_optimizer_and_its_weights_are_in_the_host_and_the_model_is_not(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """On fake tensors, which refuse operations on tensors of two devices, as a GPU would."""

    def set_data(one: Any, data: Any) -> None:
        Tensor.data.__set__(one, data)  # type: ignore[attr-defined]
        one.fake_device = data.fake_device  # torch forgets it

    data = property(Tensor.data.__get__, set_data)  # type: ignore[attr-defined]
    monkeypatch.setattr(FakeTensor, "data", data, raising=False)
    with FakeTensorMode():
        model = nn.Sequential(nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 9))
        model.register_buffer("table", torch.zeros(3))
        masters = MasterWeights(model, dtype, GPU)
        optimizer = torch.optim.AdamW(masters.by_name.values())
        optimizer.register_step_post_hook(masters.update_copies)
        assert model(torch.zeros(5, dtype=torch.long, device=GPU)).device == GPU
        for _ in range(2):  # A second micro-batch is added to the first.
            for one in masters.in_model:
                one.grad = torch.ones_like(one)
                for hook in (one._post_accumulate_grad_hooks or {}).values():
                    hook(one)
        torch.nn.utils.clip_grad_norm_(masters.by_name.values(), 1.0)
        optimizer.step()
        assert {(one.device, one.dtype) for one in model.parameters()} == {(GPU, dtype)}
        assert model.table.device == GPU
        assert all(one.grad is None for one in model.parameters())
        kept = [*masters.by_name.values(), *(one.grad for one in masters.by_name.values())]
        kept += [one for state in optimizer.state.values() for one in state.values()]
        assert {(one.device, one.dtype) for one in kept if one is not None} == {
            (HOST, torch.float32)
        }
        assert len(kept) == 5 * len(masters.in_model)  # with moments and counts


@pytest.mark.parametrize("offload", [False, True])
def test_several_ranks_offload_as_torch_does(offload: bool) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = load_model(model_folder("tiny-llama"), seed=0)
        Ranks(0, 2).shard(model, torch.bfloat16, HOST, offload)
        layers = [one for one in model.modules() if isinstance(one, FSDPModule)]
        groups: list[Any] = [one._get_fsdp_state()._fsdp_param_group for one in layers]
        assert len(groups) == 3  # two layers, and what is around them
        assert [isinstance(one.offload_policy, CPUOffloadPolicy) for one in groups] == [offload] * 3
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("changes", "training", "words"),
    [
        ({}, {"device": "cpu"}, "in the host's memory already. Remove `offload`"),
        ({"lora": {}}, {}, "the optimizer of an adapter is small"),
        ({}, {"external": True}, "`offload`: only Headrace's own trainer reads this"),
    ],
)
def test_offload_is_refused_if_it_would_save_nothing(
    changes: dict[str, Any], training: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        Policy.model_validate({"model": "m", "training": {"offload": True, **training}, **changes})


def resident(name: str) -> int:
    """This process's VmRSS or VmHWM in bytes, as Linux says it."""
    [line] = [one for one in Path("/proc/self/status").read_text().splitlines() if name in one]
    return 1024 * int(line.split()[1])


def peak_of_a_version(folder: Path) -> tuple[int, int, int, int]:
    """Trains and writes one version. Returns the model's parameters, what this process took before
    and at its peak, and what the planner says that training takes."""
    before = resident("VmRSS")
    settings = {"learning_rate": 1e-5, "activation_checkpointing": True}
    policy = policy_of("bfloat16", True, str(folder), **settings)
    one = Learner(folder, policy)
    one.train(batch(1)[:1])
    one.write_weights(folder / "version-1")
    memory = TrainerMemory(policy, read_shape(folder), on_gpu=False)
    planned = memory.total + sum(memory.host_parts().values())
    parameters = sum(p.numel() for p in one._model.parameters())
    return parameters, before, resident("VmHWM"), planned


def memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.long
@pytest.mark.parametrize(
    ("width", "layers", "billions"),
    [
        (768, 10, 0.1),
        pytest.param(
            *(2304, 12, 1.0),
            marks=pytest.mark.skipif(memory() < 22 * GIB, reason="needs 22 GiB of memory"),
        ),
    ],
)
def test_a_version_of_a_random_model_takes_18_bytes_a_parameter(
    tmp_path: Path, width: int, layers: int, billions: float
) -> None:
    """4 each for weights and gradients, 8 for the moments, and 2 for the copies in bfloat16.

    On a CPU all of them are in the host's memory. A billion parameters take less than 24 GiB.
    """
    size = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    heads = {"num_attention_heads": width // 64, "head_dim": 64}
    folder = a_folder(tmp_path / "model", **size, **heads, num_key_value_heads=width // 64)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        parameters, before, peak, planned = pool.submit(peak_of_a_version, folder).result()
    taken = peak - before
    print(f"{parameters:,} parameters, peak {peak / GIB:.2f} GiB, {before / GIB:.2f} GiB before")
    print(f"planned {planned / GIB:.2f} GiB, {planned / taken:.2f} of what was taken")
    assert parameters == pytest.approx(billions * 1e9, rel=0.1)
    assert peak < min(18 * parameters + 1.5 * GIB, 24 * GIB)
    assert planned == pytest.approx(taken, rel=0.15)
