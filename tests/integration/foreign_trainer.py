"""A trainer of another team, in numpy: momentum on made-up gradients. Run as a program.

Its argument is a fault that the kit must name, or `none`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from headrace import Checkpoint, TrainerClient, TrainingBatch, plan
from headrace.services.models.weights import weights_digest
from headrace.trainer import publish, versions

FAULT = sys.argv[1]
SAVED = Path("saved.json")


class MomentumTrainer:
    """Weights and momentum. A batch's gradient is a sum over its tokens."""

    def __init__(self) -> None:
        self.weights = np.zeros(1024, np.float32)
        self.momentum = np.zeros(1024, np.float32)

    def update(self, batch: TrainingBatch) -> bool:
        """Returns whether it made an update."""
        gradient = np.zeros(1024, np.float32)
        for micro in plan(batch, ranks=1, max_tokens=64)[0]:
            trained = micro.loss_mask
            np.add.at(gradient, micro.tokens[trained] % 1024, micro.advantages[trained])
        if not np.isfinite(gradient).all():
            return False
        self.momentum = np.float32(0.9) * self.momentum + gradient
        self.weights = self.weights + np.float32(0.01) * self.momentum
        return True

    def save(self, checkpoint: Checkpoint) -> None:
        state = {"weights": self.weights.tolist(), "momentum": self.momentum.tolist()}
        partial = SAVED.with_suffix(".partial")
        partial.write_text(json.dumps({"checkpoint": checkpoint.to_tree(), **state}))
        partial.replace(SAVED)

    def load(self) -> list[Checkpoint]:
        """Loads its state, and returns its checkpoints."""
        if not SAVED.exists():
            return []
        saved = json.loads(SAVED.read_text())
        self.weights = np.array(saved["weights"], np.float32)
        if FAULT != "lost optimizer state":
            self.momentum = np.array(saved["momentum"], np.float32)
        return [Checkpoint.of_tree(saved["checkpoint"])]


def seed_fault() -> None:
    """Breaks what `TrainerClient` would not let a trainer break."""
    whole: Callable[..., Any] = publish.Publisher._write

    async def twice(self: publish.Publisher, *args: Any, **fields: Any) -> None:
        await whole(self, *args, **fields)
        await whole(self, *args, **fields)

    async def without_3(self: publish.Publisher, version: int, *args: Any, **fields: Any) -> None:
        if version != 3:
            await whole(self, version, *args, **fields)

    async def unfenced(self: publish.Publisher, *args: Any, **fields: Any) -> None:
        log, send = self.log, self.log.send

        async def alone(writer: object, events: list[Any], signer: object = None) -> list[Any]:
            return [await send(event) for event in events]

        object.__setattr__(log, "send_all", alone)
        await whole(self, *args, **fields)

    faults: dict[str, Any] = {
        "double publication": twice, "skipped version": without_3, "not fenced": unfenced,
    }  # fmt: skip
    if FAULT in faults:
        publish.Publisher._write = faults[FAULT]  # type: ignore[method-assign]
    if FAULT == "wrong digest":
        vars(versions)["weights_digest"] = lambda *sources: weights_digest(*sources)[::-1]


def main() -> None:
    seed_fault()
    trainer = MomentumTrainer()
    with TrainerClient() as client:
        start = client.resume(trainer.load())
        if start is None:
            trainer = MomentumTrainer()
        client.publish(0 if start is None else start.version, {"w": trainer.weights})
        for batch in client.batches():
            if not trainer.update(batch):
                client.skip(batch.version, "its gradient is not finite")
                continue
            checkpoint = client.publish(batch.version, {"w": trainer.weights})
            if batch.version % 2 == 0:
                trainer.save(checkpoint)


if __name__ == "__main__":
    main()
