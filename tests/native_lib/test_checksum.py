"""The native checksum against one made bit by bit, on every length and alignment."""

import ctypes

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.ops.native.checksum import checksum
from tokenmill.ops.native.library import library


def slow_crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def both(data):
    native = library()
    buffer = (ctypes.c_char * max(1, len(data))).from_buffer_copy(data or b"\0")
    return [native.c.tm_crc32c(ctypes.addressof(buffer), len(data), plain) for plain in (0, 1)]


def test_it_is_the_usual_crc32c():
    assert both(b"123456789") == [0xE3069283] * 2 and both(b"") == [0, 0]
    name, function = checksum()
    assert name == "crc32c" and function(memoryview(bytearray(b"123456789"))) == 0xE3069283


@settings(max_examples=20, deadline=None)
@given(size=st.integers(0, 40_000), seed=st.binary(min_size=1, max_size=40), skip=st.integers(0, 9))
def test_instruction_and_table_agree_with_the_bits(size, seed, skip):
    data = (seed * (size // len(seed) + 1))[:size]
    want = slow_crc32c(data[:3000]) if size <= 3000 else None
    fast, plain = both(data)
    assert fast == plain and want in (None, fast)
    shifted = memoryview(bytearray(skip) + bytearray(data))[skip:]
    assert checksum()[1](shifted) == fast
