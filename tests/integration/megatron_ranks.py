"""Two ranks of examples/megatron_trainer on known batches: `megatron_ranks.py MODEL FOLDER`.

Rank 0 writes to FOLDER `logprobs`, JSON lists by sample, and `weights.safetensors`, those after the
updates.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from headrace import TrainingBatch, plan
from headrace.trainer.contract.training_batch import SampleOrigin
from headrace.trainer.contract.weight_files import pack_weights
from tests.unit.trainer import ranks_program

EXAMPLES = Path(__file__).parents[2] / "examples"
UPDATES = 3


def example(name: str) -> Any:
    """The module of an example's trainer."""
    folder = EXAMPLES / name
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(name, folder / "trainer.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batch(version: int) -> TrainingBatch:
    """Seven samples of different lengths, none of them demonstrated."""
    sequences = [one for update in ranks_program.batch(version) for one in update.sequences]
    sampled = [one for one in sequences if not one.demonstrated.any()]
    origins = {one.sample: SampleOrigin(0, one.sample, 0, 1.0, 1.0, 0) for one in sampled}
    return TrainingBatch(version, False, sampled, origins, 0, {})


def main(model: Path, folder: Path) -> None:
    """Is one rank."""
    dist.init_process_group("gloo")
    trainer = example("megatron_trainer").ParallelTrainer(model, seed=0)
    logprobs: dict[int, list[float]] = {}
    for micro in plan(batch(1), ranks=1, max_tokens=64)[0]:
        found = trainer.logprobs(micro).tolist()
        for sample, one in zip(micro.samples[micro.loss_mask].tolist(), found, strict=True):
            logprobs.setdefault(sample, []).append(one)
    for version in range(1, 1 + UPDATES):
        trainer.update(batch(version))
    weights = dict(trainer.model.whole())
    if dist.get_rank() == 0:
        (folder / "logprobs").write_text(json.dumps(logprobs))
        (folder / "weights.safetensors").write_bytes(pack_weights(weights))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
