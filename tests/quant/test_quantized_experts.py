"""Experts in small numbers: rounded while loading, read from quantized checkpoints, counted, recorded, and written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenmill import LLM, SamplingParams
from tokenmill.engine.choices import matrix_bytes, matrix_shapes, model_bytes
from tokenmill.model.families import spec_from_config
from tokenmill.model.layers import ResidentWeights
from tokenmill.model.weights.checkpoint import Checkpoint
from tokenmill.model.weights.gguf import GGUFCheckpoint
from tokenmill.model.weights.load import load_weights, packed_as_stored, stored_forms
from tokenmill.model.weights.quantized import open_quantized
from tokenmill.model.weights.safetensors import SafetensorsCheckpoint
from tokenmill.ops import reference
from tokenmill.ops.native import library
from tokenmill.ops.native.experts import moe_packed
from tokenmill.quant.forms import Layout, WeightForm, parse_layout
from tokenmill.quant.schemes.choose import ComputeTarget, choose_schemes
from tokenmill.quant.schemes.experts import Experts, moe_each
from tokenmill.quant.tool.layer_source import LayerSource
from tokenmill.quant.tool.quantize import Method, plan_forms, quantize_model
from tokenmill.quant.tool.report import weight_bytes
from tokenmill.quant.tool.write import write_model

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("model", "weights"))
CPU, HIDDEN, INNER, COUNT = torch.device("cpu"), 64, 64, 6
NATIVE, PLAIN = ComputeTarget(CPU, torch.float32, native=True), ComputeTarget(CPU, torch.float32)
SIZES = {
    "hidden_size": HIDDEN, "head_dim": 16, "num_experts": COUNT, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "moe_intermediate_size": INNER, "num_hidden_layers": 2,
}  # fmt: skip
PROMPTS = [[(53 * place + 17 * row) % 150 + 5 for place in range(6 + 11 * row)] for row in range(3)]
NAMES = [f"layers.{index}.experts_{which}" for index in range(2) for which in ("gate_up", "down")]
needs_native = pytest.mark.skipif(isinstance(library.load(), str), reason="there is no native library")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tiny_models

    tiny_models.CASES["wide experts"] = ("Qwen3Moe", SIZES)
    path = tmp_path_factory.mktemp("moe")
    tiny_models.make("wide experts").save_pretrained(path)
    del tiny_models.CASES["wide experts"]
    return path


def loaded(checkpoint: Checkpoint, layout: str | None, place: ComputeTarget) -> ResidentWeights:
    spec = spec_from_config(checkpoint.config)
    shapes, stored = matrix_shapes(spec), stored_forms(spec, checkpoint)
    experts = [name for name in shapes if ".experts_" in name]
    schemes = choose_schemes(
        parse_layout(layout), shapes, stored, isinstance(checkpoint, GGUFCheckpoint), place, experts
    )
    weights = load_weights(spec, checkpoint, torch.float32, CPU, schemes=schemes)
    held = matrix_bytes(spec, torch.float32, schemes, checkpoint)
    for name in NAMES:  # the memory plan counts what is held
        _, index, which = name.split(".")
        assert held[name] == nbytes(getattr(weights.layer(int(index)).mlp, which.removeprefix("experts_"))), name
    assert model_bytes(spec, torch.float32, schemes, checkpoint).weights >= sum(held.values())
    assert isinstance(weights, ResidentWeights)
    return weights


def nbytes(experts: Experts | torch.Tensor) -> int:
    parts = [experts] if isinstance(experts, torch.Tensor) else [t for one in experts.storages for t in one.values()]
    return sum(part.numel() * part.element_size() for part in parts)


def error(weights: ResidentWeights, folder: Path) -> float:
    """Of what the experts of both layers make of some rows, against those of the floats."""
    plain = SafetensorsCheckpoint(folder)
    floats = load_weights(spec_from_config(plain.config), plain, torch.float32, CPU)
    made = torch.Generator().manual_seed(1)
    x, scores = torch.randn(21, HIDDEN, generator=made), torch.randn(21, COUNT, generator=made)
    shares, chosen = scores.softmax(-1).topk(2)
    worst = 0.0
    for index in range(2):
        wanted = reference.moe(x, shares, chosen, *experts_of(floats, index), "silu")
        both = experts_of(weights, index)
        if all(one.op == "moe_packed" for one in both):
            found = moe_packed(x, shares, chosen, both[0].operand, both[1].operand, "silu")
        else:
            found = moe_each(x, shares, chosen, *both, "silu")
        worst = max(worst, float((found - wanted).norm() / wanted.norm()))
    return worst


@needs_native
@pytest.mark.parametrize(
    ("layout", "share", "most"),
    [("int8", 34 / 128, 0.03), ("int4", 18 / 128, 0.35), ("int4-g32-zeros", 20 / 128, 0.35), ("w8a8", 34 / 128, 0.03),
     ("bf16", 0.5, 0.02)],
)  # fmt: skip
def test_experts_are_rounded_while_they_are_loaded(folder: Path, layout: str, share: float, most: float) -> None:
    weights, plain = loaded(SafetensorsCheckpoint(folder), layout, NATIVE), SafetensorsCheckpoint(folder)
    floats = sum(
        param.numel * 4 for name, param in spec_from_config(plain.config).parameters().items() if name in NAMES
    )
    held = sum(nbytes(one) for index in range(2) for one in experts_of(weights, index))
    assert held == pytest.approx(share * floats, rel=0.08)  # minimums take a line of their own
    assert 1e-5 < error(weights, folder) < most


@needs_native
def test_layers_may_have_forms_of_their_own(folder: Path) -> None:
    weights = loaded(SafetensorsCheckpoint(folder), "layers.0.experts_down=int8,layers.1=int4", NATIVE)
    names = [one.scheme.name for index in range(2) for one in experts_of(weights, index)]
    assert names == ["packed", "packed int8", "packed int4-g32", "packed int4-g32"]
    assert error(weights, folder) < 0.35


@pytest.mark.parametrize(
    ("layout", "most"), [("int8", 0.03), ("int4", 0.35), ("int4-g32-zeros", 0.35), ("w8a8", 0.03), ("fp8", 0.1)]
)
def test_without_the_native_library_each_expert_is_multiplied_as_its_form_is(
    folder: Path, layout: str, most: float
) -> None:
    weights = loaded(SafetensorsCheckpoint(folder), layout, PLAIN)
    assert all(one.op in ("moe_codes", "moe_w8a8") for one in experts_of(weights, 0))  # ops that a GPU has
    assert 1e-5 < error(weights, folder) < most


def experts_of(weights: ResidentWeights, index: int) -> tuple[Any, Any]:
    mlp: Any = weights.layer(index).mlp
    return mlp.gate_up, mlp.down


@needs_native
def test_no_copy_of_all_experts_in_floats_is_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    largest, real = 0, torch.empty

    def watched(*shape: Any, **options: Any) -> torch.Tensor:
        nonlocal largest
        made = real(*shape, **options)
        largest = max(largest, made.numel() if made.is_floating_point() else 0)
        return made

    monkeypatch.setattr(torch, "empty", watched)
    loaded(SafetensorsCheckpoint(folder), "int4", NATIVE)
    assert largest < COUNT * HIDDEN * INNER


@needs_native
@pytest.mark.filterwarnings("error:.*run plainly")
@pytest.mark.parametrize("layout", [None, "int8", "int4"])
def test_tokens_do_not_depend_on_the_batch_nor_on_chunks_nor_on_recording(folder: Path, layout: str | None) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    settings = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 96, "quantization": layout}
    found = []
    for options, alone in (
        ({"max_num_seqs": 3}, False), ({"max_num_seqs": 3, "cuda_graphs": False}, False),
        ({"max_num_seqs": 1, "max_num_batched_tokens": 7}, True),
    ):  # fmt: skip
        with LLM(str(folder), **settings, **options) as llm:
            batches = [[one] for one in PROMPTS] if alone else [PROMPTS]
            said = [one.outputs[0].token_ids for some in batches for one in llm.generate(some, params)]
            runner = llm._processor.engine.runner
            recorded = runner._recorded is not None and runner._recorded._graph is not None
            assert recorded == options.get("cuda_graphs", True)
            found.append(said)
            lines = [line for line in llm.plan_lines() if line.startswith("linear")]
            assert "experts stay floats" not in lines[0]
    assert found[0] == found[1] == found[2]


@needs_native
def test_auto_rounds_experts_too(folder: Path) -> None:
    with LLM(str(folder), device="cpu", skip_tokenizer_init=True, max_model_len=96, quantization="auto") as llm:
        decoder = llm._processor.engine.runner.decoder
        assert experts_of(decoder.weights, 1)[0].scheme.name == "packed int8"


@needs_native
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
def test_experts_of_gguf_files_stay_as_they_are(folder: Path, tmp_path: Path, kind: str) -> None:
    from gguf_files import convert
    from transformers import AutoConfig

    path = convert(folder, AutoConfig.from_pretrained(folder), tmp_path / "floats.gguf")
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(tmp_path / "packed.gguf", "qwen3moe")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        if "_exps" in tensor.name:
            codes = gguf.quants.quantize(tensor.data, gguf.GGMLQuantizationType[kind])
            writer.add_tensor(tensor.name, codes, raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = GGUFCheckpoint(tmp_path / "packed.gguf")
    weights = loaded(checkpoint, None, NATIVE)
    gate_up, down = experts_of(weights, 1)
    assert [form.name for form, _, _ in gate_up.storages[3].matrix.segments] == [
        {"Q8_0": "int8", "Q4_0": "int4", "Q5_1": "int5+min"}[kind]
    ] * 2
    for which, rows in (("gate_proj", slice(None, INNER)), ("up_proj", slice(INNER, None))):
        stored = checkpoint.tensor(f"model.layers.1.mlp.experts.3.{which}.weight")
        found = gate_up.storages[3].matrix.take_rows(torch.arange(2 * INNER))[rows]
        torch.testing.assert_close(found, stored, atol=1e-6, rtol=1e-5)
    assert error(weights, folder) < 0.4
    assert packed_as_stored(spec_from_config(checkpoint.config), checkpoint)[NAMES[3]] == nbytes(down)


def written(folder: Path, target: Path, layout: str, method: str = "rtn") -> Path:
    source = LayerSource(spec_from_config(SafetensorsCheckpoint(folder).config), SafetensorsCheckpoint(folder))
    forms, _ = plan_forms(source.spec, parse_layout(layout))
    ids = torch.randint(0, 150, (4, 32), generator=torch.Generator().manual_seed(0))
    write_model(source, forms, quantize_model(source, forms, Method(method), ids, CPU), target, torch.float32)
    return target


@pytest.mark.parametrize(("layout", "method"), [("int4-g32", "gptq"), ("int8", "rtn"), ("w8a8", "rtn"), ("fp8", "awq")])
def test_the_quantizer_writes_experts_that_the_engine_keeps(
    folder: Path, tmp_path: Path, layout: str, method: str
) -> None:
    target = written(folder, tmp_path, layout, method)
    names = load_file(target / "model.safetensors").keys()
    assert not [name for name in names if ".experts." in name and name.endswith("_proj.weight")] or layout[1:] in (
        "8a8",
        "p8",
    )
    checkpoint = open_quantized(SafetensorsCheckpoint(target))
    spec = spec_from_config(checkpoint.config)
    forms = stored_forms(spec, checkpoint)
    assert all(forms[name].kind == parse_layout(layout).default.kind for name in NAMES)  # type: ignore[union-attr]
    assert error(loaded(checkpoint, None, PLAIN), folder) < 0.35
    if layout != "fp8" and not isinstance(library.load(), str):
        weights = loaded(checkpoint, None, NATIVE)
        assert experts_of(weights, 0)[0].scheme.form == forms[NAMES[0]]
        wide = [checkpoint.tensor(f"model.layers.0.mlp.experts.5.{one}_proj.weight") for one in ("gate", "up")]
        found = experts_of(weights, 0)[0].storages[5].matrix.take_rows(torch.arange(2 * INNER))
        torch.testing.assert_close(found, torch.cat(wide), atol=1e-3, rtol=1e-3)  # scales in 16 bits
        assert error(weights, folder) < 0.35


def test_experts_that_are_stacked_are_written_one_by_one(folder: Path, tmp_path: Path) -> None:
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    for index in range(2):
        at = f"model.layers.{index}.mlp.experts"
        each = [
            [tensors.pop(f"{at}.{expert}.{one}_proj.weight") for one in ("gate", "up", "down")]
            for expert in range(COUNT)
        ]
        tensors[f"{at}.gate_up_proj"] = torch.stack([torch.cat(one[:2]) for one in each])
        tensors[f"{at}.down_proj"] = torch.stack([one[2] for one in each])
    (tmp_path / "stacked").mkdir()
    save_file(tensors, tmp_path / "stacked" / "model.safetensors")
    (tmp_path / "stacked" / "config.json").write_text(json.dumps(config))
    for name in ("one", "all"):
        (tmp_path / name).mkdir()
    one = load_file(written(folder, tmp_path / "one", "int4-g32") / "model.safetensors")
    every = load_file(written(tmp_path / "stacked", tmp_path / "all", "int4-g32") / "model.safetensors")
    assert one.keys() == every.keys()
    assert all(torch.equal(one[name], every[name]) for name in one)
    if not isinstance(library.load(), str):
        assert error(loaded(SafetensorsCheckpoint(tmp_path / "stacked"), "int8", NATIVE), folder) < 0.03


def test_the_report_counts_the_bytes_of_experts(folder: Path) -> None:
    spec = spec_from_config(SafetensorsCheckpoint(folder).config)
    forms, notes = plan_forms(spec, parse_layout("int4-g32"))
    assert set(NAMES) <= forms.keys() and any("experts are rounded to nearest" in note for note in notes)
    without = {name: form for name, form in forms.items() if name not in NAMES}
    count = sum(spec.parameters()[name].numel for name in NAMES)
    assert weight_bytes(spec, without) - weight_bytes(spec, forms) == count * 2 - count // 2 - count // 32 * 2


@needs_native
def test_experts_of_gptq_files_stay_packed(folder: Path, tmp_path: Path) -> None:
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    codes: dict[str, torch.Tensor] = {}
    for name in [one for one in tensors if "_proj.weight" in one]:
        weight, module = tensors.pop(name).float(), name.removesuffix(".weight")
        grouped = weight.view(len(weight), -1, 32)
        scale = grouped.abs().amax(-1).clamp(min=1e-6) / 7
        whole = (grouped / scale[..., None]).round().clamp(-8, 7).view_as(weight).long() + 8  # [rows, columns]
        codes[module] = (whole - 8).view_as(grouped).float() * scale.half().float()[..., None]
        words = (whole.T.reshape(-1, 8, len(weight)) << (4 * torch.arange(8)[:, None])).sum(1)
        tensors[f"{module}.qweight"] = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
        tensors[f"{module}.scales"] = scale.T.contiguous().half()
        tensors[f"{module}.qzeros"] = torch.full((scale.shape[1], len(weight) // 8), 0x77777777, dtype=torch.int32)
        tensors[f"{module}.g_idx"] = (torch.arange(weight.shape[1]) // 32).int()
    config["quantization_config"] = {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False,
        "checkpoint_format": "gptq",
    }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_quantized(SafetensorsCheckpoint(tmp_path))
    weights = loaded(checkpoint, None, NATIVE)
    assert experts_of(weights, 1)[1].scheme.form == WeightForm("int4", 32)
    found = experts_of(weights, 1)[1].storages[2].matrix.take_rows(torch.arange(HIDDEN))
    wanted = codes["model.layers.1.mlp.experts.2.down_proj"].view(HIDDEN, INNER)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)
    assert choose_schemes(Layout(), {"layers.0.experts_down": (HIDDEN, INNER)}, {}, False, NATIVE).named == {}
