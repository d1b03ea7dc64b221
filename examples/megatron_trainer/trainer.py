"""A trainer of your own: GRPO's loss on NVIDIA's Megatron-Core, in two processes with one model.

headrace run ../accelerate_trainer/quickstart.toml --check 'reward>=0.95'    # in one terminal
python trainer.py                                                            # in another one

Rank 0 joins the run and starts the other ranks. Each has its part of every matrix.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from parallel_model import ParallelModel, is_divided
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from headrace import Checkpoint, PackedMicroBatch, TrainerClient, TrainingBatch, plan

RANKS = 2
SAVED = Path("megatron-checkpoints")
EVERY, KEPT = 5, 2
"""Versions from one checkpoint to the next, and how many stay."""
MAX_TOKENS = 1024
LEARNING_RATE, CLIP, MAX_NORM = 4e-3, 0.2, 1.0


class ParallelTrainer:
    """A rank's part of a model and its optimizer. All ranks must call the same methods."""

    def __init__(self, folder: Path, seed: int) -> None:
        """`folder` has the model. Weights that it lacks are random, from the seed."""
        torch.use_deterministic_algorithms(True)  # Then a version can be made again bit by bit.
        self.model = ParallelModel(folder)
        torch.manual_seed(seed)
        files = sorted(folder.glob("*.safetensors"))
        if files:
            self.model.load({name: one for file in files for name, one in load_file(file).items()})
        else:
            made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
            self.model.load(made.state_dict())
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
        )

    def update(self, batch: TrainingBatch) -> float | None:
        """Makes one update and returns the loss. None if it is not finite: then nothing changed."""
        total = 0.0
        self.optimizer.zero_grad()
        for micro in plan(batch, ranks=1, max_tokens=MAX_TOKENS)[0]:
            loss = self.loss(micro) / batch.tokens
            loss.backward()
            total += float(loss.detach())
        self.model.add_up_gradients()
        norm = self.norm()
        if not math.isfinite(total) or not math.isfinite(norm):
            return None
        for one in self.parameters:
            one.grad.mul_(min(1.0, MAX_NORM / (norm + 1e-6)))
        self.optimizer.step()
        return total

    def norm(self) -> float:
        """Returns the norm of all gradients. What all ranks have counts once."""
        squares = torch.zeros(2)  # of what all ranks have, and of what each has a part of
        for one in self.parameters:
            squares[int(is_divided(one))] += one.grad.square().sum()
        dist.all_reduce(squares[1:], group=self.model.group)
        return math.sqrt(float(squares.sum()))

    def loss(self, micro: PackedMicroBatch) -> Tensor:
        """Returns the sum of the losses of a micro-batch's tokens."""
        before, advantages = (
            torch.from_numpy(values[micro.loss_mask])
            for values in (micro.logprobs, micro.advantages)
        )
        ratio = (self.logprobs(micro) - before).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        return -torch.min(ratio * advantages, clipped * advantages).sum()

    def logprobs(self, micro: PackedMicroBatch) -> Tensor:
        """Returns the logprobs of the trained tokens, in nats, after temperature and masks.

        Each rank has the logits of its part of the vocabulary. They are never put together.
        """
        tokens, positions = torch.from_numpy(micro.tokens), torch.from_numpy(micro.positions)
        logits = self.model(tokens, positions, torch.from_numpy(micro.cu_seqlens))
        chosen = torch.from_numpy(micro.loss_mask.nonzero()[0])
        temperatures = torch.from_numpy(micro.temperatures[micro.loss_mask])
        logits = logits[chosen - 1].float() / temperatures[:, None]
        allowed = torch.from_numpy(micro.allowed(self.model.vocabulary))
        own = allowed.chunk(dist.get_world_size(), 1)[dist.get_rank()]
        logits = logits.masked_fill(~own[micro.sampling[micro.loss_mask]], -math.inf)
        return -vocab_parallel_cross_entropy(logits, tokens[chosen])

    def save(self, checkpoint: Checkpoint) -> None:
        """Saves model and optimizer with the checkpoint. It exists whole or not at all."""
        partial = SAVED / "partial"
        partial.mkdir(parents=True, exist_ok=True)
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, partial / f"rank-{dist.get_rank()}.pt")
        dist.barrier()
        if dist.get_rank() == 0:
            (partial / "checkpoint.json").write_text(json.dumps(checkpoint.to_tree()))
            folder = SAVED / f"v{checkpoint.version:06d}"
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
            for old in sorted(SAVED.glob("v*"))[:-KEPT]:
                shutil.rmtree(old)

    def load(self, checkpoint: Checkpoint) -> None:
        """Loads what `save` saved."""
        file = SAVED / f"v{checkpoint.version:06d}" / f"rank-{dist.get_rank()}.pt"
        state = torch.load(file)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def saved_checkpoints() -> list[Checkpoint]:
    """Returns the checkpoints that are whole."""
    files = SAVED.glob("v*/checkpoint.json")
    return [Checkpoint.of_tree(json.loads(file.read_text())) for file in files]


def from_rank_0(value: Any = None) -> Any:
    """Returns the value that rank 0 gives, in all ranks."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def batches(client: TrainerClient | None) -> Iterator[TrainingBatch]:
    """Yields the batches that rank 0 reads, in all ranks."""
    if client is None:
        while (batch := from_rank_0()) is not None:
            yield batch
        return
    for batch in client.batches():
        yield from_rank_0(batch)
    from_rank_0(None)


def main(client: TrainerClient | None) -> None:
    """Trains until the run ends. Only rank 0 has a client."""
    start = None
    if client is not None:
        seed = client.recipe.policies["default"].seed
        start = client.model_folder, seed, client.resume(saved_checkpoints())
    folder, seed, resumed = from_rank_0(start)
    trainer = ParallelTrainer(folder, seed)

    def publish(version: int, metrics: dict[str, float]) -> Checkpoint | None:
        weights = dict(trainer.model.whole())  # All ranks send their parts.
        return client.publish(version, weights, metrics) if client is not None else None

    if resumed is not None:
        trainer.load(resumed)
    publish(0 if resumed is None else resumed.version, {})
    for batch in batches(client):
        loss = trainer.update(batch)
        if loss is None:
            if client is not None:
                client.skip(batch.version, "the loss is not finite")
            continue
        checkpoint = publish(batch.version, {"loss": loss})
        if batch.version % EVERY == 0 and not batch.published:
            trainer.save(from_rank_0(checkpoint))


def start_others() -> list[subprocess.Popen[bytes]]:
    """Starts the ranks above 0. They end with this process, however it ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(RANKS)}
    return [
        subprocess.Popen(
            [sys.executable, __file__, "follow"],
            env=os.environ | {"RANK": str(rank)},
            stdin=subprocess.PIPE,
        )
        for rank in range(1, RANKS)
    ]


def end_with_rank_0() -> None:
    """Ends this process when rank 0 is gone, which closes the standard input."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    others = [] if sys.argv[1:] == ["follow"] else start_others()
    if not others:
        threading.Thread(target=end_with_rank_0, daemon=True).start()
    # Rank 0 may wait long for a batch, and the others for rank 0.
    dist.init_process_group("gloo", timeout=timedelta(days=365))
    if others:
        with TrainerClient() as leading:
            main(leading)
    else:
        main(None)
