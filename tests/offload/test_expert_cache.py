"""Experts that are away are brought in time: the tokens are those of a mixture that is all there, or a step fails."""

import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tiny import TINY, write_tiny

from tokenmill import LLM, SamplingParams
from tokenmill.engine import checkpoints
from tokenmill.errors import ConfigError, ModelError, StepFailed
from tokenmill.offload import disk_experts
from tokenmill.offload.layer_file import LayerFile
from tokenmill.offload.streamed import CachedExpertWeights, StreamedWeights
from tokenmill.serve.engine.introspection import stats_of

LAYERS, EXPERTS = 6, 8
SIZES = {"num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
MIXTRAL = TINY | SIZES | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
}  # fmt: skip
DEEPSEEK = TINY | SIZES | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "kv_lora_rank": 16, "q_lora_rank": None,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": EXPERTS, "n_shared_experts": 1,
    "num_experts_per_tok": 3, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.0,
    "norm_topk_prob": False, "num_key_value_heads": 4, "scoring_func": "softmax",
}  # fmt: skip
SUBJECTS = {
    "floats, recorded": {},
    "packed int8, recorded": {"quantization": "int8"},
    "packed, a form per layer, recorded": {"quantization": "int4-g32,layers.1=int8,layers.3=int8"},
    "floats, op by op": {"cuda_graphs": False},
    "bfloat16": {"dtype": "bfloat16"},
    "float64": {"dtype": "float64"},
    "codes in torch": {"dtype": "float64", "quantization": "int8"},
    "batch-invariant": {"batch_invariant": True},
    "drafts of the first layers": {"quantization": "int8", "speculation": "layers:2"},
    "groups, shared experts, a dense layer, recorded": {"model": "deepseek"},
    "a limit per expert": {"expert_capacity": 2.0},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "mixtral": write_tiny(folder / "mixtral", **MIXTRAL),
        "deepseek": write_tiny(folder / "deepseek", **DEEPSEEK),
        "dense": write_tiny(folder / "dense", **SIZES),
    }


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where experts are prepared; the library is where it always is."""
    monkeypatch.setattr(checkpoints, "layers_dir", lambda chosen: tmp_path / "layers")
    return tmp_path / "layers"


def open_llm(models, model="mixtral", **options):
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 4}
    settings |= {"max_model_len": 96, "block_size": 16, "kv_cache_memory": 1 << 20, "speculation": "off"}
    return LLM(models[model], **settings | options)


def bytes_of_one(models, **options):
    """Of every layer."""
    with open_llm(models, **options, weights_offload=1) as probe:
        return sum(probe._built.settings.memory.cached.each)


def with_slots(models, slots, each=None, **options):
    """As many as that: the bytes that are to be away say how many."""
    each = bytes_of_one(models, **options) if each is None else each
    llm = open_llm(models, **options, weights_offload=(EXPERTS - slots) * each)
    assert llm._built.settings.memory.cached.slots == slots
    return llm


def answers(llm, output=12):
    prompts = [
        {"prompt_token_ids": [3 + (7 * at + number) % 60 for at in range(3 + 10 * number)]} for number in range(4)
    ]
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, logprobs=1)
    outputs = [(one.outputs[0], one.error) for one in llm.generate(prompts, params)]
    return [(list(one.token_ids), one.cumulative_logprob, error) for one, error in outputs]


def feed_of(llm):
    return llm._built.engine.feed


@pytest.mark.parametrize("subject", SUBJECTS)
def test_tokens_are_those_of_resident_experts(subject, models):
    options = SUBJECTS[subject]
    with open_llm(models, **options) as resident:
        expected = answers(resident)
    each = bytes_of_one(models, **options)
    for slots, cache in ((1, "lru"), (3, "predict"), (4, "lru")):
        with with_slots(models, slots, each, expert_cache=cache, **options) as llm:
            for _ in range(2):  # the second time by what the first has recorded
                assert answers(llm) == expected
                llm._built.engine.reset_prefix_cache()
            found, sizes = feed_of(llm).stats(), feed_of(llm).slots
            assert found.nbytes > 0 and found.experts.misses > 0 and found.experts.hits > 0
            assert cache == "predict" or not found.experts.foreseen  # (who looks ahead may always be late)
            sizes.check_integrity()
            if "recorded" in subject:
                assert llm._built.engine.runner._recorded._graph is not None


def test_one_token_reads_only_what_it_lacks(models):
    """A lone token of every step chooses two of eight experts in each layer."""
    with with_slots(models, 4, quantization="int8", expert_cache="lru") as llm:
        answers(llm)
        before, engine = feed_of(llm).stats(), llm._built.engine
        steps, size = engine.scheduler.stats.steps, feed_of(llm).file.entries[0].image.nbytes
        prompt = {"prompt_token_ids": [5]}
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        after = feed_of(llm).stats()
        chosen = 2 * LAYERS * (engine.scheduler.stats.steps - steps)
        read = (after.nbytes - before.nbytes) // size
        assert after.experts.hits - before.experts.hits + after.experts.misses - before.experts.misses == chosen
        assert read == after.experts.misses - before.experts.misses < chosen


def test_what_does_not_fit_is_cached_unless_that_is_forbidden(models):
    with open_llm(models) as llm:
        assert not any(line.startswith("experts") for line in llm.plan_lines())
        needed = llm._built.settings.memory
    less = needed.total - 300_000
    with open_llm(models, max_memory=less) as llm:
        memory = llm._built.settings.memory
        assert memory.total <= less and memory.cached.slots and not memory.streamed.layers
        assert isinstance(llm._built.engine.runner.decoder.weights, CachedExpertWeights)
        assert any(line.startswith("experts ") and "would wait for" in line for line in llm.plan_lines())
        assert any("weights_offload = " in line and "experts of every layer stay" in line for line in llm.plan_lines())
    with open_llm(models, max_memory=less, expert_cache="off") as llm:
        assert isinstance(llm._built.engine.runner.decoder.weights, StreamedWeights)
    with pytest.raises(ConfigError, match="leave weights_offload out, so that experts are cached"):
        open_llm(models, max_memory=less, weights_offload=0)
    with open_llm(models, weights_offload=1 << 40) as llm:  # more than experts are: layers with all that is in them
        assert len(llm._built.settings.memory.streamed.layers) == LAYERS
    with pytest.raises(ConfigError, match="has no experts; leave it out"):
        open_llm(models, "dense", expert_cache="lru")


def test_a_second_start_reads_what_the_first_has_prepared(models, folder, monkeypatch):
    with open_llm(models, weights_offload=1) as first:
        expected = answers(first)
    monkeypatch.setattr("tokenmill.offload.load.prepare", None)
    with with_slots(models, 1) as again:
        assert answers(again) == expected
    assert len(list(folder.iterdir())) == 1
    (path,) = folder.glob("*/index.json")
    path.write_text(path.read_text().replace('"version": 1', '"version": 0'))
    with pytest.raises(ModelError, match="another release"):
        open_llm(models, weights_offload=1)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("cache", ["lru", "predict"])
def test_experts_that_come_late_are_waited_for(cache, graphs, models, monkeypatch):
    with with_slots(models, 3, expert_cache=cache, cuda_graphs=graphs) as llm:
        expected, before, read = answers(llm), feed_of(llm).stats(), LayerFile.read

        def slow(self, entry, piece, into):
            into.fill_(255)  # who does not wait computes with this
            time.sleep(0.002)
            return read(self, entry, piece, into)

        monkeypatch.setattr(LayerFile, "read", slow)
        llm._built.engine.reset_prefix_cache()
        assert answers(llm) == expected
        after = feed_of(llm).stats()
        assert after.stalls > before.stalls and after.stall_seconds > before.stall_seconds
        told = stats_of(llm._built.engine).streamed
        assert (told.experts.slots, told.experts.of) == (3, EXPERTS)
        assert (told.experts.hits, told.experts.misses) == (after.experts.hits, after.experts.misses)


@pytest.mark.parametrize("graphs", [True, False])
def test_one_bad_read_costs_a_step_and_no_token(graphs, models, monkeypatch):
    with with_slots(models, 3, expert_cache="lru", cuda_graphs=graphs, prompt_graphs=False) as llm:
        expected, read, left, lock = answers(llm), LayerFile.read, [1], threading.Lock()

        def sometimes(self, entry, piece, into):
            with lock:
                fails, left[0] = left[0], 0
            if fails:
                into.fill_(255)
                raise StepFailed("the disk has a bad day")
            return read(self, entry, piece, into)

        monkeypatch.setattr(LayerFile, "read", sometimes)
        llm._built.engine.reset_prefix_cache()
        assert answers(llm) == expected
        # What failed may have been on its way ahead of time, and is read once more when it is asked for.
        assert stats_of(llm._built.engine).failed_steps <= 1 and not left[0]
        feed_of(llm).slots.check_integrity()


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("queued", [True, False])
def test_a_task_that_cannot_be_handed_over_costs_a_step_and_no_token(queued, graphs, models, monkeypatch):
    with with_slots(models, 3, expert_cache="lru", cuda_graphs=graphs, prompt_graphs=False) as llm:
        expected, submit, left = answers(llm), ThreadPoolExecutor.submit, [1]

        def fail_once(self, function, /, *args):
            if left[0] and self._thread_name_prefix == "expert-reader":
                left[0] = 0
                if queued:  # as when a thread cannot be started: what was handed over is done all the same
                    submit(self, function, *args)
                raise RuntimeError("can't start new thread")
            return submit(self, function, *args)

        monkeypatch.setattr(ThreadPoolExecutor, "submit", fail_once)
        llm._built.engine.reset_prefix_cache()
        assert answers(llm) == expected
        assert stats_of(llm._built.engine).failed_steps <= 1 and not left[0]
        feed_of(llm).slots.check_integrity()


@pytest.mark.parametrize("graphs", [True, False])
def test_errors_while_looking_ahead_cost_nothing(graphs, models, monkeypatch):
    with with_slots(models, 3, expert_cache="predict", cuda_graphs=graphs) as llm:
        expected, failed = answers(llm), []

        def fail(self, call):
            failed.append(call)
            raise RuntimeError("out of luck")

        monkeypatch.setattr(disk_experts._Worker, "_still", fail)
        llm._built.engine.reset_prefix_cache()
        assert answers(llm) == expected
        assert failed and not stats_of(llm._built.engine).failed_steps
        with feed_of(llm)._worker.changed:
            feed_of(llm).slots.check_integrity()
            assert not feed_of(llm).slots._taken.any()


def test_experts_that_have_a_slot_are_copied_to_the_buffer_and_not_read(models, monkeypatch):
    """Stacked matrices: a step that chooses more experts than have a slot takes all of them from the buffer."""
    read, bring, copied = [], disk_experts._Worker._bring, disk_experts._Worker._copied

    def seen(self, job, piece):
        if job.slot is None:
            read.append(int(self._slots.slot[job.number, job.expert]))
        return bring(self, job, piece)

    def counted(self, number, expert):
        copies.append(copied(self, number, expert))
        return copies[-1]

    copies = []
    monkeypatch.setattr(disk_experts._Worker, "_bring", seen)
    monkeypatch.setattr(disk_experts._Worker, "_copied", counted)
    with with_slots(models, 3, dtype="float64", expert_cache="lru") as llm:
        answers(llm)
    assert read and set(read) == {-1} and any(copies)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("graphs", [True, False])
def test_nobody_waits_for_a_thread_that_has_ended(graphs, models, monkeypatch):
    with with_slots(models, 1, cuda_graphs=graphs) as llm:
        answers(llm)

        def end(self, readers):
            raise SystemExit

        monkeypatch.setattr(disk_experts._Worker, "_hear", end)
        for _ in range(2):
            llm._built.engine.reset_prefix_cache()
            assert any(error and "experts cannot be read any more" in error for _, _, error in answers(llm))


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_file_ends_requests_with_its_name_and_never_answers(damage, graphs, models, folder, monkeypatch):
    with with_slots(models, 1, cuda_graphs=graphs) as llm:
        expected = answers(llm)
        path = next(folder.glob("*/layers.bin"))
        whole, preadv = path.read_bytes(), os.preadv
        what = {"flipped": "changed", "cut": "cut short", "gone": "cannot be read"}[damage]
        if damage == "flipped":
            with path.open("r+b") as file:
                for entry in feed_of(llm).file.entries[2 * EXPERTS :]:
                    file.seek(entry.at + 100)
                    file.write(bytes([whole[entry.at + 100] ^ 1]))
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
            assert what in error and "expert" in error and "of layer" in error
        monkeypatch.setattr(os, "preadv", preadv)
        path.write_bytes(whole)  # the same file, as it was
        assert answers(llm) == expected


def test_nothing_is_left_running(models):
    before = set(threading.enumerate())
    llm = open_llm(models, weights_offload=1)
    llm.shutdown()
    del llm
    dropped = open_llm(models, weights_offload=1)
    answers(dropped)
    del dropped
    gc.collect()
    assert set(threading.enumerate()) <= before


def test_metrics_tell_of_experts_where_some_are_away():
    pytest.importorskip("prometheus_client")
    from tokenmill.serve.engine.wire import CachedReport, StreamedReport
    from tokenmill.serve.observe.metrics import _streamed

    report = StreamedReport(7, 0, 5, 4.0, 3.0, CachedReport(3, 8, 20, 4, 2, 1))
    found = {sample.name: sample.value for one in _streamed(report) for sample in one.samples}
    assert found["tokenmill_expert_slots"] == 3 and found["tokenmill_layer_experts"] == 8
    assert found["tokenmill_expert_hits_total"] == 20 and found["tokenmill_expert_wasted_total"] == 1
