"""Builds a `tokenizers` tokenizer from the vocabulary that a GGUF file carries in its metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from tokenmill.errors import ModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE = "▁"

_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{0}}"
_MARKS = r" ?[^\s\p{L}\p{N}]+"
_WORDS = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{0}}|{_MARKS}[\r\n]*|{_SPACES}"

# How a text is cut into words before merging, by the names that GGUF files use.
_LLAMA3 = _WORDS.replace("{0}", "{1,3}")
_QWEN2 = _WORDS.replace("{0}", "")
_TEKKEN = _CASED.replace("{0}", "") + rf"|\p{{N}}|{_MARKS}[\r\n/]*|{_SPACES}"
_GPT4O = _CASED.replace("{0}", f"{_ENGLISH}?") + rf"|\p{{N}}{{1,3}}|{_MARKS}[\r\n/]*|{_SPACES}"
_GPT2_STYLE = ("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_PATTERNS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), _QWEN2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}
# Accents are composed into their letters first.
_COMPOSED = ("qwen2", "deepseek-r1-qwen")
# A word that is a token of its own is taken whole, without merging.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")


def build_backend(metadata: Mapping[str, Any], path: str) -> Tokenizer:
    """The tokenizer described by `metadata`; a ModelError says what is missing or not supported."""
    vocabulary = _Vocabulary(metadata, path)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend = _byte_level(vocabulary)
    elif kind == "llama":
        backend = _sentencepiece(vocabulary)
    else:
        raise ModelError(
            f"{path} has a tokenizer of kind {str(kind)!r}; supported are 'gpt2' (BPE) and 'llama' (SentencePiece)"
        )
    _add_special_tokens(backend, vocabulary)
    _add_ends(backend, vocabulary, default_bos=kind == "llama")
    return backend


class _Vocabulary:
    """The tokenizer part of the metadata, checked for consistency."""

    def __init__(self, metadata: Mapping[str, Any], path: str) -> None:
        self.metadata = metadata
        self.path = path
        self.tokens = self._strings("tokens")
        if not self.tokens:
            raise ModelError(f"{path} carries no vocabulary (tokenizer.ggml.tokens); use a file that does")
        self.ids = {token: id for id, token in enumerate(self.tokens)}
        self.types: list[int] = self._numbers("token_type", default=_NORMAL).astype(np.int64).tolist()

    def scores(self) -> list[float]:
        scores: list[float] = self._numbers("scores", default=None).tolist()
        return scores

    def merges(self) -> list[tuple[str, str]]:
        return [line.partition(" ")[::2] for line in self._strings("merges")]

    def token_id(self, name: str) -> int | None:
        id = self.get(f"{name}_token_id")
        return id if isinstance(id, int) and 0 <= id < len(self.tokens) else None

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def _strings(self, key: str) -> list[str]:
        values = self.get(key, [])
        if not isinstance(values, list) or not set(map(type, values)) <= {str}:
            raise ModelError(f"{self.path} has a tokenizer.ggml.{key} that is no list of strings; it is damaged")
        return values

    def _numbers(self, key: str, default: int | None) -> np.ndarray[Any, Any]:
        values = self.get(key)
        if values is None and default is not None:
            return np.full(len(self.tokens), default)
        if not isinstance(values, np.ndarray) or len(values) != len(self.tokens):
            raise ModelError(f"{self.path} needs one tokenizer.ggml.{key} number per token; it is damaged")
        return values


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    pre = str(vocabulary.get("pre", "default"))
    backend = Tokenizer(_bpe(vocabulary, vocabulary.merges(), ignore_merges=pre in _WHOLE_WORDS))
    if pre in _GPT2_STYLE:
        first = []
    elif pre in _SINGLE_DIGITS:
        first = [pre_tokenizers.Digits(individual_digits=True)]
    elif pre == "default":
        first = [_isolated(r"[\p{P}\$\+<=>\^~\|]+"), _isolated(r"[0-9][0-9][0-9]")]
    elif pre in _PATTERNS:
        first = [_isolated(_PATTERNS[pre])]
    else:
        known = ", ".join(["default", *_GPT2_STYLE, *_SINGLE_DIGITS, *_PATTERNS])
        raise ModelError(f"{vocabulary.path} cuts words by the unknown rule {pre!r}; known are {known}")
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _PATTERNS)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, by_bytes]) if first else by_bytes
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _isolated(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> BPE:
    try:
        return BPE(vocab=vocabulary.ids, merges=merges, **options)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{vocabulary.path} has merges unfit for its vocabulary ({error}); it is damaged") from None


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    unknown = vocabulary.token_id("unknown")
    model = _bpe(
        vocabulary,
        _merges_by_score(vocabulary),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.get("add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        steps.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose whole has the best score; as a list of merges, best first."""
    ids, scores = vocabulary.ids, vocabulary.scores()
    found = []
    for id, (piece, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind not in (_NORMAL, _USER_DEFINED) or len(piece) > _LONGEST_PIECE:
            continue
        for cut in range(1, len(piece)):
            left, right = ids.get(piece[:cut]), ids.get(piece[cut:])
            if left is not None and right is not None:
                found.append((-scores[id], id, left, right))
    found.sort()
    tokens = vocabulary.tokens
    return [(tokens[left], tokens[right]) for _, _, left, right in found]


_LONGEST_PIECE = 512  # characters; real ones stay under 100, and trying every cut of a damaged one would take forever


def _add_special_tokens(backend: Tokenizer, vocabulary: _Vocabulary) -> None:
    # Phi-3's own tokenizer swallows white space after its markers; the file does not say so.
    swallows = vocabulary.metadata.get("general.architecture") == "phi3" and vocabulary.get("model") == "llama"
    plain = ("<unk>", "<s>", "<|endoftext|>")
    added = []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if not token or kind not in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            continue
        special = kind != _USER_DEFINED
        rstrip = swallows and special and token not in plain
        added.append(AddedToken(token, special=special, normalized=_SPACE in token, rstrip=rstrip))
    backend.add_tokens(added)


def _add_ends(backend: Tokenizer, vocabulary: _Vocabulary, default_bos: bool) -> None:
    """Begin and end tokens around every encoded text, where the file asks for them."""
    bos = vocabulary.token_id("bos") if vocabulary.get("add_bos_token", default_bos) else None
    eos = vocabulary.token_id("eos") if vocabulary.get("add_eos_token", False) else None
    if bos is None and eos is None:
        return
    tokens = vocabulary.tokens
    backend.post_processor = processors.TemplateProcessing(
        single=[*([] if bos is None else [tokens[bos]]), "$A", *([] if eos is None else [tokens[eos]])],
        special_tokens=[(tokens[id], id) for id in dict.fromkeys((bos, eos)) if id is not None],
    )
