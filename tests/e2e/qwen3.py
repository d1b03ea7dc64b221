"""A stand-in for Qwen3 0.6B: its architecture and vocabulary in two thin layers, random weights.

The tokenizer is of bytes, with the marks of Qwen's chat template. So most of the ids that the model
has are none of the tokenizer's, as a few hundred of the true one's are.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken

from headrace.infra.models.make import byte_tokenizer

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
CONFIGURATION = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    # As in Qwen3 0.6B.
    "vocab_size": 151936,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    # There: 1024, 3072, 28, 16 and 8.
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def make(folder: Path) -> Path:
    """Writes the model's folder."""
    folder.mkdir()
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = {"eos_token_id": tokenizer.token_to_id("<|im_end|>")}
    (folder / "config.json").write_text(json.dumps({**CONFIGURATION, **ends}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
