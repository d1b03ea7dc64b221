"""Makes the model folders in this folder: `python -m headrace.infra.models.make`.

A folder has `config.json` and `tokenizer.json`, and no weights: version 0 is random, from the
recipe's seed. The tokenizers have one token for each byte, so any text can be tokenized and
restored. Ids 0 to 255 are the bytes; an ASCII character is one token with its own spelling. Then
come `<pad>` and `<end>`. `tiny-chat` also has a chat template, and a token for each role in it. A
test proves that the files in the repository equal what this module makes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

SPECIAL_TOKENS = ("<pad>", "<end>")
"""Ids 256 and 257."""
ROLES = ("<system>", "<user>", "<assistant>", "<tool>")
"""Ids 258 to 261 of a model with a chat template: they begin a message."""
CHAT_TEMPLATE = """\
{%- if tools -%}
<system>Call a tool as <tool_call>{"name": NAME, "arguments": {...}}</tool_call>. The tools are
{%- for tool in tools %} {{ tool | tojson }}{% endfor %}<end>
{%- endif -%}
{%- for message in messages -%}
<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or () -%}
<tool_call>{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson -}}
</tool_call>
{%- endfor %}<end>
{%- endfor %}<assistant>
"""
"""Renders calls of tools as Hermes' models spell them."""

SIZES = {"tiny-llama": (64, 2), "small-llama": (128, 3), "tiny-chat": (64, 2)}
"""Hidden size and number of layers of each model."""
CHAT = "tiny-chat"
"""The model with a chat template."""
HEAD = 32
"""Dimensions of an attention head: the fewest that vLLM's CPU build supports."""
CONTEXTS = {CHAT: 4096}
"""Maximum number of tokens of a sequence. Definitions of tools are long if a token is a byte."""
CONTEXT = 512
"""The same for all other models."""


def byte_spellings() -> dict[int, str]:
    """Returns how byte-level tokenizers spell each byte, always as a printable character.

    This is the table of GPT-2 (Radford et al. 2019). A byte that is printable in Latin-1 is spelled
    as itself. The others get the code points from 256 on, in ascending order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spellings = {byte: chr(byte) for byte in printable}
    spellings |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return spellings


def special_tokens(name: str) -> tuple[str, ...]:
    """Returns the special tokens of a model. Their ids follow those of the bytes."""
    return SPECIAL_TOKENS + (ROLES if name == CHAT else ())


def byte_tokenizer(special: Sequence[str] = SPECIAL_TOKENS) -> Tokenizer:
    """Returns a tokenizer with one token for each byte, without merges or normalization."""
    vocabulary = {spelling: byte for byte, spelling in byte_spellings().items()}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    return tokenizer


def configuration(name: str) -> dict[str, Any]:
    """Returns the `config.json` of a model, as transformers and vLLM read it."""
    vocabulary = 256 + len(special_tokens(name))
    hidden, layers = SIZES[name]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD,
        "num_key_value_heads": hidden // HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXTS.get(name, CONTEXT),
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": None,
        "pad_token_id": 256,
        "eos_token_id": 257,
        "dtype": "float32",
    }


def files(name: str) -> dict[str, str]:
    """Returns the content of a model folder's files, by name."""
    made = {
        "config.json": json.dumps(configuration(name), indent=2) + "\n",
        "tokenizer.json": byte_tokenizer(special_tokens(name)).to_str(pretty=True) + "\n",
    }
    return made | ({"chat_template.jinja": CHAT_TEMPLATE} if name == CHAT else {})


def main() -> None:
    """Writes all folders."""
    for name in SIZES:
        folder = Path(__file__).parent / name
        folder.mkdir(exist_ok=True)
        for file, text in files(name).items():
            (folder / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
