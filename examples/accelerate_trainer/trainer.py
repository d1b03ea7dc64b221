"""A trainer of your own: GRPO's loss on Hugging Face accelerate, joined to a run by topics.

headrace run quickstart.toml --check 'reward>=0.95'      # in one terminal
python trainer.py                                        # in another one, in the same folder
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM

from headrace import Checkpoint, PackedMicroBatch, TrainerClient, TrainingBatch, plan

SAVED = Path("accelerate-checkpoints")
EVERY, KEPT = 5, 2
"""Versions from one checkpoint to the next, and how many stay."""
MAX_TOKENS = 1024
LEARNING_RATE, CLIP = 4e-3, 0.2


class GrpoTrainer:
    """A model and its optimizer."""

    def __init__(self, folder: Path, seed: int) -> None:
        """`folder` has the model. Weights that it lacks are random, from the seed."""
        self.accelerator = Accelerator()
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True)  # Then a version can be made again bit by bit.
        if any(folder.glob("*.safetensors")):
            model = AutoModelForCausalLM.from_pretrained(folder)
        else:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        model.eval()  # No dropout: the logprobs are compared with those of the engine.
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def weights(self) -> dict[str, Any]:
        """Returns the parameters with transformers' names, tied ones once."""
        model = self.accelerator.unwrap_model(self.model)
        return dict(model.named_parameters())

    def update(self, batch: TrainingBatch) -> float | None:
        """Makes one update and returns the loss. None if it is not finite: then nothing changed."""
        total = 0.0
        self.optimizer.zero_grad()
        for micro in plan(batch, ranks=1, max_tokens=MAX_TOKENS)[0]:
            loss = self.loss(micro) / batch.tokens
            self.accelerator.backward(loss)
            total += float(loss.detach())
        norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0))
        if not math.isfinite(total) or not math.isfinite(norm):
            return None
        self.optimizer.step()
        return total

    def loss(self, micro: PackedMicroBatch) -> torch.Tensor:
        """Returns the sum of the losses of a micro-batch's tokens."""
        device = self.accelerator.device
        ids = torch.from_numpy(micro.tokens[None]).to(device)
        segments = torch.from_numpy(micro.segments).to(device)
        positions = torch.from_numpy(micro.positions[None]).to(device)
        # A token sees the tokens before it in its own sequence, and itself.
        sees = (segments[:, None] == segments).tril()
        logits = self.model(
            input_ids=ids, position_ids=positions, attention_mask=sees[None, None]
        ).logits[0]

        def taken(values: Any) -> torch.Tensor:
            return torch.from_numpy(values[micro.loss_mask]).to(device)

        chosen = torch.from_numpy(micro.loss_mask.nonzero()[0]).to(device)
        logits = logits[chosen - 1].float() / taken(micro.temperatures)[:, None]
        allowed = torch.from_numpy(micro.allowed(logits.shape[-1])).to(device)
        logits = logits.masked_fill(~allowed[taken(micro.sampling)], -math.inf)
        new = logits.log_softmax(-1).gather(-1, ids[0, chosen][:, None])[:, 0]
        advantages = taken(micro.advantages)
        ratio = (new - taken(micro.logprobs)).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        return -torch.min(ratio * advantages, clipped * advantages).sum()

    def save(self, checkpoint: Checkpoint) -> None:
        """Saves model and optimizer with the checkpoint. It exists whole or not at all."""
        partial = SAVED / "partial"
        self.accelerator.save_state(str(partial))
        (partial / "checkpoint.json").write_text(json.dumps(checkpoint.to_tree()))
        folder = SAVED / f"v{checkpoint.version:06d}"
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        for old in sorted(SAVED.glob("v*"))[:-KEPT]:
            shutil.rmtree(old)

    def load(self, checkpoint: Checkpoint) -> None:
        """Loads what `save` saved."""
        self.accelerator.load_state(str(SAVED / f"v{checkpoint.version:06d}"))


def saved_checkpoints() -> list[Checkpoint]:
    """Returns the checkpoints that are whole."""
    files = SAVED.glob("v*/checkpoint.json")
    return [Checkpoint.of_tree(json.loads(file.read_text())) for file in files]


def main(client: TrainerClient) -> None:
    """Trains until the run ends. SIGTERM may end it at any moment: nothing is lost."""
    policy = client.recipe.policies["default"]
    trainer = GrpoTrainer(client.model_folder, policy.seed)
    start = client.resume(saved_checkpoints())
    if start is not None:
        trainer.load(start)
    client.publish(0 if start is None else start.version, trainer.weights())
    for batch in client.batches():
        loss = trainer.update(batch)
        if loss is None:
            client.skip(batch.version, "the loss is not finite")
            continue
        checkpoint = client.publish(batch.version, trainer.weights(), {"loss": loss})
        if batch.version % EVERY == 0 and not batch.published:
            trainer.save(checkpoint)


if __name__ == "__main__":
    with TrainerClient() as client:
        main(client)
