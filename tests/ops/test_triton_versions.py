"""Kernels that a release of Triton or a GPU cannot have are not used, and say why; all others compile for a Hopper."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import TINY

triton = pytest.importorskip("triton")

from tokenmill.config import EngineConfig  # noqa: E402
from tokenmill.engine import build  # noqa: E402
from tokenmill.model.families import spec_from_config  # noqa: E402
from tokenmill.ops.triton import attention_fresh, gemm_int8, moe, versions  # noqa: E402
from tokenmill.quant.schemes import weight_only  # noqa: E402
from tokenmill.quant.schemes.fp8 import Fp8  # noqa: E402
from tokenmill.quant.schemes.scheme import Dense, Schemes  # noqa: E402
from tokenmill.quant.schemes.w8a8 import W8A8  # noqa: E402
from tokenmill.quant.schemes.weight_only import Form, WeightOnly  # noqa: E402

GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16
REMEMBERED = versions.usable
KNOWN = ("3.6.0", "3.6.0+git1234", "3.7.1", "3.8.0", "3.9.0")
UNKNOWN = ("3.5.1", "3.10.0", "4.6.0", "main")
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "compile_kernels.py"


@pytest.fixture
def pretend(monkeypatch):
    """Another release of Triton, and a GPU."""

    def set_up(release: str, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(triton, "__version__", release)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        REMEMBERED.cache_clear()

    yield set_up
    REMEMBERED.cache_clear()


@pytest.mark.parametrize("family", versions.HOPPER_FAMILIES, ids=lambda family: family.name)
def test_a_family_says_why_it_is_passed_over(family, pretend):
    for release in KNOWN:
        pretend(release)
        assert versions.usable(family, GPU) and versions.passed_over([family], GPU) == []
    for release in UNKNOWN:
        pretend(release)
        assert not versions.usable(family, GPU)
        expected = f"{family.name}: needs Triton 3.6 to 3.9 and this is {release}; {family.instead}"
        assert versions.passed_over([family], GPU) == [expected]
    for capability in ((8, 0), (10, 0), (12, 0)):
        pretend("3.7.1", capability)
        assert not versions.usable(family, GPU)
        (line,) = versions.passed_over([family], GPU)
        assert f"needs a Hopper GPU and this has compute capability {capability[0]}.0" in line
    assert not versions.usable(family, torch.device("cpu"))


def test_ways_to_launch_have_their_own_needs(pretend):
    pretend("3.10.0", (10, 0))
    assert versions.release_misfit(versions.QUICK_LAUNCH) and versions.usable(versions.PDL, GPU)
    pretend("3.7.1", (8, 6))
    assert not versions.release_misfit(versions.QUICK_LAUNCH) and not versions.usable(versions.PDL, GPU)


@pytest.mark.parametrize("release", ["3.7.1", "3.5.1"])
def test_every_choice_of_a_kernel_asks(release, pretend, monkeypatch):
    pretend(release)
    asked = []

    def usable(family, device):  # for tensors of a GPU that is not there
        asked.append(family)
        return versions.misfit(family, GPU) == ""

    for module in (attention_fresh, gemm_int8, moe, versions):
        monkeypatch.setattr(module, "usable", usable)
    monkeypatch.setattr(weight_only, "has_small_gemm", lambda device: True)
    scheme = WeightOnly(Form("int4", 128))
    storage = scheme.allocate(64, 1024, BF16, torch.device("meta"))
    codes = (torch.empty(rows, 512, dtype=torch.int8, device="meta") for rows in (128, 256))
    experts = (torch.empty(*size, dtype=BF16, device="meta") for size in ((64, 128), (4, 256, 128), (4, 128, 128)))
    chosen = [
        attention_fresh.launch_shape(128, GPU).hopper,
        moe.hopper_fits(*experts),
        gemm_int8.hopper_takes(*codes, BF16),
        scheme.fuses(storage, BF16),
    ]
    assert chosen == [release in KNOWN] * 4
    assert tuple(asked) == versions.HOPPER_FAMILIES


@pytest.mark.parametrize(
    ("scheme", "changes", "expected"),
    [
        (Dense(), {}, {versions.ATTENTION}),
        (W8A8(), {}, {versions.ATTENTION, versions.EIGHT_BITS}),
        (Fp8(), {}, {versions.ATTENTION, versions.EIGHT_BITS}),
        (WeightOnly(Form("int4", 128)), {}, {versions.ATTENTION, versions.ONE_ROW}),
        (Dense(), {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
                   "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
                   "decoder_sparse_step": 1, "mlp_only_layers": []}, {versions.ATTENTION, versions.MOE}),
    ],
)  # fmt: skip
def test_the_report_tells_what_concerns_the_model(scheme, changes, expected, pretend):
    spec = spec_from_config(TINY | changes)
    chosen = {op: SimpleNamespace(name="triton") for op in ("attention", "moe")}
    arguments = SimpleNamespace(chosen=chosen), spec, BF16, Schemes(scheme), GPU
    pretend("3.7.1")
    assert build.passed_over(*arguments) == []
    pretend("3.5.1")
    lines = build.passed_over(*arguments)
    assert {line.split(":")[0] for line in lines} == {one.name for one in {*expected, versions.QUICK_LAUNCH}}
    assert build.passed_over(*arguments[:4], torch.device("cpu")) == []


def test_a_release_that_costs_speed_is_told_unasked(pretend):
    config = EngineConfig(model="any")
    pretend("3.5.1")
    told = build.why_slower(None, config, GPU)
    assert told is not None and "warp-specialised attention needs Triton 3.6 to 3.9 and this is 3.5.1" in told
    pretend("3.5.1", (8, 0))  # another release would not help
    assert build.why_slower(None, config, GPU) is None
    pretend("3.7.1")
    assert build.why_slower(None, config, GPU) is None


def test_the_hopper_kernels_compile(tmp_path):
    """Down to machine code, with the Triton that is installed; the one-row product has its own test."""
    only = "hopper (attention qwen3-0.6b|moe silu torch.bfloat16|gemm torch.int8 .*block_n=128, splits=2)"
    made = compiled(only, tmp_path)
    assert len(made) == 8
    assert all(one["wgmma"] > 0 for name, one in made.items() if ": hopper_kernel" in name or ": _kernel" in name)


def test_inputs_of_few_rows_stay_in_registers(tmp_path):
    """Lanes load what they multiply: a release that spreads them another way sends all of it through shared memory."""
    (made,) = compiled("weight only int8 groups of 0 6144 x 4096, 1 rows", tmp_path).values()
    assert made["spills"] == 0 and made["shared"] <= 4096


def compiled(only: str, folder: Path) -> dict[str, dict[str, int]]:
    """What the kernels of these cases became; in another process, because this one has the interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, str(SCRIPT), "--only", only, "--save", str(folder / "made.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "made.json").read_text())
