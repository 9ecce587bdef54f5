"""Tokenizers built from GGUF metadata and from tokenizer.json give the ids of the libraries they stand in for."""

import json
import time
import unicodedata

import numpy as np
import pytest
from gguf_metadata import DATA, from_metadata
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import InvalidRequest, ModelError
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.model.weights.gguf import GGUFCheckpoint

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\t\tand\nnew\r\nlines\n\n\n   end",
    "1234567890 3.14159 2024-01-31 1,000,000",
    "I'm you're they'll he'd WE'VE it's",
    "naïve café, Ångström, e\u0301 vs é, ﬁ",
    "日本語のテキストと漢字、한국어 텍스트, العربية, עברית, ไทย",
    "😀 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 \u200b\u200d\ufeff",
    "def f(x):\n    return {'a': [1, 2], \"b\": x ** 2}\n\n\n# done\n",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|> <|im_end|><|endoftext|>text<|im_end|",
    "a" * 300 + " " * 100 + "!" * 50,
    "\x00\x01\x7f \x85\xa0\u2028\u3000",
    "𝕳𝖊𝖑𝖑𝖔 \U0001f9d1\U0001f3fd",
]

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)


@pytest.fixture(scope="module")
def reference(default_path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(default_path.parent, gguf_file=default_path.name)


@pytest.fixture(scope="module")
def known_bytes(byte_level) -> set[bytes]:
    """The default vocabulary lacks tokens for a few bytes, such as most control characters."""
    return {byte_level.pieces.bytes_of(id) for id in range(byte_level.vocab_size)}


@pytest.fixture(scope="module")
def corpus() -> str:
    file = DATA / "wikitext2_valid.txt"
    if not file.is_file():
        pytest.skip("no text corpus beside the repository")
    return file.read_text(encoding="utf-8")[:200_000]


@pytest.mark.parametrize("text", TEXTS)
def test_default_tokenizer_gives_the_ids_of_transformers(byte_level, reference, text):
    assert byte_level.encode(text) == reference.encode(text)


def test_default_tokenizer_gives_the_ids_of_transformers_on_a_corpus(byte_level, reference, corpus):
    assert byte_level.encode(corpus) == reference.encode(corpus)


@settings(max_examples=200, deadline=None)
@given(text=any_text)
def test_default_tokenizer_gives_the_ids_of_transformers_on_any_text(byte_level, reference, known_bytes, text):
    ids = byte_level.encode(text)
    # Digits stand alone in this vocabulary; what transformers makes of a GGUF file lacks that rule, which shows only
    # where a number such as ¼ is more than one byte.
    if all(char.isascii() or not unicodedata.category(char).startswith("N") for char in text):
        assert ids == reference.encode(text)
    if all(bytes([byte]) in known_bytes for byte in text.encode()):
        assert byte_level.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30), skip=st.booleans())
def test_decoding_any_ids_gives_the_text_of_transformers(byte_level, reference, ids, skip):
    assert byte_level.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


def test_default_tokenizer_is_built_in_a_fraction_of_a_second(default_path):
    checkpoint = GGUFCheckpoint(default_path)
    times = []
    for _ in range(3):
        start = time.process_time()
        Tokenizer.from_gguf(checkpoint)
        times.append(time.process_time() - start)
    assert min(times) < 0.3


def test_special_tokens_of_the_default_model(byte_level):
    assert byte_level.bos_token == "<|im_start|>" and byte_level.eos_token == "<|im_end|>"
    assert byte_level.eos_ids[0] == 2 and set(byte_level.eos_ids) == {0, 2}
    assert byte_level.vocab_size == 49152
    assert byte_level.is_special(2) and not byte_level.is_special(100)
    assert byte_level.id_to_token(2) == "<|im_end|>" and byte_level.token_to_id("<|im_end|>") == 2
    assert byte_level.id_to_token(10**6) is None and byte_level.id_to_token(-1) is None
    assert byte_level.decode([10**6, -5]) == ""
    assert "<|im_start|>" in byte_level.chat_template


@pytest.mark.parametrize("text", [text for text in TEXTS if text])
def test_sentencepiece_kind_gives_the_ids_of_sentencepiece(byte_fallback, trained_pieces, text):
    assert byte_fallback.encode(text, add_special_tokens=False) == trained_pieces.encode(text)
    assert byte_fallback.encode(text)[0] == byte_fallback.bos_id == 1
    assert byte_fallback.decode(byte_fallback.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(text=any_text.filter(lambda text: text and "\x00" not in text and "\u2581" not in text))
def test_sentencepiece_kind_gives_the_ids_of_sentencepiece_on_any_text(byte_fallback, trained_pieces, text):
    if any(marker in text for marker in ("<s>", "</s>", "<unk>")):
        return  # control tokens are recognized in text here, and not by the library
    ids = byte_fallback.encode(text, add_special_tokens=False)
    assert ids == trained_pieces.encode(text)
    assert byte_fallback.decode(ids) == text


def test_without_space_prefix_nothing_is_put_before_the_text(sentencepiece_metadata):
    plain = from_metadata({**sentencepiece_metadata, "tokenizer.ggml.add_space_prefix": False})
    ids = plain.encode("the king", add_special_tokens=False)
    assert plain.id_to_token(ids[0])[0] != "\u2581" and plain.decode(ids) == "the king"
    assert plain.decode(plain.encode(" the")) == " the"


def test_user_defined_tokens_are_matched_in_text_but_are_not_special(sentencepiece_metadata):
    metadata = dict(sentencepiece_metadata)
    last = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<tool>"]
    metadata["tokenizer.ggml.scores"] = np.append(metadata["tokenizer.ggml.scores"], 0.0)
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], 4)
    tokenizer = from_metadata(metadata)
    assert last in tokenizer.encode("a<tool>b") and not tokenizer.is_special(last)


PATTERN_CASES = {
    # name -> (text, how that rule cuts it)
    "llama-bpe": ("It's 12345 cats\n\n  end", ["It", "'s", " ", "123", "45", " cats", "\n\n", " ", " end"]),
    "qwen2": ("It's 123 cats\n\n  end", ["It", "'s", " ", "1", "2", "3", " cats", "\n\n", " ", " end"]),
    "gpt-2": ("It's 12345 cats!\n end", ["It", "'s", " 12345", " cats", "!", "\n", " end"]),
    "smollm": ("It's 12 cats", ["It", "'s", " ", "1", "2", " cats"]),
    "tekken": ("helloWorld 12", ["hello", "World", " ", "1", "2"]),
    "gpt-4o": ("helloWorld's 1234", ["hello", "World's", " ", "123", "4"]),
    "default": ("It's 12345 cats!", ["It", "'", "s", " ", "123", "45", " cats", "!"]),
}


@pytest.mark.parametrize("name", PATTERN_CASES)
def test_words_are_cut_by_the_rule_that_the_file_names(name):
    from tokenizers.pre_tokenizers import ByteLevel

    text, words = PATTERN_CASES[name]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": sorted(ByteLevel.alphabet()),
    }
    backend = from_metadata(metadata)._backend
    cut = [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == words


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"tokenizer.ggml.model": "bert"}, "kind 'bert'"),
        ({"tokenizer.ggml.tokens": []}, "no vocabulary"),
        ({"tokenizer.ggml.scores": None}, "scores number per token"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "novel"}, "unknown rule 'novel'"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["q zz"]}, "merges unfit"),
    ],
)
def test_metadata_that_describes_no_tokenizer_is_refused(sentencepiece_metadata, change, expected):
    with pytest.raises(ModelError, match=expected):
        from_metadata({**sentencepiece_metadata, **change})


def test_long_prompts_are_refused_before_and_after_tokenizing(byte_level):
    assert byte_level.encode("one two three", max_tokens=3) == byte_level.encode("one two three")
    with pytest.raises(InvalidRequest, match="3 tokens, but prompt and answer share max_model_len = 2 "):
        byte_level.encode("one two three", max_tokens=2)
    start = time.process_time()  # the clock would count what other processes do meanwhile
    with pytest.raises(InvalidRequest, match=r"50000000 characters, .* raise max_model_len"):
        byte_level.encode("ab " * 10_000_000 + "x" * 20_000_000, max_tokens=100)
    assert time.process_time() - start < 2


def test_text_that_is_not_unicode_is_refused(byte_level):
    with pytest.raises(InvalidRequest, match="Unicode"):
        byte_level.encode("\ud800")


@pytest.fixture
def folder(byte_level, tmp_path):
    byte_level._backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_directory_gives_tokens_template_and_all_stop_ids(folder, byte_level):
    settings = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": "one"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    tokenizer = Tokenizer.from_directory(folder)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2, 7, 9, 0))
    assert tokenizer.chat_template == "one"
    assert tokenizer.encode("Hello 12") == byte_level.encode("Hello 12")
    (folder / "chat_template.jinja").write_text("two")
    assert Tokenizer.from_directory(folder).chat_template == "two"


def test_the_default_one_of_several_templates_is_taken(folder):
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert Tokenizer.from_directory(folder).chat_template == "plain"


def test_a_directory_alone_is_enough(folder):
    tokenizer = Tokenizer.from_directory(folder)
    assert (tokenizer.bos_id, tokenizer.chat_template, tokenizer.bos_token) == (None, None, "")


@pytest.mark.parametrize("kind", ["words", "metaspace"])
def test_other_decoders_give_the_text_of_the_library(kind, tmp_path):
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    words = ["the", "king", "is"]
    tokens = words if kind == "words" else [f"\u2581{word}" for word in words]
    backend = Backend(models.WordLevel({token: id for id, token in enumerate(tokens)}, unk_token=tokens[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace() if kind == "words" else pre_tokenizers.Metaspace()
    if kind == "metaspace":
        backend.decoder = decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    ids = tokenizer.encode("king is the king")
    assert tokenizer.decode(ids) == backend.decode(ids) == "king is the king"


def test_a_decoder_that_cannot_be_streamed_is_refused(tmp_path):
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.WordPiece({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="'WordPiece'"):
        Tokenizer.from_directory(tmp_path)


def test_missing_or_damaged_tokenizer_files_are_one_sentence(folder, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(empty)
    (empty / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"only tokenizer\.model"):
        Tokenizer.from_directory(empty)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json cannot be read"):
        Tokenizer.from_directory(folder)
    (folder / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_directory(folder)
