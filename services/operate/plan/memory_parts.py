"""How many bytes each part of training and serving a policy takes: one formula each.

The formulas follow the trainer's code, and tests compare them with the tensors of real updates on a
CPU. What a GPU's driver and allocator take besides is `RESERVE`, an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.schemas.recipe.policy import Policy
from headrace.schemas.recipe.resources.engine_settings import VllmOptions, engine_options
from headrace.services.operate.plan.model_shape import ModelShape

GIB = 1 << 30
BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of an element, by the recipe's dtype."""
RESERVE = 2 * GIB
"""What the CUDA contexts and the gaps of the allocators take on a GPU, as an estimate."""
LOGITS_AT_ONCE = {"cpu": 1 << 24, "cuda": 1 << 27}
"""`CHUNK` of `services/models/output_head.py`, which this module can't import without torch."""
VERSION_0 = "version 0, for the KL divergence"
"""The name of a part."""
VLLM_SHARE = 0.9
"""vLLM's default for `gpu_memory_utilization`."""


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """The bytes of one rank that trains a policy.

    With several ranks, all that belongs to a weight is sharded equally, as by PyTorch's FSDP2
    (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html): the float32 weights
    are the shards, and a layer is gathered in the policy's dtype while it is computed.

    With `training.offload`, what the optimizer reads and writes is in the host's memory, and with
    several ranks version 0, too.
    """

    policy: Policy
    shape: ModelShape
    ranks: int = 1
    on_gpu: bool = True

    @property
    def offload(self) -> bool:
        """Whether the optimizer is in the host's memory."""
        return self.policy.training is not None and self.policy.training.offload

    @property
    def learning(self) -> int:
        """Parameters that learn. An adapter has rank * (in + out) for each layer (arXiv 2106.09685,
        section 4.1)."""
        lora = self.policy.lora
        if lora is None:
            return self.shape.parameters
        chosen = self.shape.chosen(lora.targets)
        return self.shape.layers * lora.rank * sum(one.inside + one.outside for one in chosen)

    @property
    def weights(self) -> int:
        """The model in its dtype: the base of an adapter, and the copies of master weights that the
        forward pass reads (`MasterWeights`). Several ranks gather the copies instead."""
        own = self.shape.parameters if self.policy.lora is not None else 0
        copies = self.learning if self.ranks == 1 else 0
        return self._width * (own + copies) // self.ranks

    @property
    def gathered(self) -> int:
        """What several ranks hold whole of the weights: one layer, embedding and head."""
        whole = self.shape.layer_parameters + self.shape.outer_parameters
        return self._width * whole if self.ranks > 1 else 0

    @property
    def gathered_besides(self) -> int:
        """What several ranks hold whole besides while a layer computes its gradients: these, those
        of the head, the layer that is next, and the float32 sum of the layer before."""
        shape = self.shape
        head = 0 if shape.tied else shape.vocabulary * shape.hidden  # `backward` has a tied one
        besides = self._width * (2 * shape.layer_parameters + head) + 4 * shape.layer_parameters
        return besides if self.ranks > 1 else 0

    @property
    def summed(self) -> int:
        """What several ranks need to add up the gradients of embedding and head.

        FSDP2 copies them into one float32 buffer (`foreach_reduce` of torch). Beside it are the
        gradients, and then this rank's sum. The buffer of the last layer is still there. On a CPU
        gloo needs as much as buffer and sum again, as was measured.
        """
        outer, last = self.shape.outer_parameters, 4 * self.shape.layer_parameters
        adding = (4 * outer + 4 * outer // self.ranks) * (1 if self.on_gpu else 2)
        return last + max((self._width + 4) * outer, adding) if self.ranks > 1 else 0

    @property
    def masters(self) -> int:
        """Float32 weights that the optimizer changes. In float32 the model's own are those, if they
        are on the same device."""
        separate = self._width != 4 or self.ranks > 1 or self.offload
        return 4 * self.learning // self.ranks if separate else 0

    @property
    def gradients(self) -> int:
        """One float32 number for each weight that learns."""
        return 4 * self.learning // self.ranks

    @property
    def optimizer(self) -> int:
        """The two float32 moments of Adam (arXiv 1412.6980, algorithm 1)."""
        return 8 * self.learning // self.ranks

    @property
    def reference(self) -> int:
        """Version 0 of what learns, if a KL divergence or `dpo` compares with it (`Reference`)."""
        training = self.policy.training
        used = training is not None and training.has_reference
        width = 4 if self.ranks > 1 else self._width  # Shards are float32 themselves.
        return width * self.learning // self.ranks if used else 0

    @property
    def activations(self) -> int:
        """What the forward pass of the largest micro-batch keeps for its backward pass.

        With checkpointing, a layer keeps only its input of H numbers (arXiv 1604.06174).
        """
        assert self.policy.training is not None, "only policies in training have a trainer"
        shape, kept = self.shape, self.layer_activations
        if self.policy.training.activation_checkpointing:
            kept = self._width * shape.hidden
        rotary = 2 * self._width * shape.head_width
        ends = self._norm(shape.hidden) + 2 * self._width * shape.hidden
        return self.tokens * (shape.layers * kept + ends + rotary)

    @property
    def backward(self) -> int:
        """What the backward pass of one layer needs, with checkpointing all its activations, too.

        In the MLP these are the gradients of its inner results and of its largest weight, and in
        attention those of queries, keys, values and the result, in the dtype inside of attention.
        If that is float64, these are there for one long sequence at a time (`wide_attention`).
        If the output head is the embedding, autograd keeps its first gradient until the second one.
        """
        assert self.policy.training is not None, "only policies in training have a trainer"
        shape, width = self.shape, self._width
        moved = width if self.offload else width + 4
        weight = moved * shape.hidden * shape.inner if self.policy.lora is None else 0
        again = self.layer_activations if self.policy.training.activation_checkpointing else 0
        mlp = self.tokens * width * 2 * (shape.inner + shape.hidden) + weight
        inside = self._inside_attention
        at_once = longest_sequence(self.policy, shape) if inside == 8 else self.tokens
        attention = at_once * inside * 2 * (shape.queries + shape.keys)
        tied = width * shape.vocabulary * shape.hidden if shape.tied else 0
        head = tied if self.policy.lora is None else 0
        return self.tokens * again + max(mlp, attention) + head

    @property
    def layer_activations(self) -> int:
        """Bytes for each token that one decoder layer keeps for its backward pass.

        - An RMS norm keeps its input in float32 and, if it learns, its result in the dtype.
        - A linear layer keeps its input if it or its adapter learns. Layers share an input.
        - Attention keeps queries, keys, values, the result and one float32 for each head (arXiv
          2307.08691). A trainer on a CPU computes it in float64 if the policy is narrower than
          float32, and one on a GPU in float32 if the engine is `torch`.
        - A gated MLP keeps gate, its activation, and the other factor.
        """
        shape, width = self.shape, self._width
        norms = 2 * self._norm(shape.hidden)
        if shape.norms_of_heads:
            norms += self._norm(shape.queries) + self._norm(shape.keys)
        inside = self._inside_attention
        attention = inside * (2 * shape.queries + 2 * shape.keys) + max(inside, 4) * shape.heads
        inputs = {
            "qkv": shape.hidden,
            "o": shape.queries,
            "gate": shape.hidden,
            "down": shape.inner,
        }
        if inside == width:
            inputs.pop("o")  # it is the result of the attention
        kept = sum(size for name, size in inputs.items() if self._keeps_input(name))
        return norms + attention + width * (kept + 3 * shape.inner) + self._inside_adapters

    @property
    def _inside_attention(self) -> int:
        """Bytes of a number inside of attention."""
        if not self.on_gpu and self._width < 4:
            return 8
        return 4 if self.policy.engine.use == "torch" else self._width

    @property
    def logits(self) -> int:
        """The logits of the largest part of a micro-batch, and the gradient of the output head.

        `token_logprobs` holds n tokens at a time, and two results of [n, V] in float32, or in
        bfloat16 the logits too. The backward pass needs the same, and the head's gradient.
        """
        shape, chunk = self.shape, LOGITS_AT_ONCE["cuda" if self.on_gpu else "cpu"]
        part = min(self.tokens, max(1, chunk // shape.vocabulary)) * shape.vocabulary
        head = 4 * shape.vocabulary * shape.hidden if self.policy.lora is None else 0
        return part * (8 if self._width == 4 else 8 + self._width) + head

    @property
    def step(self) -> int:
        """What AdamW needs while it changes the weights, when no activations are left.

        On a GPU torch computes the square roots of all second moments at once. On a CPU, also with
        `offload`, it takes one tensor after the other, and two results of its size.
        """
        if self.on_gpu and not self.offload:
            return 4 * self.learning // self.ranks
        largest = self.shape.largest
        if (lora := self.policy.lora) is not None:
            chosen = self.shape.chosen(lora.targets)
            largest = lora.rank * max(max(one.inside, one.outside) for one in chosen)
        return 8 * largest // self.ranks

    @property
    def rollback(self) -> int:
        """The copy of weights and moments that a batch of several updates is undone from, which is
        in the host's memory (`Learner`)."""
        training = self.policy.training
        several = training is not None and training.minibatches * training.epochs > 1
        return 12 * self.learning // self.ranks if several else 0

    def parts(self) -> dict[str, int]:
        """Returns the bytes of each part, of those that are there at the peak of an update.

        The gradients of earlier micro-batches are there in a backward pass. When it begins, the
        logits are there; when it reaches a layer, they are gone. When ranks add up the gradients of
        the embedding, and at the optimizer's step, the activations are gone, too.
        """
        found = {"weights": self.weights}
        found |= {} if self.offload else self._of_optimizer
        if not (self.offload and self.ranks > 1):
            found[VERSION_0] = self.reference
        kept, whole = {"activations": self.activations}, "gathered layers"
        besides = self.gathered + self.gathered_besides
        moments = [
            {whole: self.gathered, **kept, "logits": self.logits},
            {whole: besides, **kept, "backward pass of a layer": self.backward},
            {"sum of gradients over ranks": self.summed},
            {"optimizer step": 0 if self.offload else self.step},
        ]
        return found | max(moments, key=lambda parts: sum(parts.values()))

    def host_parts(self) -> dict[str, int]:
        """Returns the bytes of each part in the host's memory. Without `offload` it is empty."""
        if not self.offload:
            return {}
        found = self._of_optimizer | {"optimizer step": self.step}
        return found | ({VERSION_0: self.reference} if self.ranks > 1 else {})

    @property
    def _of_optimizer(self) -> dict[str, int]:
        return {
            "master weights": self.masters,
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
        }

    @property
    def total(self) -> int:
        """The peak of an update."""
        return sum(self.parts().values())

    @property
    def published(self) -> int:
        """The weights or the adapter of one version, in the policy's dtype."""
        return self._width * self.learning

    @property
    def tokens(self) -> int:
        """Tokens of the largest micro-batch: `max_tokens`, or one sequence of the whole context."""
        assert self.policy.training is not None, "only policies in training have a trainer"
        return max(self.policy.training.max_tokens, longest_sequence(self.policy, self.shape))

    @property
    def _width(self) -> int:
        return BYTES[self.policy.dtype]

    @property
    def _inside_adapters(self) -> int:
        lora = self.policy.lora
        if lora is None:
            return 0
        return self._width * lora.rank * len(self.shape.chosen(lora.targets))

    def _norm(self, size: int) -> int:
        return size * (4 + (self._width if self.policy.lora is None else 0))

    def _keeps_input(self, first: str) -> bool:
        lora = self.policy.lora
        if lora is None:
            return True
        sharing = {"qkv": ("q", "k", "v"), "gate": ("gate", "up")}.get(first, (first,))
        names = {one.name.rpartition(".")[2] for one in self.shape.chosen(lora.targets)}
        return any(f"{one}_proj" in names for one in sharing)


def longest_sequence(policy: Policy, shape: ModelShape) -> int:
    """Returns the tokens of the longest sequence: the context of the engine, or of the model."""
    return int(policy.engine.options.get("context") or shape.context)


def engine_gpus(policy: Policy) -> int:
    """Returns how many GPUs share one engine of a policy."""
    if policy.engine.use != "vllm":
        return 1
    return engine_options(VllmOptions, policy.engine.options).tensor_parallel_size


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """The bytes of one inference engine on one GPU, or in the memory of the host.

    If an engine's model is divided among several GPUs, each has a share of every layer and its own
    heads of the KV cache (arXiv 1909.08053, section 3), but at least one head of the keys.
    """

    policy: Policy
    shape: ModelShape
    most: int
    """Bytes of the device."""
    context: int
    """Tokens of the longest sequence."""

    @property
    def weights(self) -> int:
        """The model in its dtype, with the adapter in it."""
        return BYTES[self.policy.dtype] * self.shape.parameters // engine_gpus(self.policy)

    @property
    def of_token(self) -> int:
        """Bytes of a token in the KV cache: a key and a value in each layer (arXiv 2309.06180)."""
        keys = max(self.shape.keys // engine_gpus(self.policy), self.shape.head_width)
        return 2 * BYTES[self.policy.dtype] * self.shape.layers * keys

    @property
    def cache(self) -> int:
        """The KV cache. vLLM takes its share of the GPU, less the weights. The engine `torch` takes
        what all its slots need for the whole context."""
        if self.policy.engine.use == "vllm":
            options = engine_options(VllmOptions, self.policy.engine.options)
            share = float(options.arguments.get("gpu_memory_utilization", VLLM_SHARE))
            return max(self.of_token, int(share * self.most) - self.weights)
        return self.policy.engine.slots * self.context * self.of_token
