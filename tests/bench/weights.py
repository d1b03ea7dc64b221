"""What a version's delta weighs, and what a receiver needs to have the version.

A Llama of 19.5 million parameters is made here: random, then trained by cross-entropy on bytes of
this repository's own text at 1e-3. From there on it is trained at the learning rates that
reinforcement learning of language models uses, by the trainer's own learner (AdamW, master weights
in float32, bfloat16 published), each update on new text. Every version goes through the trainer's
own store and a receiver's own files, and is compared bit by bit. No network: bytes are what count.

What it is not: a large pretrained model, or rewards of episodes. How many bfloat16 values an update
of AdamW changes depends on the learning rate beside the size of the weights, and on how steady the
gradients' signs are; the weights here have the usual spread of 0.02 or more.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
from torch import Tensor

from headrace.schemas.events import PolicyPublished, Sampling
from headrace.schemas.recipe.policy import Policy
from headrace.services.inference.local_weights import LocalWeights
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.models.weights import model_folder
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.trainer.learner import Learner
from headrace.trainer.losses.loss import MicroBatch
from headrace.trainer.sequences import TokenSequence, UpdateBatch
from headrace.trainer.versions import StoredVersion, VersionStore
from tests.bench.report import Figure

TEXT = Path(__file__).parents[2]
RATES = (1e-6, 5e-6)
VERSIONS = 24
WARM_UP = 30
SEQUENCES, LENGTH = 8, 128
SHAPE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6}
"""At scale 1: 19.5 million parameters."""


def cross_entropy(batch: MicroBatch, logprobs: Tensor) -> Tensor:
    """The negative logprob of each token, in nats."""
    return -logprobs


async def weight_deltas(cluster: ClusterConfig, scale: float) -> list[Figure]:
    """A line a learning rate. `cluster` is not needed: there is no log in it."""
    return await asyncio.to_thread(measure, scale)


def measure(scale: float) -> list[Figure]:
    """Trains, stores, receives, and compares."""
    with TemporaryDirectory(prefix="headrace-bench-") as folder:
        base = _base_model(Path(folder), scale)
        versions = max(3, int(VERSIONS * scale))
        return [
            figure
            for rate in RATES
            for figure in _Chain(Path(folder) / f"{rate}", base, rate).run(versions)
        ]


@dataclass
class _Chain:
    folder: Path
    base: Path
    rate: float
    sizes: list[int] = field(default_factory=list)
    changed: list[float] = field(default_factory=list)
    """Share of the values that each update changed."""
    encode_s: list[float] = field(default_factory=list)
    receive_s: list[float] = field(default_factory=list)

    def run(self, versions: int) -> list[Figure]:
        """Version 0 whole, then so many by deltas."""
        learner = _learner(self.base, self.rate, "bfloat16")
        blobs = LocalBlobStore(self.folder / "blobs")
        store = VersionStore(blobs, full_every=1 << 20)
        receiver = LocalWeights(blobs, self.folder / "receiver")
        stored = store.add(0, learner.weights())
        before = first = learner.weights()
        for version in range(1, versions + 1):
            learner.train([_update(1000 + version)])
            weights = learner.weights()
            began = perf_counter()
            stored = store.add(version, weights)
            self.encode_s.append(perf_counter() - began)
            began = perf_counter()
            got = receiver.fetch(_published(version, stored))
            self.receive_s.append(perf_counter() - began)
            if got.read_bytes() != weights:
                raise AssertionError(f"version {version} came out otherwise")
            if stored.deltas:  # else the chain had come to cost as much as whole weights
                self.sizes.append(stored.deltas[-1].blob.size)
                self.changed.append(_changed(before, weights))
            before = weights
        return self._figures(len(first))

    def _figures(self, whole: int) -> list[Figure]:
        size, changed = statistics.median(self.sizes), statistics.median(self.changed)
        return [
            Figure(
                f"delta at learning rate {self.rate:.0e}",
                f"{whole / size:.0f} times smaller",
                "20 times" if self.rate == RATES[0] else "",
                note=f"{whole:,} bytes whole, {size:,.0f} the median of {len(self.sizes)} deltas, "
                f"in which {changed:.2%} of the values changed; bit-identical",
            ),
            Figure(
                "  first update, and last",
                f"{whole / self.sizes[0]:.0f} and {whole / self.sizes[-1]:.0f} times smaller",
                note=f"{self.changed[0]:.2%} and {self.changed[-1]:.2%} changed: AdamW's first "
                "step moves every weight by the whole learning rate",
            ),
            Figure(
                "  of which a version",
                f"{statistics.median(self.encode_s):.2f} s to store, "
                f"{statistics.median(self.receive_s):.2f} s to receive",
                note="behind training; digests included",
            ),
        ]


def _changed(before: bytes, after: bytes) -> float:
    """The share of bfloat16 values that differ; headers count, and are nothing beside."""
    a, b = (np.frombuffer(data[: len(data) // 2 * 2], dtype="<u2") for data in (before, after))
    return float(np.mean(a != b))


def _base_model(folder: Path, scale: float) -> Path:
    """A model folder whose weights have been trained a little, in float32."""
    base = folder / "model"
    shutil.copytree(model_folder("tiny-llama"), base)
    configuration = json.loads((base / "config.json").read_text())
    wide = SHAPE if scale >= 1 else {"hidden_size": 64}
    (base / "config.json").write_text(json.dumps(configuration | wide))
    learner = _learner(base, 1e-3, "float32")
    for number in range(max(2, int(WARM_UP * scale))):
        learner.train([_update(number)])
    (base / "model.safetensors").write_bytes(learner.weights())
    return base


def _learner(base: Path, rate: float, dtype: str) -> Learner:
    training = {"learning_rate": rate, "device": "cpu", "loss": f"{__name__}:cross_entropy"}
    policy = {"model": str(base), "dtype": dtype, "training": training}
    return Learner(base, Policy.model_validate(policy))


def _update(number: int) -> UpdateBatch:
    """Bytes of this repository's text, other ones for each number."""
    files = sorted([*TEXT.glob("docs/**/*.md"), *TEXT.glob("services/**/*.py"), TEXT / "README.md"])
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)
    starts = np.random.default_rng(number).integers(0, len(text) - LENGTH, SEQUENCES)
    trained = LENGTH - 1
    sampling = Sampling(max_tokens=trained)
    zeros = np.zeros(trained, dtype=np.float32)
    sequences = [
        TokenSequence(
            tokens=text[start : start + LENGTH].astype(np.int64),
            positions=np.arange(1, LENGTH),
            behaviour=zeros,
            advantages=zeros,
            versions=np.zeros(trained, dtype=np.int64),
            samplings=((sampling, trained),),
            demonstrated=np.zeros(trained, dtype=np.bool_),
        )
        for start in starts
    ]
    return UpdateBatch(sequences)


def _published(version: int, stored: StoredVersion) -> PolicyPublished:
    return PolicyPublished(
        policy="default",
        version=version,
        status="trained",
        digest=stored.digest,
        full=stored.full,
        full_version=stored.full_version,
        deltas=stored.deltas,
    )
