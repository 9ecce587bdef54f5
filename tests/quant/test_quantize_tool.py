"""`tokenmill quantize`: what it writes for each architecture, its report, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from small_models import CONFIG, MemoryCheckpoint, checkpoint, text, write
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from tokenmill.cli.app import app
from tokenmill.errors import ConfigError, ModelError
from tokenmill.model.families import spec_from_config
from tokenmill.quant.forms import parse_form, parse_layout
from tokenmill.quant.tool import write as writing
from tokenmill.quant.tool.evaluate import Judge, StoreBuilder
from tokenmill.quant.tool.layer_source import LayerSource
from tokenmill.quant.tool.quantize import Method, Quantized, plan_forms, quantize_model
from tokenmill.quant.tool.questions import last_number, solved
from tokenmill.quant.tool.report import weight_bytes
from tokenmill.quant.tool.write import quantization_config, write_model

CPU = torch.device("cpu")
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    **EXPERTS,
}
SHIFTED = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
VARIANTS = {"llama": {}, "biases": {"attention_bias": True, "mlp_bias": True}, "latent": LATENT, "shifted": SHIFTED}


class QuantizedFiles(MemoryCheckpoint):
    """Offers what a checkpoint of another tool does."""

    def stored(self, name):
        return None

    def groups(self, name):
        return None

    def notes(self):
        return []


def opened(model: MemoryCheckpoint) -> LayerSource:
    return LayerSource(spec_from_config(model.config), model)


def run(*args: object):
    return CliRunner().invoke(app, ["quantize", *map(str, args)])


@pytest.fixture
def folder(tmp_path):
    """A model with a tokenizer for texts of the words w0, w1, ... and such a text beside it."""
    path = write(checkpoint(), tmp_path / "model")
    words = {f"w{number}": number for number in range(CONFIG["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text(" ".join(f"w{number}" for number in text(1, 3000).flatten().tolist()))
    return path


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_a_model_that_nothing_was_done_to_is_written_as_it_was(tmp_path, changes):
    model = checkpoint(**changes)
    source = opened(model)
    layers = (Quantized(f"layers.{index}.", source.layer(index)) for index in range(source.spec.num_layers))
    write_model(source, {}, layers, tmp_path, torch.float32)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == model.tensors.keys()
    for name, tensor in model.tensors.items():
        assert torch.allclose(written[name], tensor, atol=1e-6), name  # norms less one went through plus one
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_what_routers_and_latents_hold_stays_floats_and_so_do_experts_that_nobody_named(tmp_path, method):
    model = checkpoint(**LATENT)
    source = opened(model)
    forms, notes = plan_forms(source.spec, parse_layout("int4-g32"))
    assert any("experts are rounded to nearest" in note for note in notes)
    forms = {name: form for name, form in forms.items() if ".experts_" not in name}
    write_model(source, forms, quantize_model(source, forms, Method(method), text(4, 32), CPU), tmp_path, torch.float32)
    written = load_file(tmp_path / "model.safetensors")
    for name, tensor in model.tensors.items():
        if ".experts." in name or "kv_b_proj" in name or name.endswith("mlp.gate.weight"):
            assert torch.equal(written[name], tensor), name
    groups = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"]
    targets = [target for group in groups.values() for target in group["targets"]]
    assert "model.layers.1.mlp.shared_experts.gate_proj" in targets  # by name: experts end in the same word
    assert "re:.*gate_proj$" not in targets and "re:.*q_a_proj$" in targets
    # Rows of latent attention come in another order here than in the file.
    packed = written["model.layers.0.self_attn.q_b_proj.weight_packed"]
    scale = written["model.layers.0.self_attn.q_b_proj.weight_scale"]
    shifts = torch.arange(8) * 4
    codes = ((packed[..., None] >> shifts) & 15).flatten(1) - 8
    rebuilt = codes * scale.repeat_interleave(32, 1)
    original = model.tensors["model.layers.0.self_attn.q_b_proj.weight"]
    assert (rebuilt - original).square().mean() < 0.1 * original.square().mean()


def test_the_text_that_calibrates_later_layers_went_through_the_quantized_ones():
    source = opened(checkpoint())
    forms, _ = plan_forms(source.spec, parse_layout("layers.1=int4-g32,layers.0=int4-g32"))
    only_last, _ = plan_forms(source.spec, parse_layout("layers.1=int4-g32"))
    both = list(quantize_model(source, forms, Method("gptq"), text(4, 32), CPU))
    last = list(quantize_model(source, only_last, Method("gptq"), text(4, 32), CPU))
    assert not last[0].groups
    assert not torch.equal(both[1].groups["qkv"].codes, last[1].groups["qkv"].codes)


def test_the_command_writes_a_model_that_can_be_read(folder, tmp_path):
    out = tmp_path / "out"
    result = run(folder, "--scheme", "int4,lm_head=int8", "--calibrate", tmp_path / "text.txt", "--samples", 8,
                 "--length", 32, "-o", out, "--dtype", "float32")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "int4, lm_head=int8 (gptq)" in result.output
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    by_group = {group["weights"]["group_size"]: group["targets"] for group in settings["config_groups"].values()}
    assert by_group[64] == [f"re:.*{name}_proj$" for name in ("q", "k", "v", "o", "gate", "up")]
    assert by_group[32] == ["re:.*down_proj$"]  # 96 columns
    assert by_group[None] == ["re:.*lm_head$"] and settings["ignore"] == []
    assert (out / "model.safetensors").stat().st_mode & 0o044


def test_a_report_has_every_figure(folder, tmp_path):
    result = run("--report", folder, "--text", tmp_path / "text.txt", "--tokens", 256, "--samples", 8, "--length", 32,
                 "--only", "g32,kv int8", "--no-speed", "--json")  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = json.loads(result.stdout)
    assert [line["name"] for line in lines] == [
        "fp32", "int4-g32 rtn", "int4-g32 rtn, clipped", "int4-g32 awq", "int4-g32 gptq", "kv int8",
    ]  # fmt: skip
    assert lines[0]["divergence"] == 0 and lines[0]["agreement"] == 1 and lines[0]["change"] == 0
    assert all(0 < line["divergence"] < 1 and line["error"] > 0 for line in lines[1:])
    assert lines[1]["divergence"] > lines[4]["divergence"] > lines[5]["divergence"]
    assert lines[0]["bytes"] == opened(checkpoint()).spec.weight_bytes(4) > 2 * lines[1]["bytes"]


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["--scheme", "int8"], ["int8"]),
        (["--scheme", "w8a8"], ["w8a8", "w8a8 smoothquant"]),
        (["--scheme", "w8a8", "--method", "smoothquant"], ["w8a8 smoothquant"]),
        (["--scheme", "int8,layers.0=bf16", "--lm-head", "int8"], ["int8, layers.0=bf16, lm_head=int8"]),
        (["--scheme", "int4-g32-zeros", "--only", "gptq"], ["int4-g32-zeros gptq"]),
    ],
)
def test_a_report_of_a_scheme_is_of_that_scheme(folder, tmp_path, args, names):
    result = run("--report", folder, "--text", tmp_path / "text.txt", "--tokens", 256, "--samples", 8, "--length", 32,
                 "--no-speed", "--json", *args)  # fmt: skip
    assert result.exit_code == 0, result.output
    baseline, *lines = json.loads(result.stdout)
    assert baseline["name"] == "fp32" and [line["name"] for line in lines] == names
    assert all(0 < line["divergence"] < 1 and line["bytes"] < baseline["bytes"] for line in lines)


@pytest.mark.parametrize(
    ("scheme", "method", "option"),
    [
        ("w8a8", "smoothquant", ["--alpha", "0.9"]),
        ("w8a8", "smoothquant", ["--static-inputs"]),
        ("int4-g32", "gptq", ["--no-act-order"]),
        ("int4-g32", "awq", ["--no-clip"]),
    ],
)
def test_a_report_is_of_what_would_be_written(folder, tmp_path, scheme, method, option):
    def divergence(*more: str) -> float:
        what = ["--scheme", scheme, "--method", method, "--tokens", 256, "--samples", 8, "--length", 32]
        result = run("--report", folder, "--text", tmp_path / "text.txt", *what, "--no-speed", "--json", *more)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)[1]["divergence"]

    assert divergence(*option) != divergence()


def test_layers_that_stay_narrow_floats_are_judged_as_such():
    source = opened(checkpoint())
    forms, _ = plan_forms(source.spec, parse_layout("layers.0=bf16,lm_head=fp16"))
    layers = list(quantize_model(source, forms, Method(), None, CPU))
    for layer, name, dtype in ((layers[0], "down", torch.bfloat16), (layers[-1], "lm_head", torch.float16)):
        kept, original = layer.params[name], source.read(layer.prefix + name)
        assert torch.equal(kept, original.to(dtype).float()) and not torch.equal(kept, original)


def test_bytes_are_those_of_the_files(tmp_path):
    source = opened(checkpoint())
    names = ("int4-g32-zeros", "int4-g32", "int8", "w8a8", "fp8", "int8,layers.0=fp32,layers.1.down=fp16")
    for number, name in enumerate(names):
        forms, _ = plan_forms(source.spec, parse_layout(name))
        method, path = Method(scale_dtype=torch.bfloat16), tmp_path / str(number)
        path.mkdir()
        write_model(source, forms, quantize_model(source, forms, method, None, CPU), path, torch.bfloat16)
        tensors = load_file(path / "model.safetensors")
        size = sum(one.numel() * one.element_size() for key, one in tensors.items() if not key.endswith("_shape"))
        assert weight_bytes(source.spec, forms) == size


def test_the_judge_measures_what_it_says():
    source, ids = opened(checkpoint()), text(3, 32)
    store = StoreBuilder(source).build()
    judge = Judge(source.spec, store, ids)
    same = judge.judge(store)
    assert same.change == 0 and same.divergence == 0 and same.agreement == 1
    # Logits that are halved have a divergence that can be written down.
    from tiny import logits_of

    logits = logits_of(source.spec, store, ids)[:, :-1]
    halved = StoreBuilder(source).build()
    halved.lm_head.storage["weight"] = halved.lm_head.storage["weight"] / 2
    found = judge.judge(halved)
    before, after = logits.log_softmax(-1), (logits / 2).log_softmax(-1)
    assert found.divergence == pytest.approx(float((before.exp() * (before - after)).sum(-1).mean()), rel=1e-4)
    loss = -after.gather(-1, ids[:, 1:, None]).mean()
    assert found.perplexity == pytest.approx(float(loss.exp()), rel=1e-4)
    assert found.agreement == 1


def test_many_tensors_become_several_files_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "SHARD_BYTES", 60_000)
    model = checkpoint()
    source = opened(model)
    layers = (Quantized(f"layers.{index}.", source.layer(index)) for index in range(source.spec.num_layers))
    write_model(source, {}, layers, tmp_path, torch.float32)
    where = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and where.keys() == model.tensors.keys()
    for name, file in where.items():
        assert torch.equal(load_file(tmp_path / file)[name], model.tensors[name])


def test_one_form_for_all_needs_no_list_of_names():
    modules = {f"model.layers.{index}.self_attn.q_proj": parse_form("int8") for index in range(40)}
    settings = quantization_config(modules, [*modules, "model.embed_tokens"])
    assert settings["config_groups"]["group_0"]["targets"] == ["re:.*q_proj$"]
    assert settings["format"] == "pack-quantized" and settings["ignore"] == ["lm_head"]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--scheme", "int4"], "name a new folder with -o"),
        (["--scheme", "int3", "-o", "new"], "int3"),
        (["--scheme", "int4", "--method", "hqq", "-o", "new"], "there are rtn, gptq, awq, smoothquant"),
        (["--scheme", "int4", "--method", "awq", "-o", "new"], "--calibrate"),
        (["--scheme", "w8a8", "--static-inputs", "-o", "new"], "--calibrate"),
        (["--scheme", "int4", "--method", "smoothquant", "--calibrate", "text.txt", "-o", "new"], "8-bit inputs"),
        (["--scheme", "int4", "--static-inputs", "--calibrate", "text.txt", "-o", "new"], "8-bit inputs"),
        (["--scheme", "int4", "--calibrate", "none.txt", "-o", "new"], "cannot be read"),
        (["--scheme", "int4", "--calibrate", "short.txt", "-o", "new"], "longer text"),
        (["--scheme", "layers.0-9=int4", "-o", "new"], "this model has 2 layers, 0 to 1"),
        (["--scheme", "int4", "-o", "model"], "not empty"),
        (["--scheme", "int4", "-o", "text.txt"], "text.txt is a file"),
        (
            ["--text", "text.txt", "-o", "new"],
            "--text is for --report, which writes no model; name a text to calibrate with as --calibrate",
        ),
        (["--json", "-o", "new"], "--json is for --report"),
        (["--no-speed", "-o", "new"], "--speed is for --report"),
        (["--report"], "--text"),
        (["--report", "--text", "text.txt", "-o", "new"], "-o is for writing a model"),
        (["--report", "--text", "text.txt", "--method", "hqq"], "there are rtn, gptq, awq, smoothquant"),
        (["--report", "--text", "text.txt", "--scheme", "int8", "--method", "gptq"], "there are fp32, int8"),
        (["--report", "--text", "text.txt", "--scheme", "int8,layers.7=int4"], "this model has 2 layers"),
        (["--report", "--text", "text.txt", "--only", "int5"], "there are fp32"),
        (["--report", "--text", "text.txt", "--gsm8k", "none.jsonl"], "none.jsonl cannot be read"),
        (["--report", "--text", "text.txt", "--gsm8k", "text.txt"], "text.txt, line 1: this is not JSON"),
        (["--report", "--text", "text.txt", "--gsm8k", "other.jsonl"], "other.jsonl, line 2: GSM8K has a question and"),
        (["--report", "--text", "text.txt", "--gsm8k", "vague.jsonl"], "no number in the answer"),
        (["--report", "--text", "text.txt", "--gsm8k", "empty.jsonl"], "empty.jsonl has no questions"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(folder, tmp_path, monkeypatch, args, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tokenmill.quant.tool.report.measure", lambda *_: pytest.fail("nothing is measured before"))
    (tmp_path / "short.txt").write_text("w1 w2 w3")
    (tmp_path / "other.jsonl").write_text('{"question": "2 + 2?", "answer": "#### 4"}\n{"a": 1}\n')
    (tmp_path / "vague.jsonl").write_text('{"question": "2 + 2?", "answer": "many"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    result = run("model", *args)
    assert result.exit_code == 2
    assert sentence in " ".join(result.output.split())
    assert not (tmp_path / "new").exists()


class Broken(RuntimeError):
    """Something that goes wrong after a while."""


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
@pytest.mark.parametrize("there", [[], ["deep"], ["deep", "deep/new"]], ids=["nothing", "its parent", "the folder"])
def test_what_fails_leaves_what_was_there_and_nothing_else(folder, tmp_path, monkeypatch, there, error):
    def breaks(files, checkpoint, target):
        assert list(target.glob("*.safetensors")), "the weights are written by now"
        raise error

    monkeypatch.setattr(writing, "write_tokenizer", breaks)
    for name in there:
        (tmp_path / name).mkdir()
    before = sorted(tmp_path.rglob("*"))
    result = run(folder, "--scheme", "int8", "-o", tmp_path / "deep" / "new")
    assert result.exit_code != 0
    assert sorted(tmp_path.rglob("*")) == before


def test_sigterm_leaves_nothing_behind(folder, tmp_path, monkeypatch):
    def ends(files, checkpoint, target):
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # else a failure ends the tests themselves
    try:
        monkeypatch.setattr(writing, "write_tokenizer", ends)
        result = run(folder, "--scheme", "int8", "-o", tmp_path / "new")
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert result.exit_code == 143 and not (tmp_path / "new").exists()


def test_what_others_put_beside_it_survives_a_failure(tmp_path):
    with pytest.raises(Broken), writing.new_folder(tmp_path / "deep" / "new") as target:
        (target / "model.safetensors").write_text("half of it")
        (tmp_path / "deep" / "notes.txt").write_text("mine")
        raise Broken
    assert [one.name for one in tmp_path.rglob("*")] == ["deep", "notes.txt"]


def test_what_a_killed_run_left_is_named(tmp_path):
    (tmp_path / "new" / writing.UNFINISHED).mkdir(parents=True)
    with pytest.raises(ConfigError, match="unfinished model"), writing.new_folder(tmp_path / "new"):
        pass
    assert (tmp_path / "new" / writing.UNFINISHED).is_dir()


def test_an_empty_folder_and_a_link_to_one_are_filled(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with writing.new_folder(tmp_path / "link") as target:
        for name in ("config.json", "model.safetensors"):
            (target / name).write_text(name)
        assert not (tmp_path / "real" / "config.json").exists(), "no model before it is whole"
    assert sorted(one.name for one in (tmp_path / "real").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("scheme", ["int4", "int4-g128"])
def test_smaller_groups_than_were_wished_for_are_told(folder, tmp_path, scheme):
    told = "2 matrices of 96 columns become int4-g32: that is no multiple of the group of int4-g128"
    assert told in run(folder, "--scheme", scheme, "-o", tmp_path / "new").stderr
    words = ["--tokens", 256, "--samples", 8, "--length", 32, "--only", "clipped", "--no-speed"]
    result = run("--report", folder, "--scheme", scheme, "--text", tmp_path / "text.txt", *words)
    assert result.stderr.count(told) == 1


def test_few_tokens_are_blamed_on_the_text_only_where_it_is_short(folder, tmp_path):
    words = [folder, "--calibrate", tmp_path / "text.txt", "--length", 200]
    assert "you asked for 400 tokens only" in run(*words, "--samples", 2, "-o", tmp_path / "few").stderr
    assert "tokens only" not in run(*words, "-o", tmp_path / "many").stderr
    (tmp_path / "text.txt").write_text(" ".join(["w1"] * 500))
    assert "text.txt has enough for 400 tokens only" in run(*words, "-o", tmp_path / "short").stderr


def test_a_log_is_told_how_far_it_is(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("tokenmill.cli.quantize.EVERY", 0.0)
    result = run(folder, "--scheme", "int8", "-o", tmp_path / "new")
    assert "(quantizing with rtn, layers done: 1 of 2)" in result.stderr
    assert "(quantizing with rtn, layers done: 2 of 2)" in result.stderr
    monkeypatch.setattr("tokenmill.cli.quantize.EVERY", 60.0)
    assert "layers done" not in run(folder, "--scheme", "int8", "-o", tmp_path / "quick").stderr


def test_a_head_that_is_the_embedding_and_a_quantized_model_are_refused():
    tied = opened(checkpoint(tie_word_embeddings=True))
    with pytest.raises(ConfigError, match="its embedding"):
        plan_forms(tied.spec, parse_layout("int4,lm_head=int8"))
    with pytest.raises(ModelError, match="already"):
        opened(checkpoint(quantization_config={"quant_method": "gptq"}))
    with pytest.raises(ModelError, match="already"):  # some files have their settings elsewhere
        opened(QuantizedFiles(CONFIG, checkpoint().tensors))
    with pytest.raises(ConfigError, match="multiple of 32"):
        plan_forms(opened(checkpoint(hidden_size=40)).spec, parse_layout("int4"))


def test_questions_are_asked_of_models_with_few_positions(monkeypatch):
    asked = {}

    class Stub:
        def __init__(self, model, **options):
            asked.update(options)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def chat(self, chats, params, use_tqdm):
            return [SimpleNamespace(outputs=[SimpleNamespace(text="it is 4")]) for _ in chats]

    monkeypatch.setattr("tokenmill.LLM", Stub)
    questions = [{"question": "2 + 2?", "answer": "#### 4"}, {"question": "2 + 3?", "answer": "#### 5"}]
    assert solved("model", opened(checkpoint()).spec, questions, quantization="fp32") == 1
    assert asked == {"max_model_len": CONFIG["max_position_embeddings"], "quantization": "fp32"}


def test_the_answer_to_a_question_is_its_last_number():
    assert last_number("3 apples and 4 make 7.\nThe answer is 1,234.50.") == 1234.5
    assert last_number("#### -18") == -18
    assert last_number("none") is None
