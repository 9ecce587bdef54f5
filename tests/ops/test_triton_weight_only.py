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

from tokenmill.quant.forms import WeightForm
from tokenmill.quant.groups import Groups
from tokenmill.quant.schemes.weight_only import WeightOnly

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_device", "poisoned_memory")
# The interpreter's dot takes bfloat16 for integers.
DTYPES = [torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
FLOAT8 = torch.float8_e4m3fn
FORMS = [
    *(WeightForm("int4", group, zeros) for group, zeros in itertools.product((32, 64, 128), (False, True))),
    WeightForm("int8"),
    WeightForm("int8", 64),
    WeightForm("fp8", 128),
]
ROWS = [1, 7, 16, 64, 200]


def randn(*shape: int, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def random_groups(columns: int, inner: int, form: WeightForm) -> Groups:
    generator = torch.Generator().manual_seed(columns + inner)
    count = inner // (form.group or inner)
    scale = torch.rand(columns, count, generator=generator) + 0.1
    if form.kind == "fp8":
        codes = torch.randn(columns, inner, generator=generator) * 100
        codes = codes.clamp(-448, 448).to(FLOAT8)  # beyond lies NaN
        return Groups(codes, scale, 8)
    low, high = (-8, 8) if form.kind == "int4" else (-128, 128)
    codes = torch.randint(low, high, (columns, inner), generator=generator, dtype=torch.int8)
    zeros = torch.randint(-8, 8, (columns, count), generator=generator, dtype=torch.int8) if form.zeros else None
    return Groups(codes, scale, 4 if form.kind == "int4" else 8, zeros)


def stored(groups: Groups, form: WeightForm, device: str):
    """The codes as the kernels read them, and what is beside them."""
    from tokenmill.ops.triton.gemm.small import counters_for
    from tokenmill.ops.triton.gemm.weight_codes import Codes

    scheme = WeightOnly(form)
    columns = groups.codes.shape[0]
    storage = scheme.allocate(*groups.codes.shape, torch.float16, torch.device(device))
    scheme.write_groups(storage, 0, groups)
    codes = Codes(storage["weight"], storage["scale"], storage.get("zeros"), form.kind)
    return codes, torch.zeros(counters_for(columns), dtype=torch.int32, device=device)


def check(got: torch.Tensor, x: torch.Tensor, groups: Groups, bias: torch.Tensor | None = None) -> None:
    weight = groups.widen(torch.float64).to(x.device)
    expected = F.linear(x.double(), weight, None if bias is None else bias.double())
    error = (got.double() - expected).abs().max() / expected.abs().max()
    assert error < torch.finfo(got.dtype).eps, f"{error} is more than the rounding of the result"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("rows", ROWS)
def test_products_equal_those_of_the_widened_weight(rows, form, dtype, triton_device):
    from tokenmill.ops.triton.gemm.weight_only import weight_only_gemm

    inner = 384 if rows % 2 else 640
    groups = random_groups(80, inner, form)
    codes, counters = stored(groups, form, triton_device)
    x = (randn(rows, inner, device=triton_device) / 16).to(dtype)
    bias = randn(80, device=triton_device, seed=2).to(dtype) if rows != 7 else None
    check(weight_only_gemm(x, codes, bias, counters=counters), x, groups, bias)
    assert not counters.any()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("inner", [128, 384, 1024])
def test_a_widened_weight_has_the_stored_values(inner, form, triton_device):
    from tokenmill.ops.triton.gemm.weight_only import widened

    groups = random_groups(48, inner, form)
    codes, _ = stored(groups, form, triton_device)
    assert torch.equal(widened(codes, torch.float32).cpu(), groups.widen(torch.float32))


@pytest.mark.parametrize(("kind", "splits", "rows"), [("int4", 3, 5), ("int4", 8, 70), ("int8", 2, 5)])
def test_parts_meet_in_every_launch_and_give_the_same_bits(kind, splits, rows, triton_device):
    """Also where splits do not have the same number of turns, 11 of them for two, three or six programs, and where
    rows are more than a tile has.
    """
    from tokenmill.ops.triton.gemm.small import GemmShape
    from tokenmill.ops.triton.gemm.weight_only import weight_only_gemm

    form = WeightForm("int4", 64) if kind == "int4" else WeightForm("int8")
    inner = 11 * 16 * (4 if kind == "int4" else 2)
    groups = random_groups(144, inner, form)
    codes, counters = stored(groups, form, triton_device)
    x = (randn(rows, inner, device=triton_device) / 16).half()
    shape = GemmShape(block_n=64, block_k=1, splits=splits, num_warps=4, num_stages=2)
    first = weight_only_gemm(x, codes, counters=counters, shape=shape)
    check(first, x, groups)
    for _ in range(2):
        assert torch.equal(weight_only_gemm(x, codes, counters=counters, shape=shape), first)
        assert not counters.any()


@pytest.mark.parametrize(
    "form", [WeightForm("int4", 128, True), WeightForm("int4", 32), WeightForm("int8")], ids=lambda form: form.name
)
@pytest.mark.parametrize("shape", [(1, 2, 1), (2, 4, 2), (4, 1, 8)], ids=str)
def test_few_rows_in_several_turns_and_of_any_place(shape, form, triton_device):
    """The last turn and the last program are not full; rows may be slices that do not begin at a whole pair."""
    from tokenmill.ops.triton.gemm.weight_only import weight_only_gemm
    from tokenmill.ops.triton.gemm.weight_only_few import FewShape

    groups = random_groups(48, 1152, form)
    codes, _ = stored(groups, form, triton_device)
    wide = (randn(11, 1600, device=triton_device) / 16).half()
    for first, rows in ((0, 1), (2, 11), (7, 3)):
        x = wide[:rows, first : first + 1152]
        check(weight_only_gemm(x, codes, shape=FewShape(*shape)), x, groups)


def test_a_single_group_and_a_single_row_in_either_kernel(triton_device):
    from tokenmill.ops.triton.gemm.small import GemmShape
    from tokenmill.ops.triton.gemm.weight_only import weight_only_gemm
    from tokenmill.ops.triton.gemm.weight_only_few import FewShape

    for form, shape in itertools.product(FORMS, (FewShape(1, 1, 1), GemmShape(64, 2, 1, 4, 3))):
        groups = random_groups(64, 128, form)
        codes, _ = stored(groups, form, triton_device)
        x = (randn(1, 128, device=triton_device) / 16).half()
        if isinstance(shape, GemmShape):
            shape = GemmShape(64, codes.step, 1, 4, 3)
        check(weight_only_gemm(x, codes, shape=shape), x, groups)


def test_the_rule_uses_only_shapes_that_can_be_launched():
    from tokenmill.ops.triton.gemm.small import LEAST_TILE, GemmShape
    from tokenmill.ops.triton.gemm.weight_only import choose_shape

    sizes = itertools.product((1, 2, 8, 16, 17, 33, 64, 500), (1, 62, 256, 1792), (9, 64, 224, 448), (1, 2, 4))
    for (rows, bands, tiles, step), kind in itertools.product(sizes, ("int4", "int8", "fp8")):
        if tiles % step:
            continue
        shape = choose_shape(rows, bands, tiles, step, kind, torch.device("cpu"), may_split=True)
        if isinstance(shape, GemmShape):
            assert shape.block_n >= LEAST_TILE and tiles % shape.block_k == 0 and shape.block_k % step == 0
            powers = [shape.block_n, shape.splits]
            stage = 32 * shape.block_k * (shape.block_n + (4 if kind == "int4" else 2) * min(64, max(rows, 16)))
            assert stage * shape.num_stages <= 227 << 10, "more shared memory than a multiprocessor has"
        else:
            powers = [shape.bands, shape.num_warps, shape.depth]
            assert shape.num_warps <= 16
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
        found = re.fullmatch(r"(\w+)\.(?:rn\.)?(\w+) (.*);", line.strip())
        if found is None:
            assert line in "{}" or line.startswith(".reg")
            continue
        name, kind, rest = found.groups()
        if rest.startswith("{"):  # taken apart
            both = registers[rest.removeprefix("{$0, $1}, ")]
            registers |= {"$0": both & 0xFFFF, "$1": both >> 16}
            continue
        target, *names = rest.split(", ")
        if name == "lop3":
            result = TABLES[names.pop()](*map(value, names))
        elif name in ("sub", "mul"):
            a, b = (floats(value(name), kind) for name in names)
            both = ((a - b) if name == "sub" else (a * b)).view(torch.int16).to(torch.int64) & 0xFFFF
            result = both[..., 0] | both[..., 1] << 16
        elif name == "fma":
            a, b, c = (floats(value(name), kind).float() for name in names)
            both = (a * b + c).to(HALVES[kind]).view(torch.int16).to(torch.int64) & 0xFFFF
            result = both[..., 0] | both[..., 1] << 16
        else:
            result = PLAIN[name](*map(value, names))
        registers[target] = result & 0xFFFFFFFF
    return registers


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("older", [False, True], ids=["hopper", "before hopper"])
def test_the_instructions_turn_every_word_into_its_codes(older, dtype, kind):
    from tokenmill.ops.triton.gemm.weight_codes import instructions
    from tokenmill.ops.triton.instructions import before_hopper

    low = torch.arange(1 << 16)
    high = low.flip(0)  # the other half of a register must not matter
    for j in range(4 if kind == "int4" else 2):
        text = instructions(kind, dtype == torch.bfloat16, j)
        if older:
            text = before_hopper(text)
            assert "sub.bf16x2" not in text and "mul.bf16x2" not in text
        results = play(text, {"$2": low | high << 16})
        for words, name in ((low, "$0"), (high, "$1")):
            got = results[name].to(torch.int32).to(torch.int16).view(dtype).float()
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
    assert len(found) == 2 * len(KINDS) + 1
    for name, what in found.items():
        assert what["waits"] == 1, name
        if not name.startswith("_widen"):
            assert what["vectors"], f"the words of {name} are not loaded 16 bytes at once"
            assert not what["moved"], f"{name} moves {what['moved']} between threads"


def compile_all() -> dict[str, dict[str, object]]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tokenmill.ops.triton.gemm import weight_only, weight_only_few

    found = {}
    for at, (kind, group, zeros) in enumerate(KINDS):
        half = "*bf16" if at != 2 else "*fp16"
        pointers = {"x": half, "words": "*i16", "scale": "*fp32", "bias": half, "out": half, "partial": "*fp32"}
        pointers |= {"counters": "*i32", "zeros": "*i8" if zeros else None}
        parts = 4 if kind == "int4" else 2
        step = max(1, (group or 128) // (16 * parts))
        known = {"KIND": kind, "PARTS": parts, "GROUP": group, "STEP": step, "TILES": 80, "PDL": True, "BANDS": 4}
        known |= {"STEPS": 2, "SPLITS": 2, "BLOCK_M": 16, "WARPS": 4, "DEPTH": 2, "EIGHTS": 1, "BLOCK": 16}
        few, several, widen = (
            weight_only_few._few_kernel, weight_only._gemm_kernel, weight_only._widen_kernel
        )  # fmt: skip
        for kernel in [few, several, *([] if at else [widen])]:
            signature, fixed, attributes = {}, {}, {}
            for i, parameter in enumerate(kernel.kernel.params):
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
            text = made.asm["ptx"]
            found[f"{kernel.kernel.fn.__name__} {at}"] = {
                "waits": text.count("griddepcontrol.wait"),
                "vectors": bool(re.search(r"ld\.global\.v4\.b32|cp\.async\.cg\.shared\.global .*, 0x10", text)),
                "moved": moved_between_threads(text, kernel is few),
            }
    return found


def moved_between_threads(text: str, few: bool) -> list[str]:
    """Instructions that take words, inputs or scales elsewhere before the last product, for few rows also copies."""
    lines = text.splitlines()
    products = [i for i, line in enumerate(lines) if re.search(r"mma.*sync\.aligned\.m", line)]
    before = lines[: products[-1]] if products else []
    return [line for line in before if re.search(r"st\.shared|stmatrix|ldmatrix|shfl" + r"|cp\.async" * few, line)]


if __name__ == "__main__":
    print(json.dumps(compile_all()))
