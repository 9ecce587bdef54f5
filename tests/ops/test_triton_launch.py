"""Cheap launches never reuse a kernel that was compiled for something else; kernels wait before they read or write.

Run as a program, this file compiles the kernels for Hopper and prints what they touch before they wait: that needs
Triton without its interpreter, so the test starts a process of its own.
"""

import json
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

CONSTANTS = {"weight", "bias", "scale", "q_norm", "k_norm", "words", "zeros"}


def _example_kernel(x, y, size, count, eps, BLOCK: "tl.constexpr", PDL: "tl.constexpr" = False):  # noqa: F821
    """Never compiled: only its signature is looked at."""


class FakeMade:
    """What Triton returns from a launch: it notes how it is launched again."""

    function = 7
    packed_metadata = (4, 1, 0)

    def __init__(self, log):
        self._log = log

    def run(self, *args):
        self._log.append(args)


class FakeKernel:
    """A jitted kernel whose ordinary launches are only noted."""

    def __init__(self, fn, **options):
        from triton.runtime.jit import JITFunction

        self.jitted = JITFunction(fn, **options)
        self.params = self.jitted.params
        self.ordinary = []
        self.quick = []

    def __getitem__(self, grid):
        def launch(*args, **meta):
            self.ordinary.append((grid, args, meta))
            return FakeMade(self.quick)

        return launch


@pytest.fixture
def fake_device(monkeypatch):
    """A device of which nothing is real; its index and whether kernels may overlap there can be set."""
    from tokenmill.ops.triton import launch

    device = SimpleNamespace(index=0, overlaps=False, backend="cuda")
    active = SimpleNamespace(
        get_current_device=lambda: device.index,
        get_current_stream=lambda index: 1000 + index,
        get_current_target=lambda: SimpleNamespace(backend=device.backend),
    )
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "pdl_supported", lambda index: device.overlaps)
    return device


def quick(kernel):
    from tokenmill.ops.triton.launch import QuickKernel

    return QuickKernel(kernel)


def tensors():
    base = torch.zeros(64, dtype=torch.bfloat16)
    return base, torch.zeros(64)


def test_second_launch_goes_straight_to_the_compiled_kernel(fake_device):
    kernel = FakeKernel(_example_kernel)
    launcher = quick(kernel)
    x, y = tensors()
    for size in (32, 64):
        launcher[(3, 2)](x, y, size, 5, 0.5, BLOCK=64, num_warps=4)
    assert len(kernel.ordinary) == 1
    # The grid, the stream, the function, its metadata, no hooks; then pointers, numbers and constexprs in order.
    assert kernel.quick == [
        (3, 2, 1, 1000, 7, (4, 1, 0), None, None, None, x.data_ptr(), y.data_ptr(), 64, 5, 0.5, 64, False)
    ]


def test_what_triton_would_compile_anew_is_not_reused(fake_device):
    kernel = FakeKernel(_example_kernel)
    launcher = quick(kernel)
    x, y = tensors()
    plain = {"args": (x, y, 32, 5, 0.5), "meta": {"BLOCK": 64, "num_warps": 4}}
    others = [
        {"args": (x[1:], y, 32, 5, 0.5)},  # not aligned to 16 bytes
        {"args": (x.to(torch.float16), y, 32, 5, 0.5)},
        {"args": (x, None, 32, 5, 0.5)},
        {"args": (x, y, 33, 5, 0.5)},  # not a multiple of 16
        {"args": (x, y, 1, 5, 0.5)},
        {"args": (x, y, 1 << 31, 5, 0.5)},  # takes 64 bits
        {"args": (x, y, True, 5, 0.5)},
        {"args": (x, y, 32, 16, 0.5)},
        {"args": (x, y, 32, 1, 0.5)},
        {"args": (x, y, 32, 5, 2)},
        {"meta": {"BLOCK": 128, "num_warps": 4}},
        {"meta": {"BLOCK": 64, "num_warps": 8}},
        {"meta": {"BLOCK": 64, "num_stages": 4}},
        {"meta": {"BLOCK": 4, "num_warps": 64}},
    ]
    for other in [plain, *others]:
        launcher[(1,)](*other.get("args", plain["args"]), **other.get("meta", plain["meta"]))
    assert len(kernel.ordinary) == 1 + len(others) and not kernel.quick
    for device in (1, 0):
        fake_device.index = device
        launcher[(1,)](*plain["args"], **plain["meta"])
    assert len(kernel.ordinary) == 2 + len(others) and len(kernel.quick) == 1  # new on the other device only


def test_numbers_that_are_not_specialized_do_not_leave_the_quick_way(fake_device):
    kernel = FakeKernel(_example_kernel, do_not_specialize=["size"], do_not_specialize_on_alignment=["x", "count"])
    launcher = quick(kernel)
    x, y = tensors()
    for at, size, count in ((0, 32, 5), (1, 1, 7), (2, 33, 16), (0, 0, 3)):
        launcher[(1,)](x[at:], y, size, count, 0.5, BLOCK=64)
    assert len(kernel.ordinary) == 1
    launcher[(1,)](x, y, 1 << 40, 5, 0.5, BLOCK=64)  # but a wider number is another kernel
    launcher[(1,)](x, y, 32, 1, 0.5, BLOCK=64)  # and alignment says nothing of a one
    assert len(kernel.ordinary) == 3


@pytest.mark.parametrize("overlaps", [False, True])
def test_kernels_take_part_in_overlap_where_the_device_can(overlaps, fake_device):
    kernel = FakeKernel(_example_kernel)
    launcher = quick(kernel)
    fake_device.overlaps = overlaps
    for _ in range(2):
        launcher[(1,)](*tensors(), 32, 5, 0.5, BLOCK=64)
    expected = {"BLOCK": 64, "PDL": True, "launch_pdl": True} if overlaps else {"BLOCK": 64}
    assert kernel.ordinary[0][2] == expected
    assert kernel.quick[0][-1] is overlaps


@pytest.mark.parametrize("reason", ["argument by name", "unknown type", "unknown release", "other backend"])
def test_calls_that_are_not_understood_go_through_triton_every_time(reason, fake_device, monkeypatch):
    kernel = FakeKernel(_example_kernel)
    launcher = quick(kernel)
    x, y = tensors()
    args, meta = [x, y, 32, 5, 0.5], {"BLOCK": 64}
    if reason == "argument by name":
        args, meta = args[:-1], {"eps": 0.5, "BLOCK": 64}
    elif reason == "unknown type":
        args[2] = torch.iinfo(torch.int32)
    elif reason == "unknown release":
        monkeypatch.setattr(triton, "__version__", "9.0.0")
    else:
        fake_device.backend = "hip"
    for _ in range(3):
        launcher[(1,)](*args, **meta)
    assert [(got[1], got[2]) for got in kernel.ordinary] == [(tuple(args), meta)] * 3
    assert not kernel.quick


EDGES = [0, 1, 2, 15, 16, 17, -1, -16, -17, (1 << 31) - 16, (1 << 31) - 1, 1 << 31, -(1 << 31), -(1 << 31) - 1]
NUMBERS = st.one_of(st.sampled_from([*EDGES, 1 << 63, (1 << 63) - 1]), st.integers(-(1 << 63), (1 << 64) - 1))
STORAGE = torch.zeros(256, dtype=torch.uint8)
TENSORS = st.builds(
    lambda dtype, at: STORAGE[at * dtype.itemsize :][: 16 * dtype.itemsize].view(dtype),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.float8_e4m3fn]),
    st.integers(0, 9),
)
ARGUMENTS = st.one_of(TENSORS, NUMBERS, st.booleans(), st.none(), st.floats())


@settings(max_examples=300, deadline=None)
@given(st.tuples(*[ARGUMENTS] * 5), st.tuples(*[ARGUMENTS] * 5), st.integers(0, 5))
@example((1, None, 5, 5, 0.5), (16, None, 5, 5, 0.5), 0)
@example((1, None, 5, 5, 0.5), (5, None, 5, 5, 0.5), 0)
@example((0, None, 1, 5, 0.5), (0, None, 16, 5, 0.5), 2)
def test_equal_keys_mean_equal_specializations(first, second, same):
    """Against Triton's own function; `same` arguments are shared, so that equal keys do occur."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    from tokenmill.ops.triton.launch import describe_function

    kernel = FakeKernel(_example_kernel, do_not_specialize=["count"], do_not_specialize_on_alignment=["y", "size"])
    parameters = kernel.params[:5]
    second = (*first[:same], *second[same:])

    def specialization(args):
        flags = [(not p.do_not_specialize, not p.do_not_specialize_on_alignment) for p in parameters]
        return [native_specialize_impl(CUDABackend, a, False, *f) for a, f in zip(args, flags)]

    def key(args):
        kinds = tuple(map(type, args))
        return kinds, describe_function(kinds, parameters)(*args)[0]

    if key(first) == key(second):
        assert specialization(first) == specialization(second)


def test_a_quick_launch_costs_a_few_microseconds(fake_device):
    """With a kernel that does nothing; the bound is generous, since machines differ."""
    kernel = FakeKernel(_example_kernel)
    launcher = quick(kernel)
    x, y = tensors()
    best = float("inf")
    for _ in range(50):
        start = time.perf_counter()
        for _ in range(20):
            launcher[(3, 2)](x, y, 32, 5, 0.5, BLOCK=64, num_warps=4)
        best = min(best, (time.perf_counter() - start) / 20)
    assert len(kernel.ordinary) == 1
    assert best < 20e-6, f"{best * 1e6:.1f} us per launch"


def test_kernels_wait_before_they_touch_what_others_do():
    """The compiler's first form of each kernel: above the wait there are only loads of constants."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    touched = json.loads(done.stdout)
    assert len(touched) >= 11
    for name, (waits, early) in touched.items():
        assert waits == 1, f"{name} waits {waits} times"
        assert set(early) <= CONSTANTS, f"{name} touches {early} before it waits"
    assert {"weight"} <= set(touched["_gemv_kernel"][1])  # that is where the time is


def compile_all() -> dict[str, tuple[int, list[str]]]:
    """How often each kernel waits on its way, and which arguments it reads or writes above that."""
    from tokenmill.ops.triton import activation, norm, rope
    from tokenmill.ops.triton.gemm import quantize, small, weight_only, weight_only_few
    from tokenmill.ops.triton.sample import filtered, logprobs, mask, sampler, shape

    half, wide, word, byte = "*bf16", "*fp32", "*i64", "*fp8e4nv"
    rows = {"x": half, "values": byte, "scale": wide}
    rope_pointers = dict.fromkeys(
        ("q", "k", "v", "k_cache", "v_cache", "k_scales", "v_scales", "q_norm", "k_norm"), half
    )
    vectors = {"temperature": wide, "top_k": word, "top_p": wide, "min_p": wide, "seed": word, "position": word}
    cut = {"GROUP": 32, "CHUNK": 4096, "CHUNKS": 4, "SPANS": 2}
    small_cut = {"GROUP": 32, "CHUNK": 4096, "CHUNKS": 4}
    measured = {"logits": half, "tokens": word, "widths": "*i32", "space": wide}
    shaped = dict.fromkeys(("logits", "repetition", "presence", "frequency"), wide)
    shaped |= dict.fromkeys(("counters", "tokens", "prompt_len", "stops_from"), "*i32")
    shaped |= dict.fromkeys(("rows", "positions", "edits_at"), word)
    codes = {"x": half, "words": "*i16", "scale": wide, "zeros": "*i8", "bias": half, "out": half}
    int4 = {"KIND": "int4", "PARTS": 4, "GROUP": 128, "STEP": 2, "BANDS": 4}
    cases = [
        (norm._norm_kernel, {"x": half, "weight": half, "out": half}, {"DIM": 128, "BLOCK": 128, "ROWS": 16}),
        (norm._add_norm_kernel, {"x": half, "residual": half, "weight": half}, {"DIM": 1024, "BLOCK": 1024}),
        (activation._act_mul_kernel, {"x": half, "out": half}, {"SILU": True, "BLOCK": 1024}),
        (
            rope._rope_kernel,
            dict(rope_pointers, cos_sin=wide, positions=word, slots=word),
            {
                "HALF": 64,
                "HALF_BLOCK": 64,
                "DIM": 128,
                "TAIL_BLOCK": 1,
                "VALUE_DIM": 128,
                "VALUE_BLOCK": 128,
                "BLOCK_SIZE": 16,
                "HEADS": 16,
            }
            | {"NORM": True, "FORM": 0},
        ),
        (
            small._gemv_kernel,
            {"x": half, "weight": byte, "bias": half, "scale": wide, "x_scale": wide, "out": half},
            {"BLOCK_N": 4, "BLOCK_K": 512, "EVEN_N": False, "EVEN_K": False},
        ),
        (
            small._gemm_kernel,
            {
                "x": half,
                "weight": byte,
                "bias": half,
                "scale": wide,
                "x_scale": None,
                "out": half,
                "partial": wide,
                "counters": "*i32",
            },
            {"SPLITS": 2, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "EVEN_K": True},
        ),
        (weight_only_few._few_kernel, codes, {**int4, "TILES": 8, "WARPS": 2, "DEPTH": 1, "EIGHTS": 1}),
        (
            weight_only._gemm_kernel,
            {**codes, "partial": wide, "counters": "*i32"},
            {**int4, "STEPS": 1, "SPLITS": 2, "BLOCK_M": 16},
        ),
        (weight_only._widen_kernel, codes, {**int4, "BLOCK": 16}),
        (sampler._best_kernel, dict(vectors, logits=half, space=wide), {"ALL_GREEDY": False, "BLOCK": 4096}),
        (sampler._join_kernel, {"space": wide, "out": word}, {"CHUNKS": 64}),
        (filtered._survey_kernel, dict(vectors, logits=half, space=wide), cut),
        (
            filtered._round_kernel,
            dict(vectors, logits=half, space=wide),
            {**cut, "SPAN": 2, "TURN": 1, "TILE": 64},
        ),
        (
            filtered._decide_kernel,
            dict(vectors, logits=half, space=wide, out=word),
            {**cut, "ROUNDS": 2, "TILE": 64},
        ),
        (logprobs._survey_kernel, measured, small_cut),
        (logprobs._join_kernel, dict(measured, out="*i32"), {**small_cut, "TILE": 64}),
        (mask._allow_only_kernel, {"logits": wide, "masks": "*i32", "rows": word}, {"BLOCK": 4096}),
        (shape._shape_kernel, shaped, {"BLOCK": 1024}),
        (quantize._quantize_kernel, dict(rows, fixed=wide), {"BLOCK": 1024, "EVEN": True}),
        (quantize._add_norm_kernel, dict(rows, residual=half, weight=half, fixed=None), {"DIM": 1024, "BLOCK": 1024}),
        (quantize._act_mul_kernel, dict(rows, fixed=wide), {"SILU": True, "BLOCK": 1024}),
    ]
    found = {}
    for kernel, pointers, constants in cases:
        name = kernel.kernel.fn.__name__
        name = name if name not in found else f"{kernel.kernel.fn.__module__}.{name}"
        found[name] = before_the_wait(first_form(kernel.kernel, pointers, dict(constants, PDL=True)))
    return found


def first_form(kernel, pointers: dict[str, str | None], constants: dict[str, object]) -> str:
    """The text of the kernel as the compiler first sees it, for Hopper."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, fixed = {}, {}
    for i, parameter in enumerate(kernel.params):
        kind = pointers.get(parameter.name, "fp32" if parameter.name == "eps" else "i32")
        if parameter.name in constants or kind is None:
            signature[parameter.name], fixed[(i,)] = "constexpr", constants.get(parameter.name)
        else:
            signature[parameter.name] = kind
    made = triton.compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32))
    return made.asm["ttir"]


def before_the_wait(text: str) -> tuple[int, list[str]]:
    lines = text.splitlines()
    # Locations at the ends of lines tell names, but operands are written first.
    waits = [i for i, line in enumerate(lines) if "griddepcontrol.wait" in line]
    above = lines[: waits[0]] if waits else lines
    made_of: dict[str, list[str]] = {}
    touched: set[str] = set()
    for line in above:
        body = re.sub(r"loc\(.*\)", "", line)
        names = re.findall(r"%[A-Za-z_0-9]+", body)
        if " = " in body and names:
            made_of[names[0]] = names[1:]
        if "tt.load" in body:
            touched.add(argument(names[1], made_of))
        elif re.search(r"tt\.(store|atomic|return)|cf\.|scf\.", body):  # nothing is written, and nobody leaves
            touched.add(body.strip())
    return len(waits), sorted(touched)


def argument(name: str, made_of: dict[str, list[str]]) -> str:
    """What a pointer begins with: the first operand of each step that made it."""
    while made_of.get(name):
        name = made_of[name][0]
    return name.lstrip("%")


if __name__ == "__main__":
    print(json.dumps(compile_all()))
