"""Fill in the middle: which tokens of a vocabulary mark what stands before and after a gap, and prompts of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.model.tokenizer import Tokenizer

# (before the prefix, before the suffix, before the middle), as model families call them.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Stable Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder, Granite
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral: the suffix comes first, and the prefix runs on into the middle
)
# Tokens that a model writes where the middle is complete, beside its end tokens.
_ENDS = (
    "▁<EOT>",
    "<EOT>",
    "<|fim_pad|>",
    "<fim_pad>",
    "<fim-pad>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<file_sep>",
    "<|file_separator|>",
    "[MIDDLE]",
)
_GGUF = ("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")  # the second ones are of old files
_GGUF_ENDS = ("fim_pad", "fim_rep", "fim_sep", "eot")
NO_INFILL = (
    "suffix is set, but this model's vocabulary has no tokens for filling in the middle (such as <|fim_suffix|>); "
    "leave it out, or take a model that has them"
)
_SIGN = "☺"  # a tokenizer that puts a space before a text puts it before this sign, which is then taken away


@dataclass(frozen=True)
class Infill:
    """A model's way of being asked for a middle. Whether it was trained for it, a vocabulary does not say."""

    prefix: int
    suffix: int
    middle: int | None  # None: the order is suffix, prefix
    ends: tuple[int, ...]  # these, too, end an answer

    def prompt(
        self, tokenizer: Tokenizer, before: str | Sequence[int], after: str, max_tokens: int | None = None
    ) -> list[int]:
        """The token ids that ask for what stands between two texts. Raises InvalidRequest."""
        first = tokenizer.encode(before, False, max_tokens) if isinstance(before, str) else list(before)
        last = _inside(tokenizer, after, max_tokens)
        bos = tokenizer.bos_id
        begin = [bos] if bos is not None and bos in tokenizer.encode("") else []
        if self.middle is None:
            return [*begin, self.suffix, *last, self.prefix, *first]
        return [*begin, self.prefix, *first, self.suffix, *last, self.middle]


def find_infill(id_of: Callable[[str], int | None], metadata: Mapping[str, Any] | None = None) -> Infill | None:
    """By the names of tokens, or as the metadata of a GGUF file gives them; None: there are none."""
    given = {name: _id(metadata, name) for names in (*_GGUF, _GGUF_ENDS) for name in names}
    named = [id for name in _ENDS if (id := id_of(name)) is not None]
    ends = [*named, *(id for name in _GGUF_ENDS if (id := given[name]) is not None)]
    for names in _GGUF:
        prefix, suffix, middle = (given[name] for name in names)
        if prefix is not None and suffix is not None and middle is not None:
            return _made(prefix, suffix, middle, ends)
    for before, after, between in _MARKS:
        prefix, suffix = id_of(before), id_of(after)
        middle = None if between is None else id_of(between)
        if prefix is not None and suffix is not None and (middle is not None or between is None):
            return _made(prefix, suffix, middle, ends)
    return None


def _made(prefix: int, suffix: int, middle: int | None, ends: list[int]) -> Infill:
    marks = [id for id in (prefix, suffix, middle) if id is not None]
    return Infill(prefix, suffix, middle, tuple(dict.fromkeys([*marks, *ends])))


def _id(metadata: Mapping[str, Any] | None, name: str) -> int | None:
    if metadata is None:
        return None
    id, tokens = metadata.get(f"tokenizer.ggml.{name}_token_id"), metadata.get("tokenizer.ggml.tokens", ())
    return id if isinstance(id, int) and not isinstance(id, bool) and 0 <= id < len(tokens) else None


def _inside(tokenizer: Tokenizer, text: str, max_tokens: int | None) -> list[int]:
    """The ids of a text that does not begin a line of its own: without the space that some tokenizers put before."""
    if tokenizer.pieces.drops_first_space:
        sign = tokenizer.encode(_SIGN, False)
        ids = tokenizer.encode(_SIGN + text, False, None if max_tokens is None else max_tokens + len(sign))
        if ids[: len(sign)] == sign:
            return ids[len(sign) :]
    return tokenizer.encode(text, False, max_tokens)
