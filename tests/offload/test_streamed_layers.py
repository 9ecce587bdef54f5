"""Layers that are away are brought in time: the tokens are those of a model that is all there, or a step fails."""

import gc
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
from tiny import TINY, write_tiny

from tokenmill import LLM, SamplingParams
from tokenmill.engine import checkpoints
from tokenmill.errors import ConfigError, ModelError, StepFailed
from tokenmill.offload.layer_file import LayerFile
from tokenmill.offload.streamed import StreamedWeights
from tokenmill.serve.engine.introspection import stats_of

sys.path.append(str(Path(__file__).parents[1] / "weights"))
from gguf_files import tiny_model as tiny_gguf

LAYERS = 6
SIZES = {"num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
MIXTRAL = TINY | SIZES | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
SUBJECTS = {
    "floats, recorded": {},
    "packed int8, recorded": {"quantization": "int8"},
    "packed, a form per layer, recorded": {"quantization": "int4-g32,layers.1=int8,layers.3.o=int8"},
    "floats, op by op": {"cuda_graphs": False},
    "bfloat16": {"dtype": "bfloat16"},
    "float64": {"dtype": "float64"},
    "int4 in torch": {"dtype": "float64", "quantization": "int4-g32-zeros"},
    "w8a8 in torch": {"dtype": "float64", "quantization": "w8a8"},
    "batch-invariant": {"batch_invariant": True},
    "drafts of the first layers": {"quantization": "int8", "speculation": "layers:2"},
    "drafts": {"quantization": "int8", "speculation": "suffix"},
    "a mixture": {"model": "mixtral", "expert_cache": "off"},
    "a mixture in float64": {"model": "mixtral", "expert_cache": "off", "dtype": "float64"},
    "a mixture in int8": {"model": "mixtral", "expert_cache": "off", "quantization": "int8"},
    "a mixture in codes, in torch": {
        "model": "mixtral",
        "expert_cache": "off",
        "quantization": "int8",
        "dtype": "float64",
    },
    "GGUF, recorded": {"model": "gguf"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    gguf = tiny_gguf(folder / "tiny.gguf", layers=LAYERS)
    return {
        "llama": write_tiny(folder / "llama", **SIZES),
        "mixtral": write_tiny(folder / "mixtral", **MIXTRAL),
        "gguf": str(gguf),
    }


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where layers are prepared; the library is where it always is."""
    monkeypatch.setattr(checkpoints, "layers_dir", lambda chosen: tmp_path / "layers")
    return tmp_path / "layers"


def open_llm(models, model="llama", **options):
    settings = {"skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 4, "max_model_len": 96, "block_size": 16}
    source = {"load_format": "dummy"} if model != "gguf" else {}
    return LLM(models[model], **source | settings | {"kv_cache_memory": 1 << 20, "speculation": "off"} | options)


def answers(llm, output=12):
    prompts = [
        {"prompt_token_ids": [3 + (7 * at + number) % 60 for at in range(9 + 8 * number)]} for number in range(4)
    ]
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, logprobs=1)
    outputs = [(one.outputs[0], one.error) for one in llm.generate(prompts, params)]
    return [(list(one.token_ids), one.cumulative_logprob, error) for one, error in outputs]


def feed_of(llm):
    return llm._built.engine.feed


@pytest.mark.parametrize("subject", SUBJECTS)
def test_tokens_are_those_of_resident_weights(subject, models):
    resident = open_llm(models, **SUBJECTS[subject])
    expected = answers(resident)
    resident.shutdown()
    for wanted, away in ((1, 4), (1 << 40, LAYERS)):
        llm = open_llm(models, **SUBJECTS[subject], weights_offload=wanted)
        assert answers(llm) == expected
        found, settings = feed_of(llm).stats(), llm._built.settings
        assert len(settings.memory.streamed.layers) == away
        assert found.layers >= 12 * away - 2 and found.nbytes > 0  # each step of an answer brings every one
        if "recorded" in subject:
            assert llm._built.engine.runner._recorded._graph is not None
        llm.shutdown()


def test_what_does_not_fit_is_streamed_unless_that_is_forbidden(models):
    whole = open_llm(models, "llama").plan_lines()
    assert not any("streaming" in line for line in whole)
    needed = open_llm(models, "llama")._built.settings.memory
    less = needed.total - 60_000  # about a layer
    llm = open_llm(models, "llama", max_memory=less)
    memory = llm._built.settings.memory
    assert memory.total <= less and memory.streamed.layers
    assert any("weights_offload = " in line and "the rest fits" in line for line in llm.plan_lines())
    assert any("streaming" in line and "in every step" in line for line in llm.plan_lines())
    with pytest.raises(ConfigError, match="leave weights_offload out, so that layers are streamed"):
        open_llm(models, "llama", max_memory=less, weights_offload=0)
    with pytest.raises(ConfigError, match="the model does not fit"):  # however many are away
        open_llm(models, "llama", max_memory=needed.total - needed.weights)


def test_few_layers_and_ranks_cannot_be_streamed(tmp_path):
    short = {"short": write_tiny(tmp_path / "short", num_hidden_layers=3)}
    with pytest.raises(ConfigError, match="a model of 3 layers has too few to stream"):
        open_llm(short, "short", weights_offload=1000)


def test_a_second_start_reads_what_the_first_has_prepared(models, folder, monkeypatch):
    first = open_llm(models, weights_offload=1)
    expected = answers(first)
    first.shutdown()
    monkeypatch.setattr("tokenmill.offload.load.prepare", None)
    again = open_llm(models, weights_offload=1 << 40)
    assert answers(again) == expected
    again.shutdown()
    assert len(list(folder.iterdir())) == 1
    with pytest.raises(TypeError):  # another seed makes another model
        open_llm(models, weights_offload=1, seed=7)


def test_layers_that_come_late_are_waited_for(models, monkeypatch):
    llm = open_llm(models, weights_offload=1 << 40)
    expected, before = answers(llm), feed_of(llm).stats()
    read = LayerFile.read

    def slow(self, layer, piece, into):
        into.fill_(255)  # who does not wait computes with this
        time.sleep(0.002)
        return read(self, layer, piece, into)

    monkeypatch.setattr(LayerFile, "read", slow)
    llm._built.engine.reset_prefix_cache()
    assert answers(llm) == expected
    assert llm._built.engine.runner._recorded._graph is not None  # it was such steps that waited
    after = feed_of(llm).stats()
    assert after.stalls > before.stalls and after.stall_seconds > before.stall_seconds
    told = stats_of(llm._built.engine).streamed
    assert told.layers == after.layers and told.overlap_seconds <= after.moving_seconds
    llm.shutdown()


@pytest.mark.parametrize("graphs", [True, False])
def test_one_bad_read_costs_a_step_and_no_token(graphs, models, monkeypatch):
    llm = open_llm(models, weights_offload=1 << 40, cuda_graphs=graphs, prompt_graphs=False)
    expected, read, left = answers(llm), LayerFile.read, [1]

    def sometimes(self, layer, piece, into):
        if left[0] and layer == 3:
            left[0] -= 1
            into.fill_(255)
            raise StepFailed("the disk has a bad day")
        return read(self, layer, piece, into)

    monkeypatch.setattr(LayerFile, "read", sometimes)
    llm._built.engine.reset_prefix_cache()
    assert answers(llm) == expected
    assert stats_of(llm._built.engine).failed_steps == 1 and not left[0]
    llm.shutdown()


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_file_ends_requests_with_its_name_and_never_answers(damage, graphs, models, folder, monkeypatch):
    llm = open_llm(models, weights_offload=1 << 40, cuda_graphs=graphs)
    expected = answers(llm)
    path = next(folder.glob("*/layers.bin"))
    whole, preadv = path.read_bytes(), os.preadv
    what = {"flipped": "changed", "cut": "cut short", "gone": "cannot be read"}[damage]
    if damage == "flipped":
        at = feed_of(llm)._worker._file.entries[4].at + 100
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([whole[at] ^ 1]))
    elif damage == "cut":
        os.truncate(path, len(whole) // 2)
    else:

        def fail(*_):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr("tokenmill.offload.layer_file.os.preadv", fail)
    llm._built.engine.reset_prefix_cache()
    found = answers(llm)
    assert any(one != other for one, other in zip(found, expected, strict=True))
    for (tokens, _, error), (right, _, _) in zip(found, expected, strict=True):
        assert tokens == right[: len(tokens)]  # what was said before the file was damaged
        assert what in error and "layer" in error
    monkeypatch.setattr(os, "preadv", preadv)
    path.write_bytes(whole)  # the same file, as it was
    assert answers(llm) == expected
    llm.shutdown()


def test_what_is_prepared_is_refused_where_it_cannot_be_read(models, folder):
    open_llm(models, weights_offload=1).shutdown()
    index = next(folder.glob("*/index.json"))
    text = index.read_text()
    index.write_text(text[:100])
    with pytest.raises(ModelError, match="remove the folder, and it is made again"):
        open_llm(models, weights_offload=1)
    index.write_text(text.replace('"version": 1', '"version": 0'))
    with pytest.raises(ModelError, match="another release"):
        open_llm(models, weights_offload=1)


def test_a_full_disk_is_told_of_and_leaves_nothing(models, folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tokenmill.offload.layer_file.os.fsync", full)
    with pytest.raises(ModelError, match="there is no room for a model's layers"):
        open_llm(models, weights_offload=1)
    assert not list(folder.iterdir())
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ModelError, match="has 1,000; make room there"):
        open_llm(models, weights_offload=1)


def test_nothing_is_left_running(models):
    before = set(threading.enumerate())
    llm = open_llm(models, weights_offload=1)
    assert isinstance(llm._built.engine.runner.decoder.weights, StreamedWeights)
    llm.shutdown()
    del llm
    dropped = open_llm(models, weights_offload=1)
    answers(dropped)
    del dropped
    gc.collect()
    assert set(threading.enumerate()) <= before


def test_metrics_tell_of_streams_where_there_are_any():
    pytest.importorskip("prometheus_client")
    from tokenmill.serve.engine.wire import StreamedReport
    from tokenmill.serve.observe.metrics import _streamed

    found = {
        sample.name: sample.value for one in _streamed(StreamedReport(7, 6, 5, 4.0, 3.0)) for sample in one.samples
    }
    assert found["tokenmill_streamed_bytes_total"] == 7 and found["tokenmill_streamed_overlap_seconds_total"] == 3
    assert list(_streamed(None)) == []
