"""Products of one row with int4 codes: the kernel compiles as intended, and on a GPU computes what the weight gives.

Run as a program, this file compiles the kernel for Hopper and prints what came out: that needs no GPU, but not the
interpreter either, which the other tests of this process use. Nor does the interpreter know Gluon.
"""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from tokenmill.ops.types import Unnormed
from tokenmill.quant.forms import Form
from tokenmill.quant.groups import Groups
from tokenmill.quant.weight_only import WeightOnly

pytest.importorskip("triton")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
# tiles of a band, tiles of a warp in a stage, stages, normed, activation
COMPILED = [(64, 8, 3, True, "silu"), (224, 8, 3, False, ""), (48, 4, 6, True, "gelu_tanh"), (64, 8, 4, False, "")]


def test_the_kernel_compiles_waits_once_and_spills_nothing():
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == len(COMPILED)
    for what in found:
        assert what["waits"] == 1
        assert what["sent_before"] > 0, "no words are on their way before the wait"
        assert what["narrow"] == 0, "words are copied in smaller pieces than 16 bytes"
        assert what["spilled"] == 0
        assert what["shared"] <= 100 << 10, "three programs do not fit, nor one on a smaller GPU"


@pytest.mark.parametrize(
    ("bands", "tiles"), [(384, 64), (256, 64), (1792, 64), (256, 224), (8016, 64), (192, 48), (512, 448), (128, 32)]
)
def test_as_many_programs_fit_as_are_wanted(monkeypatch, bands, tiles):
    from tokenmill.ops.triton import gemm_one_row as kernels

    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 132)
    shape = kernels.choose_one_shape.__wrapped__(bands, tiles, torch.device("cuda", 0))
    assert tiles % (shape.num_warps * shape.tiles) == 0 and shape.stages >= 2
    shared = shape.stages * shape.num_warps * shape.tiles * kernels.TILE_BYTES + 4 * kernels.power_of_two(tiles * 32)
    registers = 144 * 32 * shape.num_warps if shape.tiles == 8 else 0  # what the compiler takes
    fit = min(kernels.SHARED_BYTES // shared, (1 << 16) // registers if registers else 99)
    assert fit == shape.programs or (shape.stages == 2 and fit < shape.programs)


def compile_all() -> list[dict[str, int]]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from tokenmill.ops.triton.gemm_one_row import OneShape, _kernel, _registers

    found = []
    kernel = _kernel.kernel
    for tiles, each, stages, normed, act in COMPILED:
        pointers = {"x": "*bf16", "words": "*i16", "scale": "*fp32", "bias": "*bf16", "out": "*bf16"}
        pointers |= dict.fromkeys(("residual", "gain", "total"), "*bf16" if normed else None)
        known = {"TILES": tiles, "X_WORDS": triton.next_power_of_2(tiles * 32), "GROUPS": each // 2, "EACH": 2}
        known |= {"WARPS": 4, "STAGES": stages, "ACT": act, "PDL": True}
        signature, fixed, attributes = {}, {}, {}
        for i, parameter in enumerate(kernel.params):
            name = parameter.name
            kind = pointers.get(name, "fp32" if name == "eps" else "i32")
            if name in known or kind is None:
                signature[name], fixed[(i,)] = "constexpr", known.get(name)
                continue
            signature[name] = kind
            if name != "eps":
                attributes[(i,)] = [["tt.divisibility", 16]]
        source = GluonASTSource(kernel, signature, fixed, attributes)
        options = {"num_warps": 4, "maxnreg": _registers(OneShape(3, 4, each, stages)), "launch_pdl": True}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        text = made.asm["ptx"]
        copies = re.findall(r"cp\.async\.(cg|ca)\.shared\.global \[[^;]*?, (0x\w+|\d+)", text)
        found.append(
            {
                "waits": text.count("griddepcontrol.wait"),
                "sent_before": text[: text.index("griddepcontrol.wait")].count("cp.async.cg"),
                "narrow": sum(kind == "cg" and int(size, 0) != 16 for kind, size in copies),
                "spilled": len(re.findall(r"\.local\.", text)),
                "shared": made.metadata.shared,
            }
        )
    return found


def random_linear(columns: int, inner: int, group: int, dtype: torch.dtype):
    """A storage of random codes on the GPU, and the weight that they stand for."""
    form = Form("int4", group)
    scheme = WeightOnly(form)
    generator = torch.Generator().manual_seed(columns + inner)
    codes = torch.randint(-8, 8, (columns, inner), generator=generator, dtype=torch.int8)
    scale = (torch.rand(columns, inner // group, generator=generator) + 0.1) / inner**0.5
    storage = scheme.allocate(columns, inner, dtype, torch.device("cuda", 0))
    groups = Groups(codes, scale, 4)
    scheme.write_groups(storage, 0, groups)
    return scheme, storage, groups.widen(torch.float64).cuda()


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("act", ["", "silu", "gelu_tanh"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "inner", "group"), [(4096, 4096, 128), (96, 3072, 64), (1024, 14336, 128)])
def test_a_row_on_the_gpu(columns, inner, group, dtype, normed, act):
    scheme, storage, weight = random_linear(columns, inner, group, dtype)
    assert scheme.fuses(storage, dtype)
    x, bias = torch.randn(1, inner, device="cuda", dtype=dtype), torch.randn(columns, device="cuda", dtype=dtype)
    given, row = x, x
    if normed:
        residual, gain = torch.randn_like(x), torch.rand(inner, device="cuda").to(dtype)
        given = Unnormed(x, residual, gain, 1e-5, torch.full_like(x, float("nan")))
        row = F.rms_norm((x + residual).double(), (inner,), gain.double(), 1e-5)
    expected = row.double() @ weight.T + bias.double()
    if act:
        gate, up = expected.chunk(2, -1)
        expected = (F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh")) * up
    got = scheme.fused(given, storage, bias, act)
    assert (got.double() - expected).norm() / expected.norm() < (0.006 if dtype == torch.bfloat16 else 0.001)
    assert torch.equal(scheme.fused(given, storage, bias, act), got)
    if normed:
        assert torch.equal(given.total, x + residual)


@pytest.mark.gpu
@on_gpu
def test_others_go_another_way():
    scheme, storage, _ = random_linear(64, 640, 32, torch.bfloat16)
    assert not scheme.fuses(storage, torch.bfloat16)  # groups of 32
    scheme, storage, weight = random_linear(64, 1152, 128, torch.bfloat16)
    assert not scheme.fuses(storage, torch.bfloat16)  # 18 tiles
    x = torch.randn(1, 1152, device="cuda", dtype=torch.bfloat16)
    expected = x.double() @ weight.T
    assert (scheme.matmul(x, storage, None).double() - expected).norm() / expected.norm() < 0.004


if __name__ == "__main__":
    print(json.dumps(compile_all()))
