"""The Triton kernels write and read quantized keys and values as the reference does."""

from dataclasses import replace

import pytest
import torch
from cases import AttentionCase, RopeCase, attention_case, rope_case, tolerance

from tokenmill.ops import reference
from tokenmill.ops.kv_forms import KV_FORMS, KVScales, dequantize, quantize
from tokenmill.ops.types import Mask

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_device", "poisoned_memory")
FORMS = sorted(KV_FORMS)
HALF = torch.float16


def coded(case: AttentionCase, form: str) -> tuple[AttentionCase, AttentionCase, KVScales]:
    """The case with codes where it had floats (poison becomes a scale that is not a number), with the floats that
    the codes stand for, and the scales of the codes.
    """
    k_codes, k_scales = quantize(case.k_cache.float(), KV_FORMS[form])
    v_codes, v_scales = quantize(case.v_cache.float(), KV_FORMS[form])
    read = replace(
        case,
        q=case.q.float(),
        k_cache=dequantize(k_codes, k_scales, torch.float32),
        v_cache=dequantize(v_codes, v_scales, torch.float32),
    )
    return replace(case, k_cache=k_codes, v_cache=v_codes), read, KVScales(k_scales, v_scales)


def check(case: AttentionCase, form: str) -> None:
    from tokenmill.ops.triton.attention.paged import attention

    codes, floats, scales = coded(case, form)
    expected = floats.call(reference.attention)
    got = codes.call(lambda *args: attention(*args, scales=scales))
    assert got.dtype == case.q.dtype and not got.isnan().any()
    torch.testing.assert_close(got.float(), expected, **tolerance(case.q.dtype))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("mask", "dtype"),
    [(Mask(), torch.float32), (Mask(window=40), HALF), (Mask(window=33, softcap=20.0), HALF)],
    ids=str,
)
def test_singles_and_chunks_equal_reference(mask, dtype, form, triton_device):
    counts, contexts = [1, 1, 1, 3, 20], [1, 64, 90, 37, 50]
    check(attention_case(counts, contexts, key_dim=64, mask=mask, dtype=dtype, device=triton_device), form)


HEADS = [
    {"heads": 8, "kv_heads": 2, "key_dim": 128},
    {"heads": 8, "kv_heads": 1, "key_dim": 64},
    {"heads": 3, "kv_heads": 3, "key_dim": 32},
    {"heads": 4, "kv_heads": 2, "key_dim": 96},
    {"heads": 2, "kv_heads": 1, "key_dim": 256},
    {"heads": 2, "kv_heads": 2, "key_dim": 16},
    {"heads": 2, "kv_heads": 1, "key_dim": 192, "value_dim": 128},
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_head_shape_equals_reference(heads, form, triton_device):
    check(attention_case([1, 3], [35, 20], dtype=HALF, device=triton_device, **heads), form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("heads", "block_size", "softcap"), [(7, 64, None), (40, 16, 20.0), (2, 4, None)], ids=["wide", "tiles", "narrow"]
)
def test_singles_read_blocks_and_groups_of_any_size(heads, block_size, softcap, form, triton_device):
    """Blocks larger and smaller than a tile of keys; more queries than a program has; few of them."""
    shape = {"heads": heads, "kv_heads": 1, "key_dim": 64, "block_size": block_size, "mask": Mask(softcap=softcap)}
    check(attention_case([1, 1], [70, 33], dtype=HALF, device=triton_device, **shape), form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dim", [32, 64])
def test_a_shared_prefix_equals_reference(dim, form, triton_device):
    case = attention_case([1] * 3, [95, 85, 130], key_dim=dim, shared=10, dtype=HALF, device=triton_device)
    case.batch.shared_members = torch.tensor([2, 0, -1], dtype=torch.int32, device=triton_device)
    case.batch.shared_tokens = torch.tensor([80, 0, 80], dtype=torch.int32, device=triton_device)
    check(case, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dim", [16, 64, 96])
def test_gathered_chunks_equal_reference(dim, form, triton_device, monkeypatch):
    from tokenmill.ops.triton.attention import fresh as attention_fresh
    from tokenmill.ops.triton.config import Tile

    monkeypatch.setattr(attention_fresh, "LEAST_PAIRS", 16)
    monkeypatch.setattr(attention_fresh, "_GATHER", 32)
    shape = attention_fresh.Launch(Tile(32, 32, 4, 2))
    monkeypatch.setattr(attention_fresh, "launch_shape", lambda dim, device: shape)
    case = attention_case([1, 20, 17], [9, 45, 17], key_dim=dim, dtype=HALF, device=triton_device)
    check(case, form)
    assert [set(plan.members) for name, plan in case.batch.cache.items() if name.startswith("fresh")] == [{1, 2}]


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_sizes_beyond_float16_do_not_matter(form, triton_device):
    """Products are of float16, but neither large queries nor small values leave its range."""
    from tokenmill.ops.triton.attention.paged import attention

    case = attention_case([1, 3], [70, 40], key_dim=64, dtype=torch.bfloat16, device=triton_device)
    case = replace(case, q=case.q * 2.0**20, v_cache=case.v_cache * 2.0**-20, scale=case.scale * 2.0**-20)
    codes, floats, scales = coded(case, form)
    got = codes.call(lambda *args: attention(*args, scales=scales)).float() * 2.0**20
    expected = floats.call(reference.attention) * 2.0**20
    torch.testing.assert_close(got, expected, **tolerance(torch.bfloat16))


ROPES = [
    {"dim": 128, "heads": 8, "kv_heads": 2},
    {"dim": 64, "rotated": 32},
    {"dim": 96, "heads": 3, "kv_heads": 3},
    {"dim": 16, "rotated": 0},
    {"dim": 64, "v_dim": 32},
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", ROPES, ids=str)
def test_codes_are_written_as_the_reference_writes_them(shape, normed, form, triton_device):
    from tokenmill.ops.triton.rope import rope_kv_write

    case = rope_case(5, skipped=1, dtype=HALF, device=triton_device, **shape)
    case.fused[1:3, -case.v_dim :] = 0.0  # heads of nothing
    gain = torch.rand(2, case.dim, generator=torch.Generator().manual_seed(7)).to(triton_device) + 0.5
    norms = {"q_norm": gain[0], "k_norm": gain[1], "eps": 1e-5} if normed else {}
    found = []
    for fn in (rope_kv_write, reference.rope_kv_write):
        caches, scales = blank(case, form)
        mine = replace(case.copy(), k_cache=caches[0], v_cache=caches[1])
        q, *_ = mine.call(lambda *args, fn=fn, scales=scales: fn(*args, **norms, scales=scales))
        found.append((q, *caches, scales.k, scales.v))
    torch.testing.assert_close(found[0][0], found[1][0], **tolerance(HALF))
    for got, expected in zip(found[0][1:], found[1][1:]):
        differ = float((got.float() != expected.float()).float().mean())
        # A norm that is rounded differently may move a code, and the interpreter's cast to float8 carries nothing into
        # the exponent.
        carries = got.dtype == torch.float8_e4m3fn and triton_device == "cpu"
        assert differ <= (0.05 if carries else 0.002 if normed else 0.0)


def blank(case: RopeCase, form: str) -> tuple[list[torch.Tensor], KVScales]:
    codes, scales = [], []
    for dim in (case.dim, case.v_dim):
        shape, kind = case.k_cache.shape[:3], KV_FORMS[form]
        codes.append(torch.zeros(*shape, kind.width(dim), dtype=torch.uint8, device=case.fused.device).view(kind.dtype))
        scales.append(torch.full((*shape, kind.scales(dim)), 3.0, dtype=torch.bfloat16, device=case.fused.device))
    return codes, KVScales(*scales)
