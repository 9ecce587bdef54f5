"""Make the EAGLE-3 heads of the tests with the `speculators` library: `python make_eagle3.py FOLDER`.

Each head is one draft layer of seeded random weights, saved by the library's own code. Beside it lies what the
library's own forward pass computes from random hidden states: `expected.safetensors` with `features`, `ids` (the token
behind each) and `logits`, of the first draft and of two more, each fed with the token that does come next.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

SHAPE: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
HEADS: dict[str, tuple[Any, dict[str, Any]]] = {
    "eagle3_llama": (LlamaConfig(**SHAPE), {"draft_vocab_size": 40}),
    "eagle3_qwen3": (
        Qwen3Config(**SHAPE),
        {"draft_vocab_size": 128, "norm_before_residual": True, "fc_norm": True, "norm_output": True},
    ),
    "eagle3_biased": (
        LlamaConfig(**SHAPE, attention_bias=True, rope_parameters=LLAMA3_ROPE),
        {"draft_vocab_size": 40, "norm_before_fc": True},
    ),
}
TOKENS, STEPS = 24, 3


def make(folder: Path, layer: Any, settings: dict[str, Any]) -> None:
    layer._attn_implementation = "eager"
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    proposals = [GreedyTokenProposalConfig(speculative_tokens=STEPS)]
    own = SpeculatorsConfig(
        algorithm="eagle3", proposal_methods=proposals, default_proposal_method="greedy", verifier=verifier
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, speculators_config=own, eagle_aux_hidden_state_layer_ids=[1, 2, 3], **settings
    )
    model = Eagle3DraftModel(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_((torch.randn(weight.shape) * 0.2 + float("norm" in name)).bfloat16())
    vocab, drafted = layer.vocab_size, settings["draft_vocab_size"]
    if drafted != vocab:
        t2d = torch.zeros(vocab, dtype=torch.bool)
        t2d[torch.randperm(vocab - 3)[:drafted] + 3] = True
        model.load_vocab_mappings(t2d, t2d.nonzero().flatten() - torch.arange(drafted))
    copy.deepcopy(model).bfloat16().save_pretrained(folder)  # as heads are saved
    (folder / "config.py").unlink()  # the library's own config class, which nobody reads here

    features, ids = torch.randn(1, TOKENS, 3 * layer.hidden_size), torch.randint(vocab, (1, TOKENS))
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, result: logits.append(result[0]))
    with torch.no_grad():
        model(features, ids, torch.zeros(1, TOKENS, dtype=torch.long), ttt_steps=STEPS)
    expected = {"features": features[0], "ids": ids[0], "logits": torch.stack(logits)}
    save_file({name: one.contiguous() for name, one in expected.items()}, folder / "expected.safetensors")


def main() -> None:
    torch.manual_seed(0)
    for name, (layer, settings) in HEADS.items():
        make(Path(sys.argv[1]) / name, layer, settings)


if __name__ == "__main__":
    main()
