"""A vLLM engine in the worker, whose model is in this process or in several ranks.

Import this module after the environment variables that vLLM reads are set, as `vllm_engine` does.
"""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from headrace.errors import UsageError
from headrace.services.inference.engines.row import AnyRow, Row
from headrace.services.inference.engines.vllm_ranks.file_weights import FILE_BACKEND
from headrace.services.processes.spawning import spawned_end_with_parent

RANK = "headrace.services.inference.engines.vllm_ranks.vllm_rank.VllmRank"
NOTICE_S = 3.0
"""How long the end of a rank may take to be noticed after a call of the ranks has failed."""


def rank_arguments(size: int) -> dict[str, Any]:
    """vLLM's arguments for a model in `size` ranks. Raises UsageError if there are too few GPUs."""
    if size == 1:
        return {}
    if not current_platform.is_cpu() and (there := current_platform.device_count()) < size:
        raise UsageError(
            f"engine.options.tensor_parallel_size is {size}, but this process sees {there} GPUs. "
            "Lower it, or check CUDA_VISIBLE_DEVICES"
        )
    return {
        "tensor_parallel_size": size,
        "distributed_executor_backend": "mp",
        "worker_cls": RANK,
        "weight_transfer_config": {"backend": FILE_BACKEND},
    }


class Turns:
    """A lock that a thread which releases it and takes it again does not keep from the others."""

    def __init__(self) -> None:
        self._next, self._held = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._next:
            self._held.acquire()

    def __exit__(self, *_: object) -> None:
        self._held.release()


MODELS = Turns()
"""Held by whoever starts an engine, or computes with a model that is in this process.

vLLM keeps what a forward pass reads in variables of its module, and its CPU kernels share memory.
So two engines in one process, each in its thread, must not compute at the same time.
"""


class Running:
    """A vLLM engine, and the rows that it continues. One thread makes it and calls it."""

    def __init__(self, arguments: Mapping[str, Any], on_end: Callable[[str], None]) -> None:
        """Blocks. `on_end` is called in another thread if a rank ends, with what ended."""
        # Without a random seed all workers would draw the same tokens.
        seed = secrets.randbits(31)
        with MODELS, spawned_end_with_parent():
            self.engine = LLMEngine.from_engine_args(EngineArgs(seed=seed, **arguments))
        self.rows: dict[str, AnyRow] = {}
        """By request id."""
        self._executor = self.engine.model_executor
        self.has_ranks = "worker_cls" in arguments
        self._turn = nullcontext() if self.has_ranks else MODELS
        self._ended = ""
        """Which ranks ended, and how. Not those that vLLM ends for that reason."""
        self._looking = threading.Lock()
        if self.has_ranks:
            self._shut_down = self._executor.shutdown
            self._executor.shutdown = self._note_and_shut_down
            self._executor.register_failure_callback(lambda: on_end(self.ended_ranks()))

    def load(self, path: Path, state: Mapping[str, torch.Tensor] | None) -> None:
        """Replaces the model's weights, in all ranks before the next step of any.

        Without ranks they are `state`, otherwise the ranks read the file `path`.
        """
        if state is not None:
            arguments = {"weights_iterator": iter(state.items())}
            with self._turn:
                self.engine.collective_rpc("reload_weights", kwargs=arguments)
            return
        self.engine.collective_rpc("start_weight_update")
        self.engine.collective_rpc("update_weights", args=({"path": str(path)},))
        self.engine.collective_rpc("finish_weight_update")

    def add_adapter(self, request: LoRARequest) -> None:
        """Loads an adapter, in the place of the one of that number."""
        with self._turn:
            self.engine.add_lora(request)

    def step(self) -> list[Any]:
        """Draws a token for each row that has its turn. Returns vLLM's outputs."""
        if self.has_ranks:
            masks = {
                id(row.grammar): row.grammar.packed()
                for row in self.rows.values()
                if isinstance(row, Row) and row.grammar is not None
            }
            if masks:
                self.engine.collective_rpc("set_masks", args=(masks,))
        with self._turn:
            outputs: list[Any] = self.engine.step()
        return outputs

    def ended_ranks(self, wait_s: float = 0.0) -> str:
        """Says which ranks ended first and how, or nothing. Waits at most `wait_s` for one."""
        until = time.monotonic() + wait_s
        while self.has_ranks and not self._ended:
            with self._looking:
                self._ended = self._ended or self._look()
            if time.monotonic() >= until:
                break
            time.sleep(0.05)
        return self._ended

    def close(self) -> None:
        """Ends the engine and its ranks."""
        with self._turn:
            self.engine.engine_core.shutdown()

    def _look(self) -> str:
        """Says which ranks have ended and how, also those that were ended."""
        processes = [worker.proc for worker in self._executor.workers]
        return ", ".join(
            f"rank {rank} of {len(processes)} (process {process.pid}) ended {_how(code)}"
            for rank, process in enumerate(processes)
            if (code := process.exitcode) is not None
        )

    def _note_and_shut_down(self) -> None:
        """Notes what has ended before vLLM, which noticed it, ends the other ranks."""
        if self._executor.is_failed:
            self.ended_ranks(NOTICE_S)
        self._shut_down()


def _how(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    names = {one.value: one.name for one in signal.Signals}
    return f"by {names.get(-code, f'signal {-code}')}"
