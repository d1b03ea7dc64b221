"""A vLLM engine whose model is in two ranks: the same numbers, and processes that end."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save, save_file

from headrace.errors import HeadraceError
from headrace.schemas.events import PolicyPublished, WeightsDelta
from headrace.services.inference.engine import Engine, EngineOutput, EnginePrompt, Weights
from headrace.services.inference.engines.engine_thread import ThreadedEngine
from headrace.services.inference.local_weights import LocalWeights
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.models.deltas import diff
from headrace.services.models.weights import weights_digest
from tests.contract.engines import drive, hold, make_engine_of, make_model, needs_vllm

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM and what it imports warn of themselves
    pytest.mark.long,
    *needs_vllm,
]

ROOT = Path(__file__).parents[2]
CONTEXT = 4_096
END_S = 10.0
"""Seconds in which all ranks have ended with their worker."""
START_S = 240.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_model(folder, vocab_size=128, max_position_embeddings=CONTEXT)


def weights(model: Path, version: int) -> Weights:
    return Weights("default", version, model / f"{version}.safetensors")


async def greedy(engine: Engine) -> list[EngineOutput]:
    prompts = [EnginePrompt("default", range(1, length), 60, temperature=0.0)
               for length in (2, 5, 17, 90)]  # fmt: skip
    return list(await asyncio.gather(*map(engine.generate, prompts)))


def assert_equal(found: list[EngineOutput], expected: list[EngineOutput]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.versions == other.versions
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def changed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Some of the numbers of each tensor are others, so that a delta is smaller than the whole."""
    then = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in then.values():
        tensor.view(-1)[::40] *= -3
    return then


def test_two_ranks_draw_what_one_process_draws_also_by_deltas(model: Path, tmp_path: Path) -> None:
    """Version 2 overwrites the file from which the ranks have read version 1.

    It is loaded while they draw, and afterwards they draw what new ranks with the whole weights do.
    """
    store, states = LocalBlobStore(tmp_path / "blobs"), [load_file(model / "0.safetensors")]
    deltas, digests = [], [weights_digest(model / "0.safetensors")]
    for version in (1, 2):
        states.append(changed(states[-1]))
        old, new = map(save, states[-2:])
        made = diff(old, new, 1 << 20)
        assert made is not None
        blob = store.put(made)
        deltas.append(WeightsDelta(blob=blob, from_version=version - 1, to_version=version))
        digests.append(weights_digest(new))
    full = store.put(save(states[0]))

    def published(version: int) -> PolicyPublished:
        return PolicyPublished(
            policy="default", version=version, status="trained", digest=digests[version],
            full=full, full_version=0, deltas=tuple(deltas[:version]),
        )  # fmt: skip

    async def answers(kind: str) -> list[list[EngineOutput]]:
        engine = make_engine_of(kind, model, 4)
        local = LocalWeights(store, tmp_path / kind)
        await engine.load(local.weights(published(1)))
        found = [await greedy(engine)]
        later = local.weights(published(2))
        hold(engine, 20)
        found.append((await asyncio.gather(greedy(engine), engine.load(later)))[0])
        found.append(await greedy(engine))
        await engine.close(1)
        return found

    async def whole() -> list[EngineOutput]:
        engine = make_engine_of("vllm-tp2", model, 4)
        save_file(states[2], tmp_path / "2.safetensors")
        await engine.load(Weights("default", 2, tmp_path / "2.safetensors"))
        found = await greedy(engine)
        await engine.close(1)
        return found

    async def main() -> None:
        one, two = await answers("vllm"), await answers("vllm-tp2")
        for found, expected in zip(two, one, strict=True):
            assert_equal(found, expected)
        for old, mixed, new in zip(*two, strict=True):
            drawn = mixed.versions.count(1)
            assert 0 < drawn < 60
            assert mixed.versions == [1] * drawn + [2] * (60 - drawn)
            assert mixed.tokens[:drawn] == old.tokens[:drawn]
            assert mixed.tokens != old.tokens != new.tokens
        assert_equal(two[2], await whole())

    drive(main)


@contextmanager
def worker(model: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with an engine. Nothing of it is left in the end."""
    command = (sys.executable, "-m", "tests.contract.ranks_worker", str(model))
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    below: list[psutil.Process] = []
    try:
        yield process
    finally:
        if process.poll() is None:
            below = psutil.Process(process.pid).children(recursive=True)
            process.kill()
        for one in below:
            if one.is_running():
                one.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def says(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    while line := process.stdout.readline():
        if line.strip() == word:
            return
    raise AssertionError(f"the worker ended without {word!r}: {process.wait()}")


def below(process: subprocess.Popen[str], least: int = 2) -> list[psutil.Process]:
    """The processes below a worker, once there are so many."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        found = psutil.Process(process.pid).children(recursive=True)
        if sum(is_rank(one) for one in found) >= least:
            return found
        time.sleep(0.01)
    raise AssertionError("no ranks were started")


def is_rank(process: psutil.Process) -> bool:
    try:
        return "spawn_main" in " ".join(process.cmdline()) or "Worker" in process.name()
    except psutil.NoSuchProcess:
        return False


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """The files in /dev/shm that processes have mapped or that vLLM's ranks have made."""
    found = set(Path("/dev/shm").glob("vllm_dist_*"))
    for one in processes:
        with suppress(psutil.Error):
            found |= {Path(map.path) for map in one.memory_maps() if "/dev/shm/" in map.path}
    return {path for path in found if path.exists()}


@pytest.mark.parametrize("when", ["starting", "made", "drawing"])
def test_a_worker_that_is_killed_leaves_no_rank(model: Path, when: str) -> None:
    before = shared_memory([])
    with worker(model) as process:
        if when != "starting":
            says(process, when)
        started = below(process)
        assert len(started) >= 2
        mapped = shared_memory([psutil.Process(process.pid), *started])
        assert mapped or when == "starting"
        process.kill()
        began = time.monotonic()
        _, left = psutil.wait_procs(started, START_S)
        took_s = time.monotonic() - began
        print(f"{when}: {len(started)} processes ended within {took_s:.2f} s")
        assert not left
        assert took_s < END_S
        assert {path for path in mapped | shared_memory([]) if path.exists()} <= before


def test_a_worker_that_gets_sigterm_ends_its_ranks(model: Path) -> None:
    before = shared_memory([])
    with worker(model) as process:
        says(process, "drawing")
        started = below(process)
        mapped = shared_memory([psutil.Process(process.pid), *started])
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        _, left = psutil.wait_procs(started, START_S)
        assert process.wait(START_S) == 0
        took_s = time.monotonic() - began
        print(f"{len(started)} processes and the worker ended within {took_s:.2f} s")
        assert not left
        assert took_s < END_S
        assert {path for path in mapped | shared_memory([]) if path.exists()} <= before


@pytest.mark.parametrize(
    ("when", "rank", "number"),
    [
        ("made", 0, signal.SIGKILL),
        ("idle", 1, signal.SIGKILL),
        ("drawing", 0, signal.SIGKILL),
        ("drawing", 1, signal.SIGTERM),
        ("loading", 1, signal.SIGKILL),
    ],
)
def test_a_rank_that_ends_ends_the_engine(
    model: Path, when: str, rank: int, number: signal.Signals
) -> None:
    """Whatever is under way. The error says which rank ended and how, and names no other rank."""

    async def main() -> None:
        engine = make_engine_of("vllm-tp2", model, 4)
        assert isinstance(engine, ThreadedEngine)
        ranks = ranks_of(engine)
        failed = asyncio.create_task(engine.failed())
        if when != "made":
            await engine.load(weights(model, 0))
            await engine.generate(EnginePrompt("default", [1], 10))
        waiting: asyncio.Task[Any] | None = None
        if when == "drawing":
            drawn, loop = asyncio.Event(), asyncio.get_running_loop()

            def on_token(token: int) -> None:
                loop.call_soon_threadsafe(drawn.set)

            prompt = EnginePrompt("default", [1], 4_000)
            waiting = asyncio.create_task(engine.generate(prompt, on_token))
            await drawn.wait()
        elif when == "loading":
            ranks[rank].suspend()
            waiting = asyncio.create_task(engine.load(weights(model, 1)))
            await asyncio.sleep(1)
        ranks[rank].send_signal(number)
        said = (
            f"the vllm engine can't go on: rank {rank} of 2 (process {ranks[rank].pid}) ended by "
            f"{number.name}. Restart the worker"
        )
        for one in (failed, waiting, asyncio.create_task(engine.load(weights(model, 1)))):
            if one is not None:
                with pytest.raises(HeadraceError, match=f"^{re.escape(said)}$"):
                    await asyncio.wait_for(one, END_S)
        await engine.close(0)
        assert not psutil.wait_procs(ranks, END_S)[1]

    drive(main)


def test_weights_that_a_rank_can_not_load_end_the_engine(model: Path, tmp_path: Path) -> None:
    """Others may have loaded them, so no further token may be drawn."""

    async def main() -> None:
        engine = make_engine_of("vllm-tp2", model, 4)
        assert isinstance(engine, ThreadedEngine)
        await engine.load(weights(model, 0))
        file = tmp_path / "1.safetensors"
        file.write_bytes(weights(model, 1).path.read_bytes())
        read = engine._read

        def lose(given: Weights) -> Any:
            read(given)
            file.unlink()

        engine._read = lose  # type: ignore[assignment]
        with pytest.raises(HeadraceError, match=r"1\.safetensors"):
            await engine.load(Weights("default", 1, file))
        with pytest.raises(HeadraceError, match=r"1\.safetensors"):
            await engine.generate(EnginePrompt("default", [1], 2))
        await engine.close(0)

    drive(main)


def ranks_of(engine: Engine) -> list[psutil.Process]:
    """In the order of their numbers."""
    (running,) = engine._all()  # type: ignore[attr-defined]
    return [psutil.Process(worker.proc.pid) for worker in running._executor.workers]
