"""A damaged or hostile GGUF file ends in one sentence, never in a crash, a hang or a huge allocation."""

import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from gguf_files import add_byte_level_vocabulary, finish
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.errors import ModelError
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.model.weights.gguf import GGUFCheckpoint


@pytest.fixture(scope="module")
def valid(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "valid.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.0)
    add_byte_level_vocabulary(writer)
    square = np.eye(32, dtype=np.float32)
    writer.add_tensor("token_embd.weight", np.zeros((260, 32), dtype=np.float32))
    for name in ("attn_q", "attn_output", "ffn_gate"):
        data = gguf.quants.quantize(square, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"blk.0.{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32))
    return finish(writer, path).read_bytes()


def read_everything(content: bytes, path) -> None:
    path.write_bytes(content)
    checkpoint = GGUFCheckpoint(path)
    for name in checkpoint.names():
        checkpoint.tensor(name)
    tokenizer = Tokenizer.from_gguf(checkpoint)
    tokenizer.decode(tokenizer.encode("hello 12 <|end|> \N{GRINNING FACE}"))


def test_the_undamaged_file_is_read(valid, tmp_path):
    read_everything(valid, tmp_path / "valid.gguf")


def fuzz(number):
    return settings(max_examples=number, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzz(150)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_raises_only_model_error(valid, tmp_path, share):
    with pytest.raises(ModelError):
        read_everything(valid[: int(len(valid) * share)], tmp_path / "short.gguf")


@fuzz(600)
@given(data=st.data())
def test_flipped_bytes_raise_nothing_but_model_error(valid, tmp_path, data):
    head = valid.index(b"rope_freqs.weight") + 64  # beyond it there are only weights, where any byte is valid
    content = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, head))] = data.draw(st.integers(0, 255))
    try:
        read_everything(bytes(content), tmp_path / "flipped.gguf")
    except ModelError as error:
        assert "\n" not in str(error)


def header(tensors=0, entries=0, version=3, magic=b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, entries)


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


HOSTILE = {
    "empty": b"",
    "not gguf": b"PK\x03\x04" + bytes(64),
    "version 1": header(version=1) + bytes(64),
    "big endian": header(version=0x03000000) + bytes(64),
    "2**60 tensors": header(tensors=2**60) + bytes(64),
    "2**60 entries": header(entries=2**60) + bytes(64),
    "string of 2**63 bytes": header(entries=1) + struct.pack("<Q", 2**63) + bytes(64),
    "array of 2**62 strings": header(entries=1) + entry(b"k", 9, struct.pack("<IQ", 8, 2**62)) + bytes(64),
    "array of 2**62 doubles": header(entries=1) + entry(b"k", 9, struct.pack("<IQ", 12, 2**62)) + bytes(64),
    "arrays in arrays": header(entries=1) + entry(b"k", 9, struct.pack("<IQ", 9, 1) * 500) + bytes(64),
    "unknown value type": header(entries=1) + entry(b"k", 77, bytes(8)) + bytes(64),
    "key twice": header(entries=2) + entry(b"k", 0, b"\1") * 2 + bytes(64),
    "alignment 0": header(entries=1) + entry(b"general.alignment", 4, bytes(4)) + bytes(64),
}


def tensor(dims, kind=0, offset=0) -> bytes:
    name = b"token_embd.weight"
    shape = struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", dim) for dim in dims)
    head = header(tensors=1) + struct.pack("<Q", len(name)) + name
    return head + shape + struct.pack("<IQ", kind, offset) + bytes(64)


HOSTILE |= {
    "tensor of 2**120 values": tensor([2**60, 2**60]),
    "tensor beyond the end": tensor([4], offset=2**63),
    "tensor without dimensions": tensor([]),
    "tensor with 4000000000 dimensions": tensor([])[:-76] + b"\xff" * 4 + bytes(72),
    "tensor with an empty dimension": tensor([0, 4]),
    "unknown tensor format": tensor([4], kind=9999),
    "half a block": tensor([31], kind=8),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_in_one_sentence_without_using_memory(name, tmp_path):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[name])
    tracemalloc.start()
    try:
        with pytest.raises(ModelError) as caught:
            GGUFCheckpoint(path)
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()
    assert "hostile.gguf" in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"none\.gguf cannot be read"):
        GGUFCheckpoint(tmp_path / "none.gguf")
