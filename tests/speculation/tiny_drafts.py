"""Heads for tiny models, and drafts that are verified whatever they cost: what tests of speculation share."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import TINY, write_tiny

from tokenmill import LLM
from tokenmill.engine.speculation import choose
from tokenmill.engine.speculation.payoff import Payoff
from tokenmill.model.draft_head import DraftHead, Target, default_kv_layer
from tokenmill.model.medusa import FILE as MEDUSA_FILE
from tokenmill.sampling import grammar
from tokenmill.step_time import FittedStepTime


def make_drafts_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which drafts are verified must not depend on how busy the machine is."""
    monkeypatch.setattr(FittedStepTime, "learn", lambda *_: None)
    monkeypatch.setattr(Payoff, "on", lambda *_: True)
    monkeypatch.setitem(choose.PER_TOKEN, "cpu", 0.0)
    monkeypatch.setattr(grammar, "SLOW", 1e9)


def made_head(model: str, path: Path, options: dict[str, Any], vocab: int = 40, **changes: Any) -> Path:
    """A head that drafts at random, which is now and then what the model says, from all that the model has cached."""
    with LLM(model, **options) as llm:
        spec, norm = llm._built.spec, llm._built.engine.runner.decoder.weights.final_norm  # type: ignore[attr-defined]
    torch.manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape) * 0.2

    width, inner = spec.hidden, 32
    head = DraftHead(
        torch.ones(width), draw(width, width), torch.ones(2 * width), draw(2 * inner, 2 * width), draw(width, inner),
        torch.ones(width), draw(2 * inner, width), draw(width, inner), torch.ones(width), draw(vocab, width),
        torch.arange(2, 2 + vocab).int(), Target.of(spec, norm), **changes,
    )  # fmt: skip
    queries = spec.heads * spec.head_dim
    attention = {
        "attention_norm": torch.ones(width), "q_weight": draw(queries, width), "o_weight": draw(width, queries),
    }  # fmt: skip
    replace(head, kv_layer=default_kv_layer(spec), **attention).save(path)
    return path


def made_eagle(folder: Path, shape: dict[str, Any], layers: list[int], draft_vocab: int = 40) -> Path:
    """An EAGLE-3 head for a model of this shape that drafts at random, in the form of the `speculators` library."""
    torch.manual_seed(1)
    width, inner, dim, vocab = shape["hidden_size"], 48, shape["head_dim"], shape["vocab_size"]
    queries, keys = (dim * shape[f"num_{one}_heads"] for one in ("attention", "key_value"))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape) * 0.2

    attention = {"q": queries, "k": keys, "v": keys}
    norms = ("norm", *(f"layers.0.{one}" for one in ("input_layernorm", "hidden_norm", "post_attention_layernorm")))
    tensors = {f"layers.0.self_attn.{one}_proj.weight": draw(rows, 2 * width) for one, rows in attention.items()}
    tensors |= {f"layers.0.mlp.{one}_proj.weight": draw(inner, width) for one in ("gate", "up")}
    tensors |= {f"{one}.weight": torch.ones(width) for one in norms}
    tensors |= {
        "fc.weight": draw(width, len(layers) * width), "layers.0.self_attn.o_proj.weight": draw(width, queries),
        "layers.0.mlp.down_proj.weight": draw(width, inner), "lm_head.weight": draw(draft_vocab, width),
        "d2t": torch.full((draft_vocab,), 2),
    }  # fmt: skip
    config = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": draft_vocab,
        "eagle_aux_hidden_state_layer_ids": layers,
        "transformer_layer_config": shape | {"model_type": "llama", "num_hidden_layers": 1, "intermediate_size": inner},
    }  # fmt: skip
    assert vocab >= draft_vocab + 2
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def made_medusa(folder: Path, width: int, vocab: int, heads: int = 4) -> Path:
    """Medusa's heads with a residual block each, in its own form, that draft at random."""
    torch.manual_seed(3)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for head in range(heads):
        tensors[f"{head}.0.linear.weight"] = torch.randn(width, width) * 0.2
        tensors[f"{head}.0.linear.bias"] = torch.zeros(width)
        tensors[f"{head}.1.weight"] = torch.randn(vocab, width) * 0.2
    save_file(tensors, folder / MEDUSA_FILE)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": heads, "medusa_num_layers": 1}))
    return folder


def permuting(folder: Path) -> tuple[Path, Path]:
    """A model whose layers do nothing, and whose embeddings are orthogonal; its head attends from each entry to itself,
    where it finds the embedding of the next token.
    """
    size, head = 64, folder / "head"
    shape = TINY | {
        "vocab_size": size, "hidden_size": size, "head_dim": size, "num_attention_heads": 1, "num_key_value_heads": 1,
    }  # fmt: skip
    torch.manual_seed(2)
    embed = torch.linalg.qr(torch.randn(size, size))[0].contiguous()
    lm_head = torch.empty(size, size)
    lm_head[torch.randperm(size)] = embed  # the token behind x has x's embedding there
    one, none = torch.ones(size), torch.zeros(size, size)
    tensors = {"model.embed_tokens.weight": embed, "model.norm.weight": one, "lm_head.weight": lm_head}
    for layer in range(shape["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        tensors |= {f"{at}self_attn.{name}_proj.weight": none.clone() for name in "qkvo"}
        tensors |= {f"{at}mlp.{name}_proj.weight": torch.zeros(48, size) for name in ("gate", "up")}
        tensors |= {f"{at}{name}.weight": one.clone() for name in ("input_layernorm", "post_attention_layernorm")}
        tensors[f"{at}mlp.down_proj.weight"] = torch.zeros(size, 48)
    target = Path(write_tiny(folder / "target", **shape))
    save_file(tensors, target / "model.safetensors")
    made_eagle(head, shape, [0, 1], draft_vocab=size - 2)
    own = load_file(head / "model.safetensors")
    sharp = torch.cat([8 * torch.eye(size), none], dim=1)  # of the embedding; the state is not looked at
    own |= {f"layers.0.self_attn.{name}_proj.weight": sharp.clone() for name in "qkv"}
    own |= {"fc.weight": torch.zeros(size, 2 * size), "layers.0.mlp.down_proj.weight": torch.zeros(size, 48)}
    own |= {"layers.0.self_attn.o_proj.weight": torch.eye(size), "lm_head.weight": lm_head[2:].clone()}
    save_file(own, head / "model.safetensors")
    config = json.loads((head / "config.json").read_text()) | {"norm_output": True}  # small beside what is found
    (head / "config.json").write_text(json.dumps(config))
    return target, head


def drafted(llm: LLM) -> int:
    """Drafts that were verified."""
    speculation = llm._built.engine.speculation
    assert speculation is not None
    return sum(one.drafted for one in speculation.stats.values())
