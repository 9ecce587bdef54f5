"""Run as a program: kernels that random steps of a model would launch and that its warm-up does not know, as JSON.

Triton must not be in its interpreter, so this is a process of its own.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch
from no_gpu import hopper, runner_of

from tokenmill.engine.runner.recordings import Kind
from tokenmill.engine.runner.warmup import kernels_of
from tokenmill.engine.step import SharedPrefix, Step
from tokenmill.ops.triton.specializations import collect
from tokenmill.plan.solve.memory import ModelBytes
from tokenmill.sampling.sampler import Sampler
from tokenmill.sampling.settings import Traits

ROWS, TOKENS, LENGTH = 72, 2048, 2048
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 4096,
    "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 102400,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False,
    "hidden_act": "silu", "dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip
DRAFT = LLAMA | {
    "hidden_size": 896, "intermediate_size": 2432, "num_hidden_layers": 2, "num_attention_heads": 14,
    "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"config": LLAMA, "head": True},
    "llama fp8": {"config": LLAMA, "quantization": "fp8", "draft": DRAFT},
    "llama int4": {"config": LLAMA, "quantization": "int4", "kv": "int8", "head": True},
    "qwen3 moe": {"config": QWEN3_MOE, "eagle": True},
    "qwen3 moe int4": {"config": QWEN3_MOE, "quantization": "int4,layers.1=w8a8,layers.2=fp8"},
    "gemma2": {
        "config": LLAMA | {
            "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 512, "query_pre_attn_scalar": 128, "attn_logit_softcapping": 50.0, "head_dim": 256,
            "num_attention_heads": 8, "tie_word_embeddings": True,
        }
    },
}  # fmt: skip


def random_step(dice: random.Random) -> Step:
    """Some decodes, some prompts or parts of them, as a scheduler might put them together."""
    decodes = dice.choice([0, 0, 1, 2, dice.randrange(ROWS - 1)])
    work, budget = [(dice.randrange(1, LENGTH - 1), 1) for _ in range(decodes)], TOKENS - decodes
    for _ in range(dice.choice([1, 1, 2, 3, ROWS - decodes])):
        most = min(budget, LENGTH - 1)
        if most < 1 or len(work) == ROWS:
            break
        count = min(most, dice.choice([1, 2, 3, dice.randrange(1, 64), dice.randrange(1, 600), most]))
        start = dice.choice([0, 0, 16 * dice.randrange(0, 1 + (LENGTH - 1 - count) // 16)])
        work.append((start, count))
        budget -= count
    shared = None
    if decodes >= 4 and dice.random() < 0.5:
        members = sorted(dice.sample(range(decodes), dice.randrange(4, decodes + 1)))
        shared = SharedPrefix(16 * dice.randrange(16, 64), tuple(members))
    return Step(
        number=1,
        rows=dice.sample(range(ROWS), len(work)),
        starts=[start for start, _ in work],
        counts=[count for _, count in work],
        samples=[1] * len(work),
        num_singles=decodes,
        shared=shared,
    )


def random_reading(dice: random.Random) -> Step:
    """What a draft model has not read of some rows, be it much or little."""
    work, budget = [], TOKENS
    for _ in range(dice.choice([1, 2, ROWS])):
        count = min(budget, LENGTH - 1, dice.choice([1, 2, 3, 5, dice.randrange(1, 64), dice.randrange(1, LENGTH)]))
        if count:
            work.append((dice.randrange(LENGTH - count), count))
            budget -= count
    starts, counts = (list(column) for column in zip(*work, strict=True))
    return Step(1, list(range(len(work))), starts, counts, [0] * len(work))


def with_draft_model(runner: Any, config: dict[str, Any]) -> None:
    from tokenmill.engine.speculation.device_draft_model import DeviceDraftModel
    from tokenmill.engine.speculation.draft_model import DraftModel

    model = runner_of(config, max_rows=ROWS, max_tokens=TOKENS, max_len=LENGTH)
    spec, weights = model.decoder.spec, model.decoder.weights
    draft = DraftModel(spec, weights, weights.dtype, weights.dtype, ModelBytes(0, 0, 0, 0, 0), None)
    beside = draft.runner_beside(runner, graphs=False)
    runner.draft_with(DeviceDraftModel(beside, runner.state, len(runner.state.tokens)), runner=beside)


def with_head(runner: Any) -> None:
    """Have a head draft that attends to what a layer has cached."""
    from tokenmill.engine.speculation.head import DeviceHead
    from tokenmill.engine.speculation.head_runner import HeadRunner
    from tokenmill.model.draft_head import DraftHead, Target, default_kv_layer

    spec, vocab, inner = runner.decoder.spec, 4096, 1024
    wide, queries = spec.hidden, spec.heads * spec.head_dim

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=runner.device)

    head = DraftHead(
        empty(wide), empty(wide, wide), empty(2 * wide), empty(2 * inner, 2 * wide), empty(wide, inner), empty(wide),
        empty(2 * inner, wide), empty(wide, inner), empty(wide), empty(vocab, wide), torch.arange(vocab),
        Target(spec.architecture, wide, spec.vocab_size, spec.num_layers, ""), kv_layer=default_kv_layer(spec),
        attention_norm=empty(wide), q_weight=empty(queries, wide), o_weight=empty(wide, queries),
    )  # fmt: skip
    ready = HeadRunner(head, runner.decoder, runner.sampler, False, runner.state.kv)
    drafter = DeviceHead(ready, runner.state, len(runner.state.tokens))
    runner.draft_with(drafter, drafter)
    assert "[2048, 2048]" in runner.drafter


def drafting_with_eagle(runner: Any) -> None:
    """Have an EAGLE-3 head draft, with more heads than the model has, and smaller ones."""
    from tokenmill.engine.speculation.device_eagle import DeviceEagle
    from tokenmill.model.eagle import EagleHead
    from tokenmill.model.families import spec_from_config

    shape = LLAMA | {"num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
    spec, vocab = spec_from_config(shape), 4096
    shapes = {f"layers.0.{name}": one.shape for name, one in spec.layer_parameters(0).items()}
    shapes |= {"layers.0.qkv": (spec.qkv_size, 2 * spec.hidden), "fc": (spec.hidden, 3 * spec.hidden)}
    shapes |= {"hidden_norm": (spec.hidden,), "final_norm": (spec.hidden,), "lm_head": (vocab, spec.hidden)}
    tensors = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    head = DeviceEagle(EagleHead(spec, (0, 1, 2), tensors, torch.arange(vocab)), runner, len(runner.state.tokens))
    runner.draft_with(head)
    runner.read_with(head)
    assert "EAGLE" in runner.drafter


def missing(name: str, steps: int) -> list[str]:
    """What `steps` random steps need beyond the warm-up, without repetition."""
    dice = random.Random(7)
    with hopper():
        options = {key: value for key, value in MODELS[name].items() if key not in ("head", "eagle", "draft")}
        runner = runner_of(**options, max_rows=ROWS, max_tokens=TOKENS, max_len=LENGTH)
        runner.expects_drafts = True
        with collect():
            if "head" in MODELS[name]:
                with_head(runner)
            if "eagle" in MODELS[name]:
                drafting_with_eagle(runner)
            if "draft" in MODELS[name]:
                with_draft_model(runner, MODELS[name]["draft"])
        known = kernels_of(runner, ROWS, TOKENS, shared=True)
        with collect() as met, runner.one_of_each_kind():
            for _ in range(steps):
                runner.rehearse(random_step(dice))
                if runner.beside is not None:
                    runner.beside.rehearse(random_reading(dice))
                rows = dice.randrange(1, ROWS + 1)
                dtype = dice.choice([torch.float32, torch.bfloat16])
                runner.rehearse_sampling(rows, dtype, dice.choice(Sampler.variants()))
                runner.rehearse_decode(dice.choice(runner.decode_sizes), dice.choice(list(Kind)))
                runner.rehearse_decode(dice.choice([1, 2, 4]), Kind.TREES, Traits(warm=dice.random() < 0.5))
        assert len(met) > 20, "the steps launched next to nothing"
        return [str(one) for one in met.found if one not in known.found]


if __name__ == "__main__":
    print(json.dumps({name: missing(name, int(sys.argv[1])) for name in sys.argv[2:] or MODELS}))
