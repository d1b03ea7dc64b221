"""A learner without a model: its weights are a digest of all that it was trained on, in order."""

from __future__ import annotations

import hashlib
import json
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from headrace.services.models.weights import weights_digest
from headrace.trainer.checkpoint import Checkpoint, Checkpoints
from headrace.trainer.sequences import (
    Floats,
    Stopped,
    TokenSequence,
    UnusableBatch,
    UpdateBatch,
)

VOCABULARY = 258
UNCHANGED = 4096
"""Bytes of the weights that training leaves alone."""
BEGUN_FROM = "begun_from"
"""The metric that tells which weights an update began from."""


class DigestLearner:
    """Stands in for `headrace.trainer.learner.Learner`.

    The same batches give the same weights, unless `chance` is given: then never. One in
    `unusable_in` batches can't be trained on, by its content; 0 is none.
    """

    vocabulary = VOCABULARY
    processes = 1

    def __init__(
        self,
        chance: Random | None = None,
        unusable_in: int = 0,
        on_saving: Callable[[Path], None] = lambda _: None,
        policy: str = "default",
    ) -> None:
        """`on_saving` is called in the middle of writing a checkpoint, with the half file. Each
        `policy` has other weights from the beginning."""
        self.updates_done = 0
        self.start_logprobs: list[tuple[TokenSequence, Floats]] = []
        """It has no logprobs, so each batch's are all unknown."""
        self._chance = chance
        self._unusable_in = unusable_in
        self._on_saving = on_saving
        name = "" if policy == "default" else f" of {policy}"
        self._state = hashlib.sha256(f"version 0{name}".encode()).digest()

    def weights(self) -> bytes:
        """A safetensors file, of which few bytes change: deltas are worth it."""
        return safetensors(self._state + bytes(UNCHANGED))

    def train(
        self, updates: Sequence[UpdateBatch], stop: threading.Event | None = None
    ) -> dict[str, float]:
        """Takes a batch into the digest. UnusableBatch and Stopped change nothing."""
        if stop is not None and stop.is_set():
            raise Stopped("stopped before the version was whole")
        begun_from = number_of(weights_digest(self.weights()))
        digest = hashlib.sha256(self._state)
        for update in updates:
            for sequence in update.sequences:
                digest.update(sequence.tokens.tobytes() + sequence.advantages.tobytes())
                if sequence.teacher is not None:
                    digest.update(sequence.teacher.tobytes())
        if self._unusable_in and updates and digest.digest()[0] % self._unusable_in == 0:
            raise UnusableBatch("the loss is not finite, by chance")
        if updates and self._chance is not None:
            digest.update(self._chance.randbytes(8))
        if updates:
            self._state = digest.digest()
        self.updates_done += len(updates)
        return {"loss": 0.0, "dropped_samples": 0.0, BEGUN_FROM: begun_from}

    def save(self, path: Path) -> None:
        """Writes the state, half and then whole."""
        state = self._state + self.updates_done.to_bytes(8, "little")
        path.write_bytes(state[:20])
        self._on_saving(path)
        path.write_bytes(state)

    def load(self, path: Path) -> None:
        """Goes on from what `save` wrote."""
        state = path.read_bytes()
        self._state, self.updates_done = state[:32], int.from_bytes(state[32:], "little")


def bring_foreign(folder: Path, chance: Random) -> None:
    """Puts a sound checkpoint of another log among a trainer's own: of a version not far off."""
    versions = [int(one.name[1:]) for one in folder.glob("v*")]
    foreign = Checkpoint(max(versions, default=0) + chance.randint(0, 2), 0, chance.randbytes(32))
    state = chance.randbytes(40)
    Checkpoints(folder, keep=len(versions) + 1).save(foreign, lambda path: _write(path, state))


def _write(path: Path, state: bytes) -> None:
    path.write_bytes(state)


def number_of(digest: bytes) -> float:
    """A number that tells digests apart."""
    return float(zlib.crc32(digest))


def safetensors(content: bytes) -> bytes:
    """A sound safetensors file of one tensor of bytes."""
    tensor = {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}
    header = json.dumps({"w": tensor}).encode()
    return len(header).to_bytes(8, "little") + header + content
