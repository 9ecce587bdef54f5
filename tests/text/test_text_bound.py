"""A text is called too long before it is tokenized only if it is, whatever the tokenizer does to it."""

from __future__ import annotations

import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from tokenmill import errors
from tokenmill.model import text_bound
from tokenmill.model import tokenizer as tokenizer_module
from tokenmill.model.text_bound import TextBound, bound_of

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def bpe(words: list[str], merges: list[tuple[str, str]] | None = None, **more: object) -> Tokenizer:
    return Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges or [], **more))


def byte_level(left_out: str = "", mark: AddedToken | None = None) -> Tokenizer:
    """Its tokens are short, so that there is little room between what fits and what is refused."""
    known = [one for one in ALPHABET if one not in left_out]
    made = bpe([*known, "aa", "á¾", "á¾Ĥ"], [("a", "a"), ("á", "¾"), ("á¾", "Ĥ")])  # the last one is U+1F82
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    made.add_special_tokens([mark or AddedToken("<m>", special=True)])
    return made


def composing() -> Tokenizer:
    made = byte_level()
    made.normalizer = normalizers.NFKC()
    return made


def fallback(model: str) -> Tokenizer:
    words = ["<unk>", *BYTES, "▁", "a", "▁a"]
    if model == "BPE":
        made = bpe(words, [("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    else:
        scored = [(word, -float(number)) for number, word in enumerate(words)]
        made = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def spaceless() -> Tokenizer:
    made = byte_level()
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(False)])
    return made


BOUNDED = {
    "byte-level": byte_level(),
    "byte-level without some bytes": byte_level("ĄĆ"),  # 04 and 06 are in few vocabularies
    "byte-level with a greedy mark": byte_level(mark=AddedToken("<m>", lstrip=True, rstrip=True, special=True)),
    "composing": composing(),
    "byte fallback": fallback("BPE"),
    "byte fallback, unigram": fallback("Unigram"),
    "without spaces": spaceless(),
    "one unknown token each": bpe(["<unk>", "a"], unk_token="<unk>"),
}
TEXTS = st.text(
    st.sampled_from("aaa \t\n7b<m>\x04\x06\u00e9e\u0301\u0313\u0300\u0345\u03b1水車\U0001f600\u3000"), max_size=60
)


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        TEXTS | st.sampled_from(["<m>" + " " * 50, " " * 50, "\x04" * 50, "α\u0313\u0300\u0345" * 9]),
        max_size=6,
    )
)
def test_what_fits_is_never_refused(name: str, parts: list[str]) -> None:
    text, backend = "".join(parts), BOUNDED[name]
    bound = bound_of(backend)
    assert bound is not None
    assert bound.may_fit(text, len(backend.encode(text).ids)), (bound, text)


def test_the_bounds_are_what_the_longest_tokens_say() -> None:
    assert bound_of(BOUNDED["byte-level"]) == TextBound(3)
    assert bound_of(BOUNDED["composing"]) == TextBound(4 * 3)
    lacking = bound_of(byte_level("ĄĆ"))
    assert sorted(lacking.dropped) == ["\x04", "\x06"]
    assert lacking.may_fit("\x04" * 10_000, 1) and not lacking.may_fit("a" * 10_000, 100)
    assert {*text_bound._SPACES} == {one for one in map(chr, range(sys.maxunicode + 1)) if one.isspace()}
    assert bound_of(BOUNDED["without spaces"]).dropped.isspace()


def dropping(**parts: object) -> Tokenizer:
    made = byte_level()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


@pytest.mark.parametrize(
    "backend",
    [
        dropping(normalizer=normalizers.Replace(Regex(" +"), " ")),
        dropping(normalizer=normalizers.StripAccents()),
        dropping(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Replace("x", "")])),
        dropping(pre_tokenizer=pre_tokenizers.Split("a", "removed")),
        dropping(model=models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
        dropping(model=models.WordPiece({"<unk>": 0}, unk_token="<unk>")),
        bpe(["<unk>", "a"], unk_token="<unk>", fuse_unk=True),
        bpe(["a"]),
        byte_level("Ģ"),  # byte 80, a part of many longer characters
        Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
    ],
)
def test_a_tokenizer_that_may_lose_any_text_has_no_bound(backend: Tokenizer) -> None:
    assert bound_of(backend) is None


def test_a_text_beyond_the_bound_is_refused_with_both_numbers_and_not_tokenized() -> None:
    backend = byte_level()
    tokenizer = tokenizer_module.Tokenizer(backend)
    longest = 3 * 8
    assert tokenizer.encode("a" * 16, max_tokens=8) == [backend.token_to_id("aa")] * 8
    with pytest.raises(errors.InvalidRequest, match=r"the prompt has 15 tokens, but .* max_model_len = 8 tokens; "):
        tokenizer.encode("水" * 5, max_tokens=8)

    class Untouched:
        def __getattr__(self, name: str) -> object:
            raise AssertionError("it was looked at")

    assert tokenizer.bound is not None
    tokenizer._backend = Untouched()  # type: ignore[assignment]
    said = rf"the prompt has {longest + 1} characters, but .* max_model_len = 8 tokens, which hold {longest} characters"
    with pytest.raises(errors.InvalidRequest, match=said):
        tokenizer.encode("a" * (longest + 1), max_tokens=8)


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    tokenizer = tokenizer_module.Tokenizer(byte_level())
    text = "The mill by the river. " * 30_000
    longest, beats, over = 0.0, 0, threading.Event()

    def beat() -> None:
        nonlocal longest, beats
        last = time.perf_counter()
        while not over.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            longest, beats, last = max(longest, now - last), beats + 1, now

    watch = threading.Thread(target=beat)
    watch.start()
    began = time.perf_counter()
    with pytest.raises(errors.InvalidRequest):
        tokenizer.encode(text, max_tokens=300_000)
    took = time.perf_counter() - began
    over.set()
    watch.join()
    assert longest < took / 2 and beats > 10, f"others stood still for {longest:.2f} of {took:.2f} s"
