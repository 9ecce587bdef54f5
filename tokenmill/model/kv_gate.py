"""KVGate: a small network per layer that reads a token's keys and values and says which heads will look at it later."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from tokenmill.errors import ModelError

FORMAT = "tokenmill-kv-gate"

# Gates that come with the package: by their model's fingerprint (`draft_head.fingerprint`), the file and its sha256
SHIPPED = {
    "b1c3b88d13d30d192c39ca32dfc07aa9f333844fccae2e5b34d3f3572dd6c5f4": (
        "smollm2-135m-instruct.kv-gate.safetensors",
        "40ce0d5199a3d244d7f3fffeff84fcb47283b0f7e96df5b4aa2e18239cc6f72d",
    ),
}


@dataclass(frozen=True)
class KVGate:
    """Its inputs are a token's unrotated keys, its values, and the lengths of both: what the cache holds and no more.

    score(x) = silu(x' up + up_bias) down + x' direct + down_bias,  x' = (x - mean) / std,  one score per KV head
    """

    mean: torch.Tensor  # [layers, inputs], all float32
    std: torch.Tensor  # [layers, inputs]
    up: torch.Tensor  # [layers, inputs, width]
    up_bias: torch.Tensor  # [layers, width]
    down: torch.Tensor  # [layers, width, kv_heads]
    down_bias: torch.Tensor  # [layers, kv_heads]
    direct: torch.Tensor  # [layers, inputs, kv_heads]

    def __call__(self, layer: int, x: torch.Tensor) -> torch.Tensor:  # [tokens, inputs] -> [tokens, kv_heads]
        x = (x - self.mean[layer]) / self.std[layer]
        inner = F.silu(x @ self.up[layer] + self.up_bias[layer])
        return inner @ self.down[layer] + x @ self.direct[layer] + self.down_bias[layer]

    def check(self, layers: int, kv_heads: int, dim: int) -> None:
        """Refuse one of another model, or that is no gate."""
        inputs, width = 2 * kv_heads * (dim + 1), self.up_bias.shape[-1]
        wanted = {
            "mean": (layers, inputs),
            "std": (layers, inputs),
            "up": (layers, inputs, width),
            "up_bias": (layers, width),
            "down": (layers, width, kv_heads),
            "down_bias": (layers, kv_heads),
            "direct": (layers, inputs, kv_heads),
        }
        for name, shape in wanted.items():
            one = getattr(self, name)
            if tuple(one.shape) != shape:
                raise ModelError(f"the gate's {name} has shape {tuple(one.shape)}, the model needs {shape}")
            if not bool(torch.isfinite(one).all()):
                raise ModelError(f"the gate's {name} holds numbers that are not finite; train it again")

    def to(self, device: torch.device) -> KVGate:
        return KVGate(*(getattr(self, field.name).to(device) for field in fields(self)))


def features(
    k: torch.Tensor,  # [tokens, kv_heads, dim], unrotated
    v: torch.Tensor,  # [tokens, kv_heads, dim]
) -> torch.Tensor:  # [tokens, 2 * kv_heads * (dim + 1)]
    return torch.cat([k.flatten(1), v.flatten(1), k.norm(dim=-1), v.norm(dim=-1)], dim=1)


def shipped_gate(fingerprint: str) -> KVGate | None:
    """The gate that comes with the package for this model, if there is one and its file is as it was made."""
    name, digest = SHIPPED.get(fingerprint, ("", ""))
    path = Path(__file__).parent / "heads" / name
    if not name or not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        return None
    return load_gate(path)


def load_gate(path: Path) -> KVGate:
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("format") != FORMAT:
                raise ModelError(f"{path} is no {FORMAT}; train one with scripts/kv_pruning.py")
            return KVGate(*(file.get_tensor(field.name).float() for field in fields(KVGate)))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read as a {FORMAT}: {error}") from error
