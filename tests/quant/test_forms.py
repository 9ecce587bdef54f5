"""The setting `quantization`: what it means per layer, and what is refused with a sentence."""

from __future__ import annotations

import pytest
import torch

from tokenmill.config import EngineConfig
from tokenmill.errors import ConfigError
from tokenmill.quant.forms import Layout, WeightForm, parse_layout
from tokenmill.quant.schemes.choose import ComputeTarget, auto_layout, check_effect, choose_schemes, describe
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.packed import Packed

SHAPES = {f"layers.{index}.{name}": (96, 64) for index in range(4) for name in ("qkv", "o", "gate_up", "down")}
HEAD = SHAPES | {"lm_head": (100, 64)}
NATIVE = ComputeTarget(torch.device("cpu"), torch.float32, native=True)
PLAIN = ComputeTarget(torch.device("cpu"), torch.float32)


def test_a_layer_gets_the_last_form_that_names_it():
    layout = parse_layout("int4-g64-zeros,layers.1-2=int8,layers.2.down=bf16,lm_head=fp8")
    assert layout.of("layers.0.qkv") == WeightForm("int4", 64, zeros=True)
    assert layout.of("layers.1.down") == layout.of("layers.2.o") == WeightForm("int8")
    assert layout.of("layers.2.down") == WeightForm("bf16")
    assert layout.of("layers.12.down") == WeightForm("int4", 64, zeros=True)
    assert layout.of("lm_head") == WeightForm("fp8")
    assert parse_layout({"default": "int4", "layers.0": "fp16"}).of("layers.0.o") == WeightForm("fp16")


def test_the_head_keeps_its_precision_unless_it_is_named():
    assert parse_layout("int4").of("lm_head") is None
    assert parse_layout(None) == Layout()


def test_a_layout_is_written_as_it_is_read():
    text = "int4-g64-zeros, layers.1-2=int8, lm_head=fp8"
    assert parse_layout(text).name == text


@pytest.mark.parametrize(
    "wanted",
    [
        *("int5", "int4-g48", "int4-g32-g64", "int8-zeros", "int4-g64-", "layers.x=int4", "mlp=int8", "", "int4,int8"),
        *(4, {"default": None}, {1: "int4"}, ["int4"]),
    ],
)
def test_what_is_not_known_is_refused_with_what_there_is(wanted):
    with pytest.raises(ConfigError, match="quantization"):
        EngineConfig(quantization=wanted)


def test_a_head_that_a_model_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="its embedding; leave it out"):
        choose_schemes(parse_layout("int8,lm_head=int4"), SHAPES, {}, False, PLAIN)


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ("layers.0-99=int8", "'layers.0-99'.*has 4 layers, 0 to 3"),
        ("int4,layers.4.down=int8", "has 4 layers, 0 to 3"),
        ("layers.3-1=int8", "3 is after 1"),
        ("layers.0-3.gate=int8", "no such matrix"),
    ],
)
def test_a_range_beyond_the_last_layer_is_refused_with_their_number(wanted, why):
    with pytest.raises(ConfigError, match=why):
        choose_schemes(parse_layout(wanted), SHAPES, {}, False, PLAIN)
    choose_schemes(parse_layout("layers.0-3=int8"), SHAPES, {}, False, PLAIN)


def test_a_group_that_does_not_divide_is_refused_and_an_unset_one_is_solved():
    with pytest.raises(ConfigError, match="64 columns"):
        choose_schemes(parse_layout("int4-g128"), SHAPES, {}, False, PLAIN)
    schemes = choose_schemes(parse_layout("int4"), SHAPES, {}, False, PLAIN)
    assert schemes.of("layers.0.qkv").form.group == 64


def test_the_native_library_packs_what_it_can():
    schemes = choose_schemes(parse_layout("int4,layers.1=fp8,layers.2=bf16"), HEAD, {}, False, NATIVE)
    first = schemes.of("layers.0.qkv")
    assert isinstance(first, Packed) and first.form == WeightForm("int4", 32)
    assert isinstance(schemes.of("lm_head"), Packed) and isinstance(schemes.of("embed"), Packed)
    assert schemes.of("layers.1.o").name == "fp8" and schemes.of("layers.2.o").name == "packed bf16"
    assert describe(schemes, ["layers.0.o", "layers.0.down", "layers.1.o"]) == "packed int4-g32 (2), fp8 (1)"


def test_a_form_that_no_layer_can_have_is_refused_and_one_that_some_can_have_is_counted():
    some = {"layers.0.qkv": (96, 48), "layers.0.down": (96, 64)}
    for wanted in ("int8", "int4", "w8a8"):  # the native library's blocks have 32 columns
        layout = parse_layout(wanted)
        schemes = choose_schemes(layout, some, {}, False, NATIVE)
        check_effect(layout, some, schemes)
        assert describe(schemes, some).startswith("packed (1), packed ")
        with pytest.raises(ConfigError, match="has 48 columns"):
            odd = {"layers.0.qkv": (96, 48)}
            check_effect(layout, odd, choose_schemes(layout, odd, {}, False, NATIVE))


def test_what_is_not_asked_for_stays_as_it_is_stored():
    stored = {"layers.0.qkv": WeightForm("int8"), "layers.1.qkv": WeightForm("int4", 32)}
    kept = choose_schemes(Layout(), SHAPES, stored, False, PLAIN)
    assert kept.as_stored == stored.keys()
    assert isinstance(kept.of("layers.2.qkv"), Dense)
    changed = choose_schemes(parse_layout("layers.0=bf16"), SHAPES, stored, False, PLAIN)
    assert changed.as_stored == {"layers.1.qkv"} and changed.of("layers.0.qkv").name == "dense bfloat16"


def test_what_is_stored_as_it_is_asked_for_is_not_rounded_again():
    stored = {
        "layers.0.qkv": WeightForm("int4", 32, zeros=True),
        "layers.0.o": WeightForm("fp8"),
        "layers.0.down": WeightForm("int4", 32),
    }
    for place in (PLAIN, NATIVE):
        found = choose_schemes(parse_layout("int4"), SHAPES, stored, False, place)
        assert found.as_stored == stored.keys() - {"layers.0.o"}
        found = choose_schemes(parse_layout("fp8"), SHAPES, stored, False, place)
        assert found.as_stored == {"layers.0.o"} and found.of("layers.0.o").name == "fp8"
        other = choose_schemes(parse_layout("int4-g64"), SHAPES, stored, False, place)
        assert not other.as_stored and other.of("layers.0.down").form == WeightForm("int4", 64)


def test_auto_says_why():
    layout, why = auto_layout(NATIVE, is_quantized=False, max_rows=None, fits=True)
    assert layout.default == WeightForm("int8") and "bytes" in why
    layout, why = auto_layout(PLAIN, is_quantized=False, max_rows=None, fits=True)
    assert layout == Layout() and "widened for every product" in why
    layout, why = auto_layout(PLAIN, is_quantized=False, max_rows=None, fits=False)
    assert layout.default == WeightForm("int4") and "memory" in why
    assert auto_layout(PLAIN, is_quantized=True, max_rows=None, fits=True)[0] == Layout()
