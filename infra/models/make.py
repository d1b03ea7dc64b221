"""Makes the model folders in this folder: `python -m headrace.infra.models.make`.

A folder has `config.json` and `tokenizer.json`, and no weights: version 0 is random, from the
recipe's seed. All folders share one tokenizer file. It has one token for each byte, so any text can
be tokenized and restored. Ids 0 to 255 are the bytes; an ASCII character is one token with its own
spelling. Then come `<pad>` and `<end>`. A test proves that the files in the repository equal what
this module makes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

SPECIAL_TOKENS = ("<pad>", "<end>")
"""Ids 256 and 257."""

SIZES = {"tiny-llama": (64, 2), "small-llama": (128, 3)}
"""Hidden size and number of layers of each model."""
HEAD = 32
"""Dimensions of an attention head: the fewest that vLLM's CPU build supports."""
CONTEXT = 512
"""Maximum number of tokens of a sequence."""


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


def byte_tokenizer() -> Tokenizer:
    """Returns a tokenizer with one token for each byte, without merges or normalization."""
    vocabulary = {spelling: byte for byte, spelling in byte_spellings().items()}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def configuration(name: str) -> dict[str, Any]:
    """Returns the `config.json` of a model, as transformers and vLLM read it."""
    vocabulary = 256 + len(SPECIAL_TOKENS)
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
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": None,
        "pad_token_id": vocabulary - 2,
        "eos_token_id": vocabulary - 1,
        "dtype": "float32",
    }


def files(name: str) -> dict[str, str]:
    """Returns the content of a model folder's files, by name."""
    return {
        "config.json": json.dumps(configuration(name), indent=2) + "\n",
        "tokenizer.json": byte_tokenizer().to_str(pretty=True) + "\n",
    }


def main() -> None:
    """Writes all folders."""
    for name in SIZES:
        folder = Path(__file__).parent / name
        folder.mkdir(exist_ok=True)
        for file, text in files(name).items():
            (folder / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
