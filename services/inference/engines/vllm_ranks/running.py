"""A vLLM engine in the worker, whose model is in this process or in several ranks.

Import this module after the environment variables that vLLM reads are set, as `vllm_engine` does.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
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


class Running:
    """A vLLM engine, and the rows that it continues. One thread makes it and calls it."""

    def __init__(self, arguments: Mapping[str, Any], on_end: Callable[[str], None]) -> None:
        """Blocks. `on_end` is called in another thread if a rank ends, with what ended."""
        # Without a random seed all workers would draw the same tokens.
        seed = secrets.randbits(31)
        with spawned_end_with_parent():
            self.engine = LLMEngine.from_engine_args(EngineArgs(seed=seed, **arguments))
        self.rows: dict[str, AnyRow] = {}
        """By request id."""
        self._executor = self.engine.model_executor
        self.has_ranks = "worker_cls" in arguments
        if self.has_ranks:
            self._executor.register_failure_callback(lambda: on_end(self.ended_ranks()))

    def load(self, path: Path, state: Mapping[str, torch.Tensor] | None) -> None:
        """Replaces the model's weights, in all ranks before the next step of any.

        Without ranks they are `state`, otherwise the ranks read the file `path`.
        """
        if state is not None:
            arguments = {"weights_iterator": iter(state.items())}
            self.engine.collective_rpc("reload_weights", kwargs=arguments)
            return
        self.engine.collective_rpc("start_weight_update")
        self.engine.collective_rpc("update_weights", args=({"path": str(path)},))
        self.engine.collective_rpc("finish_weight_update")

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
        outputs: list[Any] = self.engine.step()
        return outputs

    def ended_ranks(self, wait_s: float = 0.0) -> str:
        """Says which ranks have ended and how. Empty if all run. Waits at most `wait_s` for one."""
        if not self.has_ranks:
            return ""
        until = time.monotonic() + wait_s
        while True:
            codes = [worker.proc.exitcode for worker in self._executor.workers]
            ended = [
                f"rank {rank} of {len(codes)} ended ({_how(code)})"
                for rank, code in enumerate(codes)
                if code is not None
            ]
            if ended or time.monotonic() >= until:
                return ", ".join(ended)
            time.sleep(0.05)

    def close(self) -> None:
        """Ends the engine and its ranks."""
        self.engine.engine_core.shutdown()


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
