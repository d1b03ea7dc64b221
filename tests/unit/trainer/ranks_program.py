"""Trains in processes that one program forks: `ranks_program.py ORDERS`.

ORDERS is a JSON list. Each order has `size` (the number of ranks), `policy` (the policy's
settings), `folder` (gets `weights` and `result`), and optionally `load` (a checkpoint), `first`
(1), `versions` (5), `never_whole` (loading the whole model fails), `save`, `timeout_s`, and `stop`
(a rank that sends itself `signal` instead of training its second version, or with `stop_at`
before its `write_weights`), and `measured` (publishes whole weights and a delta, and writes
`memory-RANK`: the peak of anonymous memory above that before, in bytes). `result` has metrics,
logprobs, the number of updates and the `cross_entropy` of another batch, or an `error`. The orders
run one after the other, each in processes of its own.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from torch._C._distributed_c10d import TCPStore

from headrace.errors import DependencyError
from headrace.schemas.events import Sampling
from headrace.schemas.packed import pack_i32
from headrace.schemas.recipe.policy import Policy
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.models.weights import model_folder
from headrace.trainer.learner import Learner
from headrace.trainer.ranks import sharded_loading
from headrace.trainer.ranks.rank_group import RankGroup, loopback_variables, serve_store
from headrace.trainer.ranks.shared_learner import SharedLearner, follow
from headrace.trainer.sequences import TokenSequence, UpdateBatch
from headrace.trainer.versions import VersionStore

ACTIONS = list(b"LDRU")
DRAWN = Sampling(max_tokens=1, temperature=0.5, allowed=pack_i32(ACTIONS))


def sequence(seed: int, sample: int) -> TokenSequence:
    """Up to 20 turns of one token of context and one token that was drawn, or demonstrated."""
    random = np.random.default_rng(seed)
    turns = int(random.integers(1, 20))
    shown = sample == 1
    tokens = random.integers(97, 113, 2 * turns)
    tokens[1::2] = random.choice(ACTIONS, turns)
    return TokenSequence(
        tokens=tokens,
        positions=np.arange(1, 2 * turns, 2),
        behaviour=np.full(turns, 0 if shown else np.log(0.25), dtype=np.float32),
        advantages=random.normal(size=turns).astype(np.float32),
        versions=np.full(turns, -1 if shown else 0, dtype=np.int64),
        samplings=((DRAWN, turns),),
        turns=(0,),
        demonstrated=np.full(turns, shown),
        sample=sample,
        group=sample // 4,
        name=f"sample {sample}",
        rewards=random.normal(size=turns).astype(np.float32),
    )


def batch(version: int) -> list[UpdateBatch]:
    """Two minibatches of 5 and 2 samples. With 4 ranks, some of them have nothing to do."""
    made = [sequence(100 * version + number, number) for number in range(7)]
    return [UpdateBatch(made[:5], version - 1), UpdateBatch(made[5:], version - 1)]


def train(learner: Learner | SharedLearner, order: dict[str, Any]) -> None:
    """Trains as ordered, and writes what came out."""
    if path := order.get("load"):
        learner.load(Path(path))
    first, metrics = order.get("first", 1), {}
    for version in range(first, first + order.get("versions", 5)):
        metrics = learner.train(batch(version))
    if path := order.get("save"):
        learner.save(Path(path))
    logprobs = [found.tolist() for _, found in learner.start_logprobs]
    if order.get("measured"):
        publish(learner, order)
        return
    learner.write_weights(Path(order["folder"], "streamed"))
    Path(order["folder"], "weights").write_bytes(learner.weights())
    nats, tokens = learner.cross_entropy(batch(99)[0])
    found = {"metrics": metrics, "updates": learner.updates_done, "logprobs": logprobs}
    found["cross_entropy"] = nats / tokens
    Path(order["folder"], "result").write_text(json.dumps(found))


def publish(learner: Learner | SharedLearner, order: dict[str, Any]) -> None:
    """Publishes version 0 in full, trains, and publishes version 1 as a delta."""
    folder = Path(order["folder"])
    store = VersionStore(LocalBlobStore(folder / "blobs"), full_every=9)
    for version in (0, 1):
        file = folder / f"{version}.safetensors"
        with measured(folder / f"memory-0-{version}"):
            learner.write_weights(file)
            stored = store.add(version, file)
        assert len(stored.deltas) == version
        if not version:
            learner.train(batch(1))


@contextmanager
def measured(path: Path) -> Iterator[None]:
    """Writes the peak of this process's anonymous memory above the present one, in bytes."""
    gc.collect()
    before, peak, ended = anonymous(), [0], threading.Event()

    def sample() -> None:
        while not ended.wait(0.001):
            peak[0] = max(peak[0], anonymous())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    path.write_text(str(peak[0] - before))


def anonymous() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux says it"
    return 1024 * int(found[1])


def refuse(folder: Path, policy: Policy) -> NoReturn:
    raise AssertionError(f"the whole model {folder} is loaded")


def obey(order: dict[str, Any]) -> None:
    """Is rank 0 of an order, and forks the others."""
    policy, size = Policy.model_validate(order["policy"]), order["size"]
    if order.get("never_whole"):
        setattr(sharded_loading, "load_policy", refuse)  # noqa: B010  (it is imported there)
    folder = model_folder(policy.model)
    if size == 1:
        train(Learner(folder, policy), order)
        return
    os.environ |= loopback_variables()
    reading, writing = os.pipe()
    children = []
    for rank in range(1, size):
        if not (child := os.fork()):
            try:
                serve_rank(rank, int(os.read(reading, 8)), order)
            finally:
                os._exit(1)
        children.append(child)
    store, port = serve_store()
    os.write(writing, f"{port:8}".encode() * (size - 1))
    try:
        group = RankGroup(store, 0, size, order.get("timeout_s", 60), "cpu")
        learner = SharedLearner(group, folder, policy)
        train(learner, order)
        learner.close()
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * (size - 1)
    except DependencyError as error:
        Path(order["folder"], "result").write_text(json.dumps({"error": str(error)}))
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def serve_rank(rank: int, port: int, order: dict[str, Any]) -> None:
    """Follows rank 0."""
    if order.get("stop") == rank:
        trained, plain = [], Learner.train

        def stop_itself(self: Learner, *arguments: Any) -> dict[str, float]:
            trained.append(1)
            if len(trained) == 2:
                os.kill(os.getpid(), order["signal"])
            return plain(self, *arguments)

        def stop_before(self: Learner, path: Path) -> None:
            os.kill(os.getpid(), order["signal"])

        if order.get("stop_at") == "write_weights":
            Learner.write_weights = stop_before  # type: ignore[method-assign]
        else:
            Learner.train = stop_itself  # type: ignore[method-assign, assignment]
    if order.get("measured"):
        written, write = iter(range(9)), Learner.write_weights

        def write_measured(self: Learner, path: Path) -> None:
            with measured(Path(order["folder"], f"memory-{rank}-{next(written)}")):
                write(self, path)

        Learner.write_weights = write_measured  # type: ignore[method-assign]
    store = TCPStore("127.0.0.1", port, is_master=False)
    follow(RankGroup(store, rank, order["size"], order.get("timeout_s", 60), "cpu"))
    os._exit(0)


if __name__ == "__main__":
    for one in json.loads(sys.argv[1]):
        if not (child := os.fork()):
            obey(one)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"failed: {one}")
