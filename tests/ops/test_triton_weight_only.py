"""Products with small codes: our kernels compute what the widened weight gives, alike in every run."""

import itertools
import json
import operator
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from tokenmill.quant.forms import Form
from tokenmill.quant.groups import Groups
from tokenmill.quant.weight_only import WeightOnly

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_device", "poisoned_memory")
# The interpreter's dot takes bfloat16 for integers.
DTYPES = [torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
FLOAT8 = torch.float8_e4m3fn
FORMS = [
    *(Form("int4", group, zeros) for group, zeros in itertools.product((32, 64, 128), (False, True))),
    Form("int8"),
    Form("int8", 64),
    Form("fp8", 128),
]
ROWS = [1, 2, 7, 16, 33, 64, 200]


def randn(*shape: int, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def random_groups(columns: int, inner: int, form: Form) -> Groups:
    generator = torch.Generator().manual_seed(columns + inner)
    count = inner // (form.group or inner)
    scale = torch.rand(columns, count, generator=generator) + 0.1
    if form.kind == "fp8":
        codes = (torch.randn(columns, inner, generator=generator) * 100).to(FLOAT8)
        return Groups(codes, scale, 8)
    low, high = (-8, 8) if form.kind == "int4" else (-128, 128)
    codes = torch.randint(low, high, (columns, inner), generator=generator, dtype=torch.int8)
    zeros = torch.randint(-8, 8, (columns, count), generator=generator, dtype=torch.int8) if form.zeros else None
    return Groups(codes, scale, 4 if form.kind == "int4" else 8, zeros)


def stored(groups: Groups, form: Form, device: str):
    """The codes as the kernels read them, and what is beside them."""
    from tokenmill.ops.triton.gemm_small import counters_for

    scheme = WeightOnly(form)
    columns = groups.codes.shape[0]
    storage = scheme.allocate(*groups.codes.shape, torch.float16, torch.device(device))
    scheme.write_groups(storage, 0, groups)
    return scheme._codes(storage), torch.zeros(counters_for(columns), dtype=torch.int32, device=device)


def check(got: torch.Tensor, x: torch.Tensor, groups: Groups, bias: torch.Tensor | None = None) -> None:
    weight = groups.widen(torch.float64).to(x.device)
    expected = F.linear(x.double(), weight, None if bias is None else bias.double())
    error = (got.double() - expected).abs().max() / expected.abs().max()
    assert error < torch.finfo(got.dtype).eps, f"{error} is more than the rounding of the result"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("rows", ROWS)
def test_products_equal_those_of_the_widened_weight(rows, form, dtype, triton_device):
    from tokenmill.ops.triton.gemm_weight_only import takes, weight_only_gemm

    inner = 384 if rows % 2 else 640  # runs of 32 and 16 columns, or of 128
    groups = random_groups(70, inner, form)
    codes, arrivals = stored(groups, form, triton_device)
    x = (randn(rows, inner, device=triton_device) / 16).to(dtype)
    bias = randn(70, device=triton_device, seed=2).to(dtype) if rows != 7 else None
    assert takes(x, codes)
    check(weight_only_gemm(x, codes, bias, arrivals=arrivals), x, groups, bias)
    assert not arrivals.any()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("inner", [128, 384, 1024])
def test_a_widened_weight_has_the_stored_values(inner, form, triton_device):
    from tokenmill.ops.triton.gemm_weight_only import widened

    groups = random_groups(37, inner, form)
    codes, _ = stored(groups, form, triton_device)
    assert torch.equal(widened(codes, torch.float32).cpu(), groups.widen(torch.float32))


def test_shortest_runs_are_left_to_the_widened_weight(triton_device):
    from tokenmill.ops.triton.gemm_weight_only import takes, widened

    form = Form("int4", 32)
    groups = random_groups(20, 96, form)
    codes, _ = stored(groups, form, triton_device)
    assert codes.run == 8 and not takes(randn(2, 96, device=triton_device).half(), codes)
    assert torch.equal(widened(codes, torch.float32).cpu(), groups.widen(torch.float32))


@pytest.mark.parametrize(("kind", "splits"), [("int4", 3), ("int4", 8), ("int8", 2)])
def test_parts_meet_in_every_launch_and_give_the_same_bits(kind, splits, triton_device):
    """Also where splits do not have the same number of turns: 11 of them for two, three or six programs."""
    from tokenmill.ops.triton.gemm_small import GemmShape
    from tokenmill.ops.triton.gemm_weight_only import weight_only_gemm

    form = Form("int4", 64) if kind == "int4" else Form("int8")
    inner = 11 * 16 * (4 if kind == "int4" else 2)
    groups = random_groups(130, inner, form)
    codes, arrivals = stored(groups, form, triton_device)
    x = (randn(5, inner, device=triton_device) / 16).half()
    shape = GemmShape(block_n=64, block_k=16, splits=splits, num_warps=4, num_stages=2)
    first = weight_only_gemm(x, codes, arrivals=arrivals, shape=shape)
    check(first, x, groups)
    for _ in range(2):
        assert torch.equal(weight_only_gemm(x, codes, arrivals=arrivals, shape=shape), first)
        assert not arrivals.any()


@pytest.mark.parametrize("form", [Form("int4", 128, True), Form("int8")], ids=lambda form: form.name)
def test_one_row_in_several_turns_and_of_any_place(form, triton_device):
    """The last turn is not full; the row may be a slice that does not begin at a whole pair."""
    from tokenmill.ops.triton.gemm_small import GemvShape
    from tokenmill.ops.triton.gemm_weight_only import weight_only_gemm

    groups = random_groups(6, 1536, form)
    codes, _ = stored(groups, form, triton_device)
    wide = (randn(1, 1600, device=triton_device) / 16).half()
    for first in (0, 2, 7):
        x = wide[:, first : first + 1536]
        check(weight_only_gemm(x, codes, shape=GemvShape(4, 128, 4)), x, groups)


def test_one_row_through_the_tensor_cores(triton_device):
    from tokenmill.ops.triton.gemm_small import GemmShape
    from tokenmill.ops.triton.gemm_weight_only import weight_only_gemm

    form = Form("int4", 128)
    groups = random_groups(64, 512, form)
    codes, _ = stored(groups, form, triton_device)
    x = (randn(1, 512, device=triton_device) / 16).half()
    check(weight_only_gemm(x, codes, shape=GemmShape(64, 64, 1, 4, 3)), x, groups)


def test_the_rule_uses_only_shapes_that_can_be_launched():
    from tokenmill.ops.triton.gemm_small import LEAST_TILE, GemmShape
    from tokenmill.ops.triton.gemm_weight_only import choose_shape

    sizes = itertools.product((1, 2, 8, 16, 17, 33, 64, 500), (8, 1000, 28672), (16, 144, 1024, 3584), (16, 64, 128))
    for (rows, columns, width, run), kind in itertools.product(sizes, ("int4", "int8", "fp8")):
        if width % run:
            continue
        shape = choose_shape(rows, columns, width, run, kind, torch.device("cpu"), may_split=True)
        powers = [shape.block_n, shape.block_k]
        if isinstance(shape, GemmShape):
            assert shape.block_n >= LEAST_TILE and 16 <= shape.block_k <= run
            powers.append(shape.splits)
            stage = 2 * shape.block_k * (shape.block_n + (4 if kind == "int4" else 2) * min(64, max(rows, 8)))
            assert stage * shape.num_stages <= 227 << 10, "more shared memory than a multiprocessor has"
        assert all(size & (size - 1) == 0 for size in powers)


# The instructions themselves, which only a GPU runs: played through for every word.

HALVES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}
PLAIN = {"mov": operator.pos, "and": operator.and_, "shr": operator.rshift, "shl": operator.lshift}
TABLES = {"0xEA": lambda a, b, c: (a & b) | c, "0x6A": lambda a, b, c: (a & b) ^ c}


def play(text: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs the few instructions that the texts use, on 32-bit words kept in int64."""
    registers = dict(inputs)

    def value(name: str) -> torch.Tensor | int:
        return int(name, 0) if name[0].isdigit() else registers[name]

    def floats(word: torch.Tensor | int, kind: str) -> torch.Tensor:
        words = torch.as_tensor(word).to(torch.int64)
        both = torch.stack([words & 0xFFFF, words >> 16], -1).to(torch.int32).to(torch.int16)
        return both.view(HALVES[kind])

    for line in text.split("\n"):
        found = re.fullmatch(r"(\w+)\.(\w+) (.*);", line.strip())
        if found is None:
            assert line in "{}" or line.startswith(".reg")
            continue
        name, kind, rest = found.groups()
        target, *names = rest.split(", ")
        if name == "lop3":
            result = TABLES[names.pop()](*map(value, names))
        elif name in ("sub", "mul"):
            a, b = (floats(value(name), kind) for name in names)
            both = ((a - b) if name == "sub" else (a * b)).view(torch.int16).to(torch.int64) & 0xFFFF
            result = both[..., 0] | both[..., 1] << 16
        else:
            result = PLAIN[name](*map(value, names))
        registers[target] = result & 0xFFFFFFFF
    return registers


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_instructions_turn_every_word_into_its_codes(dtype, kind):
    from tokenmill.ops.triton import weight_codes

    bf16 = dtype == torch.bfloat16
    text = getattr(weight_codes, f"{kind.upper()}_{'BF16' if bf16 else 'FP16'}").value
    parts = 4 if kind == "int4" else 2
    low = torch.arange(1 << 16)
    high = low.flip(0)  # the other half of a register must not matter
    inputs = {f"${parts}": low | high << 16}
    results = play(text, inputs)
    for j in range(parts):
        for words, shift in ((low, 0), (high, 16)):
            got = (results[f"${j}"] >> shift & 0xFFFF).to(torch.int32).to(torch.int16).view(dtype).float()
            if kind == "int4":
                expected = (words >> 4 * j & 15).float() - 8
            else:
                byte = (words >> 8 * j & 255).to(torch.uint8)
                expected = byte.view(torch.int8 if kind == "int8" else FLOAT8).float()
            known = ~expected.isnan()  # float8's NaN is no weight
            assert torch.equal(got[known], expected[known])


# What only the compiler can say.

KINDS = [("int4", 128, False), ("int4", 32, True), ("int8", 0, False), ("fp8", 128, False)]  # group, zeros


def test_kernels_compile_wait_once_and_keep_codes_in_registers():
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == len(KINDS) + 3
    for name, what in found.items():
        assert what["waits"] == 1, name
        if name.startswith("_gemm"):
            assert what["operand"], f"the words of {name} do not go straight to where the tensor cores take them"


def compile_all() -> dict[str, dict[str, object]]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tokenmill.ops.triton import gemm_weight_only, gemv_weight_only

    found = {}
    for at, (kind, group, zeros) in enumerate(KINDS):
        half = "*bf16" if at != 2 else "*fp16"
        pointers = {"x": half, "words": "*i16", "scale": "*fp32", "bias": half, "out": half, "partial": "*fp32"}
        pointers |= {"arrivals": "*i32", "zeros": "*i8" if zeros else None}
        constants = {"KIND": kind, "PARTS": 4 if kind == "int4" else 2, "RUN": 32, "GROUP": group, "PDL": True}
        tile = {"BLOCK_N": 64, "BLOCK_M": 16, "BLOCK_K": 32, "SPLITS": 2, "CHUNKS": 32, "EVEN_N": False}
        vector, widen = gemv_weight_only._gemv_kernel, gemm_weight_only._widen_kernel
        for kernel in [gemm_weight_only._gemm_kernel, *([], [vector], [vector], [widen])[at]]:
            parameters = kernel.kernel.params
            known = constants | tile | ({"BLOCK_N": 4} if kernel is vector else {})
            signature, fixed, attributes = {}, {}, {}
            for i, parameter in enumerate(parameters):
                name = parameter.name
                kind_of = pointers.get(name, "i32")
                if name in known or kind_of is None:
                    signature[name], fixed[(i,)] = "constexpr", known.get(name)
                    continue
                signature[name] = kind_of
                if not parameter.do_not_specialize:
                    attributes[(i,)] = [["tt.divisibility", 16]]
            source = ASTSource(kernel.kernel, signature, fixed, attributes)
            made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
            found[f"{kernel.kernel.fn.__name__} {at}"] = {
                "waits": made.asm["ptx"].count("griddepcontrol.wait"),
                "operand": bool(re.search(r"local_load .*xi16, #ttg.dot_op", made.asm["ttgir"])),
            }
    return found


if __name__ == "__main__":
    print(json.dumps(compile_all()))
