"""A Llama or Qwen model of Megatron-Core, divided over all ranks, with transformers' weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import AutoConfig

NAMES = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    "output_layer.weight": ("lm_head.weight",),
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
"""Megatron's names to those of transformers. Both of them number the layers."""


class TorchAttention(nn.Module):
    """Attention within each sequence of a packed micro-batch.

    Megatron's own needs Transformer Engine for packed sequences, and so a GPU.
    """

    def __init__(self, config: TransformerConfig, *arguments: Any, **more: Any) -> None:
        super().__init__()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **more: Any
    ) -> Tensor:
        """Of [tokens, heads, width] each. Returns [tokens, heads * width]."""
        cuts = more["packed_seq_params"].cu_seqlens_q.tolist()
        parts = []
        for first, end in pairwise(cuts):
            own = (one[first:end].transpose(0, 1)[None] for one in (query, key, value))
            seen = scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True)
            parts.append(seen[0].transpose(0, 1).flatten(1))
        return torch.cat(parts)


class ParallelModel(nn.Module):
    """The rank's part of a model. All ranks must call the same methods."""

    def __init__(self, folder: Path) -> None:
        """`folder` has transformers' `config.json`. Raises ValueError for another kind of model."""
        super().__init__()
        found: Any = AutoConfig.from_pretrained(folder)
        if found.model_type not in ("llama", "qwen2", "qwen3"):
            raise ValueError(f"{folder} is a {found.model_type}: NAMES lacks its tensors")
        if found.rope_parameters["rope_type"] != "default":
            raise ValueError(f"{folder} scales its rotary embeddings, which this example does not")
        parallel_state.initialize_model_parallel(dist.get_world_size())
        self.group = parallel_state.get_tensor_model_parallel_group()
        if not torch.cuda.is_available():  # Megatron asks where to put what it makes, also there.
            torch.cuda.current_device = lambda: torch.device("cpu")
            initialize_rng_tracker(inference_rng_tracker=True)  # It has no dropout, so no seeds.
        heads, groups = found.num_attention_heads, found.num_key_value_heads
        self.heads = (groups, heads // groups, getattr(found, "head_dim", None))
        self.vocabulary: int = found.vocab_size
        config = TransformerConfig(
            num_layers=found.num_hidden_layers,
            hidden_size=found.hidden_size,
            ffn_hidden_size=found.intermediate_size,
            num_attention_heads=heads,
            num_query_groups=groups,
            kv_channels=self.heads[2],
            normalization="RMSNorm",
            layernorm_epsilon=found.rms_norm_eps,
            gated_linear_unit=True,
            activation_func=silu,
            add_bias_linear=False,
            add_qkv_bias=found.model_type == "qwen2",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=dist.get_world_size(),
            use_cpu_initialization=True,
            masked_softmax_fusion=False,
        )
        spec = get_gpt_layer_local_spec(
            normalization="RMSNorm", qk_layernorm=found.model_type == "qwen3"
        )
        spec.submodules.self_attention.submodules.core_attention = TorchAttention
        self.gpt = GPTModel(
            config,
            spec,
            vocab_size=found.vocab_size,
            max_sequence_length=found.max_position_embeddings,
            share_embeddings_and_output_weights=found.tie_word_embeddings,
            position_embedding_type="rope",
            rotary_base=found.rope_parameters["rope_theta"],
        )

    def forward(self, tokens: Tensor, positions: Tensor, cuts: Tensor) -> Tensor:
        """Returns the logits [L, vocabulary / ranks] of a packed micro-batch of [L] tokens."""
        longest = int(cuts.diff().max())
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cuts,
            cu_seqlens_kv=cuts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        logits: Tensor = self.gpt(tokens[None], positions[None], None, packed_seq_params=packed)
        return logits[0]

    def add_up_gradients(self) -> None:
        """Adds up those that each rank has for its own heads alone. Call it after `backward`."""
        for name, parameter in self.gpt.named_parameters():
            if "q_layernorm" in name or "k_layernorm" in name:
                dist.all_reduce(parameter.grad, group=self.group)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Takes its shards from whole tensors with transformers' names."""
        with torch.no_grad():
            for name, parameter in self.gpt.named_parameters():
                whole = [weights[one] for one in transformers_names(name)]
                parameter.copy_(self._shards(name, parameter, whole)[self.group.rank()])

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Yields transformers' names with whole tensors in rank 0, and nothing in the others.

        Only one parameter is put together at a time.
        """
        for name, parameter in self.gpt.named_parameters():
            own = parameter.detach().contiguous()
            parts = [torch.empty_like(own) for _ in range(self.group.size())]
            dist.gather(own, parts if self.group.rank() == 0 else None, 0, group=self.group)
            if self.group.rank() == 0:
                joined = self._join(name, parameter, parts)
                yield from zip(transformers_names(name), joined, strict=True)

    def _shards(self, name: str, parameter: Tensor, whole: list[Tensor]) -> list[Tensor]:
        """Divides transformers' tensors of a parameter among the ranks."""
        size = self.group.size()
        if "linear_qkv" in name:  # The heads of a group lie together: its queries, key and value.
            whole = [torch.cat([self._by_group(one) for one in whole], 1).flatten(0, 2)]
        if "linear_fc1" in name:  # Each rank has its rows of both.
            parts = zip(*(one.chunk(size) for one in whole), strict=True)
            return [torch.cat(part) for part in parts]
        if not is_divided(parameter):
            return whole * size
        return list(whole[0].chunk(size, parameter.partition_dim))

    def _join(self, name: str, parameter: Tensor, parts: list[Tensor]) -> list[Tensor]:
        """Undoes `_shards`."""
        if not is_divided(parameter):
            return parts[:1]
        if "linear_fc1" in name:
            halves = zip(*(part.chunk(2) for part in parts), strict=True)
            return [torch.cat(half) for half in halves]
        whole = torch.cat(parts, parameter.partition_dim)
        if "linear_qkv" not in name:
            return [whole]
        by_group = self._by_group(whole)
        return [one.flatten(0, 2) for one in by_group.split([self.heads[1], 1, 1], 1)]

    def _by_group(self, rows: Tensor) -> Tensor:
        """Views [rows, …] as [groups, heads of a group, width of a head, …]."""
        groups, _, width = self.heads
        return rows.view(groups, -1, width or self.gpt.config.kv_channels, *rows.shape[1:])


def is_divided(parameter: Tensor) -> bool:
    """Whether each rank has a part of a parameter. Otherwise all have the same."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def transformers_names(name: str) -> list[str]:
    """Returns transformers' names of what a parameter of Megatron consists of."""
    prefix, _, rest = name.partition("decoder.layers.")
    number, _, inner = rest.partition(".")
    before = "" if prefix else f"model.layers.{number}."
    inner = inner or name
    stem, _, kind = inner.rpartition(".")
    if inner in NAMES:
        return [before + one for one in NAMES[inner]]
    return [f"{before}{one}.{kind}" for one in NAMES[stem]]
