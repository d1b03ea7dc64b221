"""A rank: a process that computes one shard of a model for a vLLM engine in the worker.

vLLM's multiprocessing executor starts it as a child of the worker, and makes this class in it.
Import this module only there: the import replaces vLLM's norms on a CPU.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.platforms import current_platform

from headrace.services.inference.engines.vllm_masks import SentMask, VllmSchemaMasks
from headrace.services.inference.engines.vllm_ranks.file_weights import FILE_BACKEND, FileWeights

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker

    import headrace.services.inference.engines.vllm_norm  # noqa: F401
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

# It warns about each layer without weights at each reload.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


class VllmRank(PlatformWorker):  # type: ignore[misc]
    """vLLM's own worker of the platform, with what Headrace adds in each rank."""

    def __init__(self, vllm_config: Any, *arguments: Any, **named: Any) -> None:
        leave_signals_to_worker()
        if current_platform.is_cpu() and vllm_config.model_config.enforce_eager:
            torch._dynamo.config.disable = True  # As in the engine's thread.
        WeightTransferEngineFactory.register_engine(FILE_BACKEND, FileWeights)
        super().__init__(vllm_config, *arguments, **named)

    def init_device(self) -> None:
        """Joins the other ranks."""
        super().init_device()
        if current_platform.is_cpu():
            unlink_shared_memory(os.environ["VLLM_DIST_IDENT"])

    def set_masks(self, masks: Mapping[int, bytes]) -> None:
        """Sets what each sequence that follows a schema may draw in the next step.

        `masks` maps the number of a sequence to its `GrammarState.packed`.
        """
        vocabulary = self.model_config.get_vocab_size()
        VllmSchemaMasks.states = {
            number: SentMask(packed, vocabulary) for number, packed in masks.items()
        }

    def shutdown(self) -> None:
        """Releases what vLLM holds, as its last step before the process exits."""
        super().shutdown()
        # vLLM has unfrozen all objects for the garbage collector, which would take a second.
        gc.freeze()


def unlink_shared_memory(ranks: str) -> None:
    """Removes the names of the shared memory of vLLM's CPU build, once all ranks have mapped it.

    Linux frees the memory with the last of them, however it ends. Otherwise a rank that is killed
    would leave it. `ranks` is vLLM's name of these ranks, which contains a UUID.
    """
    for name in Path("/dev/shm").glob(f"{ranks}-*"):
        name.unlink(missing_ok=True)  # Another rank may do the same.


def leave_signals_to_worker() -> None:
    """Has signals reach this process by the worker alone, which ends it (`spawning.py`).

    A Ctrl-C in a terminal is for the worker, which may have prompts to finish. And vLLM's handler
    of SIGTERM would wait for the end of a step, which never comes if another rank has ended.
    """
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
