"""Kernels that a release of Triton, a GPU or a weight cannot have are not used, and say why; all compile for Hopper."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny import TINY

triton = pytest.importorskip("triton")

from kernels_made import compiled  # noqa: E402

from tokenmill.config import EngineConfig  # noqa: E402
from tokenmill.engine import build  # noqa: E402
from tokenmill.errors import ConfigError  # noqa: E402
from tokenmill.model.families import spec_from_config  # noqa: E402
from tokenmill.model.layers import MLPWeights  # noqa: E402
from tokenmill.ops import device_facts  # noqa: E402
from tokenmill.ops.device_facts import HOPPER, HOPPER_ATTENTION, HOPPER_MOE, PDL, QUICK_LAUNCH  # noqa: E402
from tokenmill.ops.matmul import MatmulKernel, MatmulNeed, matmul_kernels, select_matmul  # noqa: E402
from tokenmill.ops.registry import Need, select  # noqa: E402
from tokenmill.ops.triton import config  # noqa: E402
from tokenmill.ops.triton.attention import fresh as attention_fresh  # noqa: E402
from tokenmill.ops.triton.config import Tile  # noqa: E402
from tokenmill.ops.triton.moe import experts as moe  # noqa: E402
from tokenmill.quant.forms import parse_layout  # noqa: E402
from tokenmill.quant.schemes.choose import ComputeTarget, auto_layout, choose_schemes  # noqa: E402
from tokenmill.quant.schemes.dense import Dense  # noqa: E402
from tokenmill.quant.schemes.row_scaled import W8A8, Fp8  # noqa: E402
from tokenmill.quant.schemes.scheme import Linear  # noqa: E402
from tokenmill.quant.schemes.weight_only import WeightForm, WeightOnly  # noqa: E402

GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16
REMEMBERED = (
    device_facts.usable, device_facts.multiprocessors, device_facts.room, device_facts.reads_shared,
    device_facts.copies_tiles, select_matmul,
)  # fmt: skip
KNOWN = ("3.6.0", "3.6.0+git1234", "3.7.1", "3.8.0", "3.9.0")
UNKNOWN = ("3.5.1", "3.10.0", "4.6.0", "main")
ONE_ROW, WARP_SPECIALISED = "one int4 row", "eight bits on both sides, warp-specialised"
STREAMED = "few rows, streamed"
GATED = "gate, up and activation, few rows", "gate, up and activation"
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


@pytest.fixture
def pretend(monkeypatch):
    """Another release of Triton, and a GPU."""

    def set_up(release: str = "3.7.1", capability: tuple[int, int] = (9, 0), shared: int = 232448) -> None:
        properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=shared)
        monkeypatch.setattr(triton, "__version__", release)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        for one in REMEMBERED:
            one.cache_clear()

    yield set_up
    for one in REMEMBERED:
        one.cache_clear()


def need_of(weight: str, out_features: int = 256, in_features: int = 1024, dtype: torch.dtype = BF16, **rest):
    return MatmulNeed(weight, out_features, in_features, dtype, GPU, **rest)


INT4 = need_of("int4", group=128, tiled=True)


@pytest.mark.parametrize("feature", [HOPPER_ATTENTION, HOPPER_MOE], ids=lambda feature: feature.name)
def test_a_feature_says_why_it_is_passed_over(feature, pretend):
    for release in KNOWN:
        pretend(release)
        assert device_facts.usable(feature, GPU) and device_facts.passed_over([feature], GPU) == []
    for release in UNKNOWN:
        pretend(release)
        assert not device_facts.usable(feature, GPU)
        expected = f"{feature.name}: needs Triton 3.6 to 3.9 and this is {release}; {feature.instead}"
        assert device_facts.passed_over([feature], GPU) == [expected]
    for capability in ((8, 0), (10, 0), (12, 0)):
        pretend("3.7.1", capability)
        assert not device_facts.usable(feature, GPU)
        (line,) = device_facts.passed_over([feature], GPU)
        assert f"needs a Hopper GPU and this has compute capability {capability[0]}.0" in line
    assert not device_facts.usable(feature, torch.device("cpu"))


@pytest.mark.parametrize(
    ("need", "name", "rows"),
    [(INT4, ONE_ROW, 1), (need_of("w8a8"), WARP_SPECIALISED, 65), (need_of("fp8"), WARP_SPECIALISED, 65)],
    ids=lambda given: getattr(given, "weight", given),
)
def test_a_kernel_of_products_says_why_it_is_passed_over(need, name, rows, pretend):
    for release in KNOWN:
        pretend(release)
        chosen = select_matmul(need)
        assert chosen.kernel(rows).name == name and chosen.passed_over == ()
    for release in UNKNOWN:
        pretend(release)
        chosen = select_matmul(need)
        instead = chosen.kernel(rows).name
        assert instead != name
        (line,) = chosen.passed_over
        assert line.startswith(f"{name}: needs Triton 3.6 to 3.9 and this is {release}; instead for ")
        assert line.endswith(instead)
    pretend(capability=(10, 0))
    (line,) = select_matmul(need).passed_over
    assert f"{name}: needs a Hopper GPU and this has compute capability 10.0" in line


def test_gpus_without_our_kernels_multiply_with_torch_and_say_so(pretend):
    pretend(capability=(7, 5), shared=64 << 10)
    reason = "needs an Ampere GPU or a later one and this has compute capability 7.5"
    for need, name in ((INT4, "dequantized by torch"), (need_of("dense"), "the matrix library")):
        chosen = select_matmul(need)
        assert {kernel.name for _, kernel in chosen.serving} == {name}
        assert chosen.passed_over and all(reason in line or "Hopper GPU and" in line for line in chosen.passed_over)


SMALL_FLOAT8, LIBRARY_FLOAT8 = "eight bits on both sides, small tiles", "float8 in the matrix library"
OTHER_GPUS = {  # capability, KiB of shared memory -> names by weight and rows
    ((8, 0), 163): {
        ("fp8", 64): "dequantized by torch", ("fp8", 1): "dequantized by torch", ("w8a8", 300): SMALL_FLOAT8,
    },
    ((8, 6), 99): {("w8a8", 1): SMALL_FLOAT8, ("fp8", 64): "dequantized by torch"},
    ((8, 9), 99): {("fp8", 1): "float8 weights, inputs as they are", ("fp8", 300): SMALL_FLOAT8},
    ((10, 0), 227): {("fp8", 64): SMALL_FLOAT8, ("fp8", 300): LIBRARY_FLOAT8, ("w8a8", 300): SMALL_FLOAT8},
    ((12, 0), 99): {("fp8", 64): SMALL_FLOAT8, ("fp8", 300): SMALL_FLOAT8},
}  # fmt: skip


@pytest.mark.parametrize(("gpu", "expected"), OTHER_GPUS.items(), ids=str)
def test_other_gpus_have_the_kernels_that_their_facts_allow(gpu, expected, pretend):
    (capability, shared), everywhere = gpu, {("int4", 1): "codes dequantized in registers"}
    everywhere |= {("int8", 64): "codes dequantized in registers", ("grouped fp8", 1): "codes dequantized in registers"}
    everywhere |= {("int4", 1000): "dequantized for the matrix library", ("dense", 1): "few rows"}
    pretend(capability=capability, shared=shared << 10)
    for (weight, rows), name in (everywhere | expected).items():
        chosen = select_matmul(need_of(weight, 4096, 4096, tiled=True, group=128 * (weight == "int4")))
        assert chosen.kernel(rows).name == name, (weight, rows)
        if "torch" in name:
            assert any("needs an Ada GPU or a later one" in line for line in chosen.passed_over)


def test_a_cache_of_float8_takes_plainer_ops_where_the_gpu_has_no_such_numbers(pretend):
    pretend(capability=(8, 6), shared=99 << 10)
    for form, expected in (("int8", "triton"), ("fp8", "reference")):
        ops = select(Need("cuda", BF16, 128, 16, kv_form=form))
        assert ops.chosen["attention"].name == ops.chosen["rope_kv_write"].name == expected
    told = "\n".join(ops.passed_over(GPU, BF16, False))
    assert "a KV cache of fp8 needs an Ada GPU or a later one and this has compute capability 8.6" in told


def test_quantization_on_other_gpus_is_what_they_multiply(pretend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "some GPU")
    place, shapes = ComputeTarget(GPU, BF16), {"layers.0.down": (256, 1024)}

    def scheme(form: str) -> str:
        return type(choose_schemes(parse_layout(form), shapes, {}, False, place).of("layers.0.down")).__name__

    def auto() -> str:
        return auto_layout(place, is_quantized=False, max_rows=None, fits=True)[0].name

    pretend(capability=(8, 0), shared=163 << 10)
    assert [scheme(form) for form in ("int4", "int8", "w8a8", "fp8")] == ["WeightOnly"] * 2 + ["W8A8", "WeightOnly"]
    assert auto() == "int8"
    of_experts = choose_schemes(parse_layout("fp8"), shapes, {}, False, place, experts=tuple(shapes))
    assert of_experts.named == {}  # floats
    pretend(capability=(8, 9), shared=99 << 10)
    assert scheme("fp8") == "Fp8" and auto() == "fp8"
    pretend(capability=(7, 5), shared=64 << 10)
    with pytest.raises(ConfigError, match=r"quantization is 'int8', which needs an Ampere GPU or a later one"):
        scheme("int8")


def test_launch_shapes_fit_small_devices_and_are_those_that_were_measured_on_hopper(pretend):
    """What the compiler makes of them is tests/ops/test_other_gpus.py."""
    of = {"key_dim": 128, "value_dim": 128, "itemsize": 2, "device": GPU}
    wide, long = of | {"key_dim": 256, "value_dim": 256}, config.prefill_tile(128, 128, 128, BF16)
    pretend()
    tiles = [
        (of, long),
        (wide, config.prefill_tile(128, 256, 256, BF16)),
        (of, config.prefix_tile(128, 128, 128, BF16)),
    ]
    tiles += [
        (of, config.decode_tile(group, 128, 128, BF16, programs)) for group in (1, 4, 32) for programs in (1, 256)
    ]
    latent = of | {"key_dim": 576, "value_dim": 512}
    tiles += [(latent, config.decode_tile(16, 576, 512, BF16, 8)), (latent, config.prefill_tile(128, 576, 512, BF16))]
    assert all(config.fitting(tile, **given) == tile for given, tile in tiles)
    assert attention_fresh.launch_shape(256, GPU).tile == Tile(128, 64, 8, 2)
    pretend(capability=(8, 6), shared=99 << 10)
    assert config.fitting(long, **of) == long  # without warpgroup instructions a pipeline holds less
    assert config.fitting(tiles[1][1], **wide).num_stages < 3
    assert attention_fresh.launch_shape(256, GPU) is None  # chunks are read in pages


def test_what_does_not_fit_a_weight_is_told(pretend):
    pretend()
    for need, reason in (
        (need_of("int4", group=32, tiled=True), "only for groups of 64 and 128 without zeros"),
        (need_of("int4", in_features=1152, group=128, tiled=True), "its 1152 inputs are no multiple of 1024"),
        (need_of("int4", out_features=100, group=128), "its codes do not fill whole tiles"),
    ):
        chosen = select_matmul(need)
        assert chosen.fused is None and any(f"{ONE_ROW}: {reason}" in line for line in chosen.passed_over)


def test_every_number_of_rows_has_a_kernel_that_declares_it(pretend):
    """Whatever the weight, from no rows to any number."""
    pretend()
    for device in (GPU, torch.device("cpu")):
        for weight in ("dense", "int4", "int8", "grouped fp8", "fp8", "w8a8"):
            for dtype in (torch.float32, BF16):
                need = MatmulNeed(weight, 4096, 4096, dtype, device, group=128, tiled=True)
                chosen = select_matmul(need)
                for rows in (0, 1, 2, 4, 5, 64, 65, 128, 129, 192, 193, 5000):
                    kernel = chosen.kernel(rows)
                    assert kernel.rows[0] <= rows <= kernel.rows[1] and dtype in kernel.dtypes


def test_where_nothing_fits_every_reason_is_told():
    with pytest.raises(ConfigError, match=r"nothing multiplies a packed weight of 8 x 32 here \(native: no bfloat16\)"):
        select_matmul(MatmulNeed("packed", 8, 32, BF16, torch.device("cpu")))


def test_weights_that_cannot_be_multiplied_whatever_the_batch_are_refused_before_they_are_loaded(pretend):
    pretend()
    with pytest.raises(ConfigError, match=r"batch_invariant is set, .*rows of 100 inputs are no multiples of 16 bytes"):
        select_matmul(need_of("dense", in_features=100, batch_invariant=True))
    chosen = select_matmul(need_of("dense", batch_invariant=True))
    assert {kernel.name for _, kernel in chosen.serving} == {"batch-invariant"}


def test_on_a_cpu_only_native_products_can_be_recorded(pretend):
    cpu = torch.device("cpu")
    assert not select_matmul(MatmulNeed("dense", 8, 32, torch.float32, cpu)).recordable
    assert select_matmul(MatmulNeed("packed", 8, 32, torch.float32, cpu)).recordable
    pretend()
    assert select_matmul(need_of("dense")).recordable and select_matmul(INT4).recordable


def test_split_k_counters_are_enough_for_every_kernel(pretend):
    pretend()
    kernels: list[MatmulKernel] = list(matmul_kernels("cuda"))
    for scheme in (Dense(), W8A8(), Fp8(), WeightOnly(WeightForm("int4", 128))):
        storage = scheme.allocate(256, 1024, BF16, torch.device("cpu"))
        assert "counters" not in storage
        need = scheme.matmul(storage, BF16).need
        most = max(kernel.counters(256) for kernel in kernels if need.weight in kernel.weights)
        assert most == (16 if need.weight in ("w8a8", "fp8", "dense") else 4)


def test_ways_to_launch_have_their_own_needs(pretend):
    pretend("3.10.0", (10, 0))
    assert device_facts.release_misfit(QUICK_LAUNCH) and device_facts.usable(PDL, GPU)
    pretend("3.7.1", (8, 6))
    assert not device_facts.release_misfit(QUICK_LAUNCH) and not device_facts.usable(PDL, GPU)


@pytest.mark.parametrize("release", ["3.7.1", "3.5.1"])
def test_every_choice_of_a_kernel_asks(release, pretend, monkeypatch):
    pretend(release)

    def usable(feature, device):  # for tensors of a GPU that is not there
        return device_facts.misfit(feature, GPU) == ""

    for module in (attention_fresh, moe):
        monkeypatch.setattr(module, "usable", usable)
    experts = (torch.empty(*size, dtype=BF16, device="meta") for size in ((64, 128), (4, 256, 128), (4, 128, 128)))
    chosen = [
        attention_fresh.launch_shape(128, GPU).hopper,
        moe.hopper_fits(*experts),
        any(kernel.requires is HOPPER for _, kernel in select_matmul(need_of("w8a8")).serving),
        select_matmul(INT4).fused is not None,
    ]
    assert chosen == [release in KNOWN] * 4


@pytest.mark.parametrize(
    ("weight", "changes", "expected"),
    [
        ("dense", {}, {HOPPER_ATTENTION.name, f"dense, {STREAMED}", *GATED}),
        ("w8a8", {}, {HOPPER_ATTENTION.name, f"w8a8, {WARP_SPECIALISED}"}),
        ("fp8", {}, {HOPPER_ATTENTION.name, f"fp8, {WARP_SPECIALISED}"}),
        ("int4", {}, {HOPPER_ATTENTION.name, f"int4-g128, {ONE_ROW}"}),
        ("dense", EXPERTS, {HOPPER_ATTENTION.name, HOPPER_MOE.name, f"dense, {STREAMED}"}),
    ],
)
def test_the_report_tells_what_concerns_the_model(weight, changes, expected, pretend):
    spec = spec_from_config(TINY | changes)
    scheme = SimpleNamespace(
        matmul=lambda storage, dtype: select_matmul(need_of(weight, group=128 * (weight == "int4"), tiled=True))
    )

    def decoder() -> SimpleNamespace:
        one = Linear(scheme, {})
        mlp = SimpleNamespace(shared=None) if spec.moe else MLPWeights(one, one)
        layer = SimpleNamespace(linears=lambda: [one], mlp=mlp)
        weights = SimpleNamespace(device=GPU, dtype=BF16, lm_head=Linear(scheme, {}), peek=lambda index: layer)
        ops = select(Need("cuda", BF16, spec.attention_head_dim, 16))
        return SimpleNamespace(spec=spec, weights=weights, ops=ops)

    pretend("3.7.1")
    assert build.passed_over(decoder()) == []
    pretend("3.5.1")
    assert {line.split(":")[0] for line in build.passed_over(decoder())} == {*expected, QUICK_LAUNCH.name}
    line, *gated = build.matmul_lines(decoder())
    assert line.startswith(f"matmul       {weight}")
    assert not gated  # its kernels are passed over


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


@pytest.mark.parametrize(
    ("rows", "name"),
    [(1, None), (2, GATED[0]), (64, GATED[0]), (80, None), (128, GATED[0]), (129, None), (1024, GATED[1])],
)
def test_the_activation_is_part_of_the_product_where_that_is_faster(rows, name, pretend):
    pretend()
    chosen = select_matmul(need_of("dense", 28672, 4096, weight_dtype=BF16))
    run = chosen.gated(rows)
    assert (run is None) == (name is None)
    assert name is None or any(one.name == name and one.run is run.func for one in matmul_kernels("cuda"))
    assert select_matmul(need_of("dense", 6144, 1024, weight_dtype=BF16)).gated(128) is None  # of small weights


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"in_features": 1028}, "its inputs are no multiple of 8, or its outputs none of 16"),
        ({"out_features": 264}, "its inputs are no multiple of 8, or its outputs none of 16"),
        ({"weight_dtype": torch.float32}, "its weight is float32"),
        ({"dtype": torch.float32, "weight_dtype": torch.float32}, "no float32"),
        ({"batch_invariant": True}, "not batch-invariant"),
    ],
)
def test_where_the_activation_follows_the_product_it_is_said_why(changes, reason, pretend):
    pretend()
    chosen = select_matmul(need_of("dense", **{"weight_dtype": BF16, **changes}))
    assert chosen.gated(32) is None and chosen.describe_gated() == ""
    assert chosen.gating_passed_over[0] == f"{GATED[0]}: {reason}; instead the activation follows the product"


@pytest.mark.parametrize(
    ("columns", "inner", "names"),
    [
        (4096, 14336, ["few rows", STREAMED, STREAMED, "the matrix library", "the matrix library"]),
        (4096, 1024, ["few rows", STREAMED, STREAMED, STREAMED, "the matrix library"]),  # small: two tiles of rows
        (576, 1536, ["few rows", STREAMED, STREAMED, STREAMED, STREAMED]),
        (4096, 14340, ["the matrix library"] * 5),  # rows that the copy engine does not take
        (14336, 4096, ["few rows", *["the matrix library"] * 4]),  # more than one wave of programs
    ],
)
def test_few_rows_are_streamed_through_weights_of_one_wave(columns, inner, names, pretend):
    pretend()
    chosen = select_matmul(need_of("dense", columns, inner, weight_dtype=BF16))
    assert [chosen.kernel(rows).name for rows in (1, 2, 64, 65, 256)] == names


def test_a_head_that_is_the_embedding_has_no_counters_and_is_streamed_in_one_part(pretend, monkeypatch):
    """Nobody allocates such a weight for products: it is there already (model/layers.py)."""
    from tokenmill.ops.triton.gemm import stream

    pretend()
    launched = []
    kernel = {grid: lambda *args, grid=grid, **meta: launched.append((grid, meta["SPLITS"])) for grid in [(16,)]}
    monkeypatch.setattr(stream, "_kernel", kernel)
    x, weight = torch.zeros(8, 2048, dtype=BF16), torch.zeros(1024, 2048, dtype=BF16)
    need = need_of("dense", *weight.shape, weight_dtype=BF16)
    assert select_matmul(need).kernel(8).name == STREAMED
    select_matmul(need)(x, {"weight": weight}, None)
    assert launched == [((16,), 1)]
