"""A tiny random model that speaks in bytes and a few longer tokens, for tests of structured output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tokenmill import LLM

SPECIAL = ["<pad>", "<s>", "</s>", "<|end|>"]
END, TURN_END = 2, 3
MERGES = [("{", '"'), ('"', ":"), ('"', ","), ('"', "}"), ("t", "r"), ("u", "e"), ("tr", "ue"), ("Ġ", '"'), ("1", "2"),
          ("n", "u"), ("l", "l"), ("nu", "ll"), ("Ã", "©"), ('":', 'Ġ"'), ("a", "b"), ("ab", "c")]  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 333,  # larger than the tokenizer's, and no multiple of 32
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_model(folder: Path, **changes: Any) -> str:
    """A model folder with a byte-level tokenizer; weights are made up when it is opened."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return str(folder)


def open_model(folder: str, **options: Any) -> LLM:
    # float64 makes rounding differences between batch shapes far smaller than any gap between logits.
    settings = {"load_format": "dummy", "dtype": "float64", "device": "cpu", "max_num_seqs": 16, "max_model_len": 512}
    return LLM(folder, **settings | options)


def closers(llm: LLM, strength: float = 4.0) -> dict[int, float]:
    """A bias towards what ends strings, lists and objects: a random model would go on for thousands of tokens."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    ids = [tokenizer.token_to_id(token) for token in ('"', '":', '"}', "}", "]", ",", "1")]
    return {id: strength for id in ids if id is not None}
