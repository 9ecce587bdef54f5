"""A rank loads the slices of the whole model's weights, in whatever form these are stored, and reads no more."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.engine.choices import linear_shapes, matrix_bytes, model_bytes
from tokenmill.errors import ConfigError
from tokenmill.model.experts import shares_of_experts
from tokenmill.model.families import spec_from_config
from tokenmill.model.layers import WeightStore
from tokenmill.model.shard import Shard, held, shard_of, spec_of, vocabulary
from tokenmill.model.spec import DecoderSpec
from tokenmill.model.weights.dummy import dummy_weights
from tokenmill.model.weights.gguf import GGUFCheckpoint
from tokenmill.model.weights.load import load_weights, stored_forms
from tokenmill.model.weights.quantized import open_quantized
from tokenmill.model.weights.safetensors import SafetensorsCheckpoint
from tokenmill.ops.native import library
from tokenmill.parallel.layout import parse_layout
from tokenmill.quant.forms import Layout, WeightForm
from tokenmill.quant.schemes.choose import ComputeTarget, choose_schemes
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.packed import Packed
from tokenmill.quant.schemes.row_scaled import W8A8, Fp8
from tokenmill.quant.schemes.scheme import Linear, Schemes
from tokenmill.quant.schemes.weight_only import WeightOnly

FIXTURES = Path(__file__).parent.parent / "weights" / "data"
QUANTIZED = sorted(path.parent.name for path in FIXTURES.glob("*/model.safetensors"))
PLACE = ComputeTarget(torch.device("cpu"), torch.float32)
native = pytest.mark.skipif(isinstance(library.load(), str), reason="there is no native library")


def widened(weight: torch.Tensor | Linear) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return weight
    scheme, storage = weight.scheme, weight.storage
    if isinstance(scheme, Packed):
        return scheme.take_rows(storage, torch.arange(storage.matrix.rows))
    if isinstance(scheme, WeightOnly):
        return scheme.groups(storage).widen(torch.float32)
    return storage["weight"] if scheme.floats else storage["weight"].float() * storage["scale"][:, None]


def by_name(spec: DecoderSpec, store: WeightStore) -> dict[str, torch.Tensor]:
    """Every parameter as floats, by its canonical name."""
    found = {"embed": widened(store.embed), "final_norm": store.final_norm, "lm_head": widened(store.lm_head)}
    for index in range(spec.num_layers):
        layer = store.layer(index)
        shared = getattr(layer.mlp, "shared", None)
        for prefix, part in (("", layer), ("", layer.attention), ("", layer.mlp), ("shared_", shared)):
            for name, value in vars(part).items() if part is not None else ():
                if part is layer.mlp and hasattr(part, "router") and name in ("gate_up", "down"):
                    name = f"experts_{name}"
                if isinstance(value, torch.Tensor | Linear):
                    found[f"layers.{index}.{prefix}{name}"] = widened(value)
                if isinstance(value, Linear) and value.bias is not None:
                    found[f"layers.{index}.{prefix}{name}.bias"] = value.bias
    return {name: found[name] for name in spec.parameters()}


def sliced(whole: dict[str, torch.Tensor], spec: DecoderSpec) -> dict[str, torch.Tensor]:
    """What a rank should hold of these."""
    found = {}
    for name, spans in held(spec).items():
        found[name] = whole[name]
        for dim, some in spans.items():
            found[name] = torch.cat([found[name].narrow(dim, one.start, len(one)) for one in some], dim)
    return found


def check(whole: dict[str, torch.Tensor], spec: DecoderSpec, store: WeightStore) -> None:
    found = by_name(spec, store)
    assert found.keys() == whole.keys()
    for name, wanted in sliced(whole, spec).items():
        if spec.part is not None and spec.part.rank > 0 and name.endswith(("o.bias", "down.bias")):
            wanted = torch.zeros_like(wanted)  # the first rank adds it
        assert torch.equal(found[name], wanted), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    made = {}

    def folder(case: str) -> Path:
        if case not in made:
            made[case] = tmp_path_factory.mktemp(case)
            tiny_models.make(case).save_pretrained(made[case])
        return made[case]

    return folder


class Counted(SafetensorsCheckpoint):
    """Counts the numbers that are read of each tensor."""

    read: Counter[str]

    def tensor(self, name: str) -> torch.Tensor:
        return self._counted(name, super().tensor(name))

    def part(self, name: str, box: tuple[range, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._counted(name, super().part(name, box, dtype))

    def _counted(self, name: str, found: torch.Tensor) -> torch.Tensor:
        self.read = getattr(self, "read", Counter())
        self.read[name] += found.numel()
        return found


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("llama", "tp2"), ("llama-biases", "tp4"), ("llama-multi-query", "tp2"), ("phi3", "tp2"), ("olmo2", "tp2"),
        ("gemma2", "tp2"), ("mixtral", "tp2"), ("mixtral", "ep4"), ("qwen3-moe", "ep2"), ("deepseek-v2", "tp2"),
        ("deepseek-v2-lite", "ep2"),
    ],
)  # fmt: skip
def test_ranks_read_the_checkpoint_once_and_again_only_what_all_of_them_hold(case, layout, saved):
    checkpoint = SafetensorsCheckpoint(saved(case))
    spec, layout = spec_from_config(checkpoint.config), parse_layout(layout)
    whole = by_name(spec, load_weights(spec, checkpoint, torch.float64, "cpu"))
    read: Counter[str] = Counter()
    holders: Counter[str] = Counter()
    for rank in range(layout.ranks):
        mine, counted = spec_of(spec, shard_of(layout, rank)), Counted(saved(case))
        check(whole, mine, load_weights(mine, counted, torch.float64, "cpu"))
        read += counted.read
        for name, param in mine.parameters().items():
            holders[name] += param.numel
    twice = {"deepseek-v2": ("kv_b_proj",), "deepseek-v2-lite": ("kv_b_proj",)}.get(case, ())  # k_up and v_up
    repeated = sum(holders.values()) - sum(param.numel for param in spec.parameters().values())
    once = sum(checkpoint.tensor(name).numel() * (1 + name.endswith(tuple(f"{one}.weight" for one in twice)))
               for name in checkpoint.names())  # fmt: skip
    assert sum(read.values()) == once + repeated
    # What several ranks hold is small: norms, routers, the latent's projections, keys and values of shared heads.
    small = ("norm", "router", "attention", "mlp", "bias", "qkv")
    assert all(holders[name] == param.numel or name.endswith(small) for name, param in spec.parameters().items())


SCHEMES = {
    "int8": lambda: WeightOnly(WeightForm("int8")),
    "int4-g32": lambda: WeightOnly(WeightForm("int4", 32)),
    "int4-g32-zeros": lambda: WeightOnly(WeightForm("int4", 32, True)),
    "w8a8": W8A8,
    "fp8": Fp8,
    "float32 of their own": lambda: Dense(torch.float32),
}
SIZES = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 192}


def own_case(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    monkeypatch.setitem(tiny_models.CASES, "own", ("Llama", {**SIZES, **changes}))


@pytest.mark.parametrize("name", SCHEMES)
def test_rounding_at_load_gives_a_rank_the_codes_and_scales_that_one_rank_has(name, monkeypatch, tmp_path):
    own_case(monkeypatch)
    tiny_models.make("own").save_pretrained(tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    spec, schemes = spec_from_config(checkpoint.config), Schemes.inside(SCHEMES[name]())
    whole = by_name(spec, load_weights(spec, checkpoint, torch.float32, "cpu", schemes=schemes))
    drawn = by_name(spec, dummy_weights(spec, torch.float32, "cpu", 3, schemes))
    for rank in range(2):
        mine = spec_of(spec, Shard(rank, 2))
        check(whole, mine, load_weights(mine, checkpoint, torch.float32, "cpu", schemes=schemes))
        check(drawn, mine, dummy_weights(mine, torch.float32, "cpu", 3, schemes))


@native
@pytest.mark.parametrize("form", [None, WeightForm("int8"), WeightForm("int4", 32, True), WeightForm("bf16")])
def test_packed_weights_are_cut_between_blocks(form, monkeypatch, tmp_path):
    own_case(monkeypatch)
    tiny_models.make("own").save_pretrained(tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    spec, schemes = spec_from_config(checkpoint.config), Schemes(Packed(form, beside=Packed()))
    whole = by_name(spec, load_weights(spec, checkpoint, torch.float32, "cpu", schemes=schemes))
    drawn = by_name(spec, dummy_weights(spec, torch.float32, "cpu", 3, schemes))
    for rank in range(2):
        mine = spec_of(spec, Shard(rank, 2))
        check(whole, mine, load_weights(mine, checkpoint, torch.float32, "cpu", schemes=schemes))
        check(drawn, mine, dummy_weights(mine, torch.float32, "cpu", 3, schemes))


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    pytest.importorskip("gguf")
    sys.path.append(str(FIXTURES.parent))
    import gguf_files

    return gguf_files.tiny_model(tmp_path_factory.mktemp("gguf") / "tiny.gguf", hidden=128)


@native
@pytest.mark.parametrize("packed", [False, True])
def test_gguf_blocks_are_cut_for_ranks(packed, gguf_file):
    """Of those whose cut ends within a block, floats are kept."""
    checkpoint = GGUFCheckpoint(gguf_file)
    spec = spec_from_config(checkpoint.config)
    schemes = Schemes(Packed()) if packed else None
    whole = by_name(spec, load_weights(spec, checkpoint, torch.float32, "cpu", schemes=schemes))
    for rank in range(2):
        mine = spec_of(spec, Shard(rank, 2))
        store = load_weights(mine, checkpoint, torch.float32, "cpu", schemes=schemes)
        check(whole, mine, store)
        if packed:
            planned = matrix_bytes(mine, torch.float32, schemes, checkpoint)
            for index, name in itertools.product(range(spec.num_layers), ("o", "qkv")):
                linear = getattr(store.layer(index).attention, name)
                assert linear.storage.matrix.nbytes == planned[f"layers.{index}.{name}"]


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_checkpoints_are_cut_as_they_are_stored(name):
    checkpoint = open_quantized(SafetensorsCheckpoint(FIXTURES / name))
    spec = spec_from_config(checkpoint.config)

    def loaded(spec: DecoderSpec) -> tuple[Schemes, WeightStore]:
        schemes = choose_schemes(Layout(), linear_shapes(spec), stored_forms(spec, checkpoint), False, PLACE)
        return schemes, load_weights(spec, checkpoint, torch.float32, "cpu", schemes=schemes)

    schemes, store = loaded(spec)
    whole = by_name(spec, store)
    for rank in range(2):
        mine = spec_of(spec, Shard(rank, 2))
        its_schemes, its_store = loaded(mine)
        found = by_name(mine, its_store)
        for param, wanted in sliced(whole, mine).items():
            torch.testing.assert_close(found[param], wanted, rtol=1e-6, atol=0, msg=param)
        lost = schemes.as_stored - its_schemes.as_stored  # 80 columns of a rank are no multiple of a group of 32
        assert all(param.endswith("down") for param in lost), lost


def test_a_rank_s_memory_is_planned_for_what_it_holds(saved):
    checkpoint = SafetensorsCheckpoint(saved("qwen3-moe"))
    spec = spec_from_config(checkpoint.config)
    whole = model_bytes(spec, torch.float32)
    for layout in ("tp2", "ep2"):
        mine = spec_of(spec, shard_of(parse_layout(layout), 1))
        planned = model_bytes(mine, torch.float32)
        store = by_name(mine, load_weights(mine, checkpoint, torch.float32, "cpu"))
        assert planned.weights == sum(one.nbytes for one in store.values())
        assert planned.weights < 0.6 * whole.weights and planned.kv_per_token * 2 == whole.kv_per_token


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300_000), st.integers(1, 16))
def test_the_vocabulary_is_divided_without_gaps_and_about_evenly(size, ranks):
    parts = [vocabulary(size, rank, ranks) for rank in range(ranks)]
    assert parts[0].start == 0 and parts[-1].stop == size
    assert all(before.stop == after.start for before, after in itertools.pairwise(parts))
    assert max(map(len, parts)) - min(map(len, parts)) <= 128


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.sets(st.integers(0, 7)))
def test_every_expert_is_held_once_and_hot_ones_by_all(ranks, each, hot):
    hot = {one for one in hot if one < ranks * each}
    shares = shares_of_experts(ranks * each, ranks, sorted(hot))
    for expert in range(ranks * each):
        assert sum(expert in share for share in shares) == (ranks if expert in hot else 1)


@pytest.mark.parametrize(
    ("case", "layout", "told"),
    [
        ("llama", "tp3", "its 4 attention heads are no multiple of 3; tp may be 1, 2, 4"),
        ("own", "tp4", "its 3 KV heads can be neither divided by 4 nor repeated evenly; tp may be 1, 3, 6"),
        ("qwen3-moe", "tp8", "its 4 attention heads are no multiple of 8"),
        ("mixtral", "tp4,ep4", None),
        ("llama", "ep2", "has no experts to divide among 2 ranks; leave ep out"),
        ("deepseek-v2", "dp2,tp3,ep6", "no multiple of 3"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_what_can(case, layout, told, monkeypatch):
    own_case(monkeypatch, num_attention_heads=12, num_key_value_heads=3, intermediate_size=240, hidden_size=96)
    architecture, changes = tiny_models.CASES[case]
    import transformers

    config = getattr(transformers, f"{architecture}Config")(**{**tiny_models.SIZES, **changes})
    config.architectures = [f"{architecture}ForCausalLM"]
    spec = spec_from_config(config.to_dict())
    if told is None:
        spec_of(spec, shard_of(parse_layout(layout), 0))
        return
    with pytest.raises(ConfigError, match=told):
        spec_of(spec, shard_of(parse_layout(layout), 0))
