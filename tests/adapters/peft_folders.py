"""Adapters in PEFT's format, written for tests: random factors, and the same merged into a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import TINY

MODULES = {  # rows, columns
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (48, 32),
    "mlp.up_proj": (48, 32),
    "mlp.down_proj": (32, 48),
}
SIZE = 0.6  # of the factors: large enough that answers are others


def write_base(folder: Path) -> Path:
    """A tiny model with weights in a file, which can be merged into."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TINY))
    generator = torch.Generator().manual_seed(1)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    tensors = {"model.embed_tokens.weight": weight(128, 32), "lm_head.weight": weight(128, 32)}
    tensors["model.norm.weight"] = torch.ones(32)
    for index in range(TINY["num_hidden_layers"]):
        at = f"model.layers.{index}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = torch.ones(32)
        for name, shape in MODULES.items():
            tensors[f"{at}{name}.weight"] = weight(*shape)
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_adapter(
    folder: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8,
    targets: tuple[str, ...] = tuple(MODULES),
    layers: tuple[int, ...] = (0, 1),
    ranks: dict[str, int] | None = None,  # of some modules
    size: float = SIZE,
    **config: Any,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for index in layers:
        for name in targets:
            rows, columns = MODULES[name]
            its = (ranks or {}).get(name, rank)
            at = f"base_model.model.model.layers.{index}.{name}"
            tensors[f"{at}.lora_A.weight"] = size * torch.randn(its, columns, generator=generator) / columns**0.5
            tensors[f"{at}.lora_B.weight"] = size * torch.randn(rows, its, generator=generator) / its**0.5
    save_file(tensors, folder / "adapter_model.safetensors")
    found = {
        "peft_type": "LORA",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in targets}),
        "bias": "none",
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    }
    if len(layers) < TINY["num_hidden_layers"]:
        found["layers_to_transform"] = list(layers)
    (folder / "adapter_config.json").write_text(json.dumps(found | config))
    return folder


def merged(base: Path, adapter: Path, folder: Path, scale: float) -> Path:
    """The base with an adapter of one scale in its weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text((base / "config.json").read_text())
    tensors, factors = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, down in factors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            up = factors[f"{module}.lora_B.weight"]
            tensors[module.removeprefix("base_model.model.") + ".weight"] += scale * (up @ down)
    save_file(tensors, folder / "model.safetensors")
    return folder
