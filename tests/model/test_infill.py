"""Prompts with a suffix are written as each family of models has learned to read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from tokenmill.model.infill import Infill, find_infill
from tokenmill.model.tokenizer import Tokenizer


def byte_level(special: Sequence[str], bos: bool = False) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({token: id for id, token in enumerate(["<s>", *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in ["<s>", *special]])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(backend, bos_id=0)


def sentencepiece() -> Tokenizer:
    """Puts a space before every text, as Llama 2's does."""
    tokens = ["<unk>", "<s>", "▁", *(f"<0x{byte:02X}>" for byte in range(256)), *"abcdefgh☺"]
    backend = Backend(models.BPE({t: id for id, t in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    marks = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in marks])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(backend, bos_id=1)


def shown(tokenizer: Tokenizer, before: Any, after: str) -> str:
    assert tokenizer.infill is not None
    return "".join(str(tokenizer.id_to_token(id)) for id in tokenizer.infill.prompt(tokenizer, before, after))


@pytest.mark.parametrize(
    ("special", "expected"),
    [
        (["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], "<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>"),
        (["<fim_prefix>", "<fim_middle>", "<fim_suffix>"], "<fim_prefix>ab<fim_suffix>cd<fim_middle>"),
        (["<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"], "<｜fim▁begin｜>ab<｜fim▁hole｜>cd<｜fim▁end｜>"),
        (["[PREFIX]", "[MIDDLE]", "[SUFFIX]"], "[SUFFIX]cd[PREFIX]ab"),
    ],
)
def test_marks_are_found_by_their_names(special: list[str], expected: str) -> None:
    assert shown(byte_level(special), "ab", "cd") == expected
    assert shown(byte_level(special, bos=True), "ab", "cd") == "<s>" + expected
    tokenizer = byte_level(special)
    assert shown(tokenizer, tokenizer.encode("ab"), "cd") == expected
    assert tokenizer.infill is not None
    assert set(tokenizer.infill.ends) == {tokenizer.token_to_id(name) for name in special}


def test_a_suffix_gets_no_space_that_is_not_there() -> None:
    tokenizer = sentencepiece()
    assert shown(tokenizer, "ab", "cd") == "<s>▁<PRE>▁ab▁<SUF>cd▁<MID>"
    assert shown(tokenizer, "ab", " cd") == "<s>▁<PRE>▁ab▁<SUF>▁cd▁<MID>"
    assert tokenizer.infill is not None and tokenizer.token_to_id("▁<EOT>") in tokenizer.infill.ends


def test_a_vocabulary_without_all_marks_has_none() -> None:
    assert byte_level([]).infill is None
    assert byte_level(["<|fim_prefix|>", "<|fim_suffix|>"]).infill is None


@pytest.mark.parametrize("names", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")])
def test_gguf_metadata_names_the_marks(names: tuple[str, str, str]) -> None:
    metadata: dict[str, Any] = {f"tokenizer.ggml.{name}_token_id": number for number, name in enumerate(names, 5)}
    metadata |= {"tokenizer.ggml.tokens": ["x"] * 12, "tokenizer.ggml.fim_pad_token_id": 9}
    metadata |= {"tokenizer.ggml.fim_rep_token_id": 12}  # of another vocabulary
    found = find_infill(byte_level(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]).token_to_id, metadata)
    assert found == Infill(5, 6, 7, (5, 6, 7, 9))
    assert find_infill(byte_level([]).token_to_id, {"tokenizer.ggml.fim_pre_token_id": 3}) is None
