"""The registry picks the best implementation that fits, says why, and refuses what cannot work."""

import pytest
import torch

from tokenmill.errors import ConfigError
from tokenmill.ops import registry
from tokenmill.ops.registry import Implementation, Need, select

SMALL = {"add", "scaled", "soft_cap"}
SAMPLING = {"sample", "logprobs", "shape"}
DECODING = {"decode_inputs", "keep_sampled", "tree_inputs", "keep_tree", "move_kv", "grow_tree"}
LAYER = {
    "rms_norm",
    "add_rms_norm",
    "rope_kv_write",
    "rope",
    "place_kv",
    "attention",
    "act_mul",
    "moe",
    "per_head",
    "concat",
    "add_low_rank",
}
OPTIONAL = {"route", "moe_packed"}  # of the native library
ALL_OPS = LAYER | SMALL | SAMPLING | DECODING
CPU = Need(device="cpu", dtype=torch.float32)
TORCH_ONLY = Need(device="cpu", dtype=torch.float64)  # what the native library does not compute, where there is one


def offer(monkeypatch, *implementations):
    monkeypatch.setattr(registry, "implementations", lambda device, batch_invariant: implementations)


def make(name, op="attention", **declared):
    return Implementation(op=op, name=name, fn=lambda: name, **declared)


@pytest.mark.parametrize("dtype", registry.FLOATS)
def test_every_op_has_an_implementation_on_cpu_in_every_precision(dtype):
    ops = select(Need(device="cpu", dtype=dtype))
    assert set(ops.chosen) - OPTIONAL == ALL_OPS
    for op in ALL_OPS:
        assert getattr(ops, op) is ops.chosen[op].fn


def test_cpu_versions_win_over_the_reference():
    chosen = select(TORCH_ONLY).chosen
    assert {op for op in ALL_OPS if chosen[op].name == "cpu"} == {"attention", "moe", "sample"}


def test_a_preference_for_all_ops_is_taken_where_it_exists():
    chosen = select(CPU, prefer="reference").chosen
    assert {implementation.name for implementation in chosen.values()} == {"reference"}
    assert select(TORCH_ONLY, prefer="cpu").chosen["rms_norm"].name == "reference"


def test_a_preference_per_op_leaves_the_others_alone():
    ops = select(TORCH_ONLY, prefer={"attention": "reference"})
    assert ops.chosen["attention"].name == "reference"
    assert ops.reasons["attention"] == "asked for"
    assert ops.chosen["sample"].name == "cpu"


def test_an_unknown_name_for_an_op_is_refused_with_the_names_that_exist():
    with pytest.raises(ConfigError, match="op 'attention' cannot use 'fast': there are only reference, cpu"):
        select(CPU, prefer={"attention": "fast"})


@pytest.mark.parametrize(
    "declared,reason",
    [
        ({"devices": ("cuda",)}, "runs on cuda, not cpu"),
        ({"dtypes": (torch.bfloat16,)}, "no float32"),
        ({"head_dims": (80, 256)}, "head size 64 is outside 80-256"),
        ({"block_sizes": (32, 64)}, r"block size 16 is not one of \(32, 64\)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_passed_over_otherwise(monkeypatch, declared, reason):
    offer(monkeypatch, make("plain"), make("special", rank=9, **declared))
    with pytest.raises(ConfigError, match=f"op 'attention' cannot use 'special': {reason}"):
        select(CPU, prefer={"attention": "special"})
    ops = select(CPU, prefer="special")
    assert ops.chosen["attention"].name == "plain"
    assert "not special" in ops.reasons["attention"]


def test_head_and_block_sizes_matter_only_to_ops_that_see_them(monkeypatch):
    offer(monkeypatch, make("narrow", op="rms_norm", head_dims=(80, 256), block_sizes=(64,)))
    assert select(CPU).chosen["rms_norm"].name == "narrow"


def test_the_highest_rank_that_fits_is_chosen(monkeypatch):
    offer(monkeypatch, make("slow"), make("fast", rank=5), make("elsewhere", rank=10, devices=("cuda",)))
    ops = select(CPU)
    assert ops.chosen["attention"].name == "fast"
    assert ops.attention() == "fast"


def test_the_report_names_each_choice_and_its_reason():
    report = select(TORCH_ONLY, prefer={"attention": "reference"}).report()
    assert len(report) == len(ALL_OPS)
    assert "attention: reference (asked for)" in report
    assert any(line.startswith("sample: cpu (the fastest that fits") for line in report)


def test_a_misspelt_preference_is_refused_with_what_there_is():
    with pytest.raises(ConfigError, match=r"'refrence'.*cpu, (native, )?reference"):
        select(CPU, prefer="refrence")
    with pytest.raises(ConfigError, match="atention"):
        select(CPU, prefer={"atention": "reference"})
