"""Layers in pinned host memory are copied to the GPU in time: the tokens are those of resident weights."""

import pytest
import torch
from tiny import write_tiny

from tokenmill import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]
SIZES = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def answers(llm):
    prompts = [{"prompt_token_ids": [3 + (7 * at + one) % 60 for at in range(9 + 40 * one)]} for one in range(4)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params)]


@pytest.mark.parametrize("quantization", [None, "int8", "int4-g32"])
def test_tokens_are_those_of_resident_weights(quantization, tmp_path):
    model = write_tiny(tmp_path / "model", **SIZES)
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 4, "max_model_len": 256}
    settings |= {"quantization": quantization, "kv_cache_memory": 1 << 24, "cuda_graphs": False}
    with LLM(model, **settings) as resident:
        expected = answers(resident)
    for wanted in (1, 1 << 40):
        with LLM(model, **settings, weights_offload=wanted) as llm:
            assert answers(llm) == expected
            assert llm._built.engine.feed.stats().layers > 24


@pytest.mark.parametrize("cache", ["lru", "predict"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_tokens_are_those_of_resident_experts(quantization, cache, tmp_path):
    mixture = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8}
    model = write_tiny(tmp_path / "model", **SIZES, **mixture, num_experts_per_tok=2)
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 4, "max_model_len": 256}
    settings |= {"quantization": quantization, "kv_cache_memory": 1 << 24, "cuda_graphs": False}
    with LLM(model, **settings) as resident:
        expected = answers(resident)
    with LLM(model, **settings, weights_offload=1, expert_cache=cache) as llm:
        slots, each = 2, sum(llm._built.settings.memory.cached.each)
        assert answers(llm) == expected
    with LLM(model, **settings, weights_offload=(8 - slots) * each, expert_cache=cache) as llm:
        assert answers(llm) == expected
        found = llm._built.engine.feed.stats().experts
        assert found.slots == slots and found.hits > 0 and found.misses > 0
        assert (found.foreseen > 0) == (cache == "predict")


def test_copies_run_beside_the_computation():
    """A copy of pinned memory on the feed's stream does not wait for what is computed meanwhile."""
    from tokenmill.offload.copy_feed import CudaStreams

    streams, place = CudaStreams(torch.device("cuda")), torch.device("cuda")
    source, into = streams.host_memory(1 << 28), torch.empty(1 << 28, dtype=torch.uint8, device=place)
    square = torch.ones(8192, 8192, dtype=torch.bfloat16, device=place)
    assert source.is_pinned()

    def seconds(copy, compute):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        done = streams.copy(into, source, streams.computed()) if copy else None
        for _ in range(8 if compute else 0):
            torch.mm(square, square)
        if done is not None:
            streams.compute_after(done)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    seconds(True, True)
    copy, compute, both = seconds(True, False), seconds(False, True), seconds(True, True)
    assert both < copy + 0.7 * compute
