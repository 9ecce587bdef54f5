"""MedusaHeads: draft heads in the format of the Medusa project: residual blocks and a head of their own for each token.

A folder with `config.json` (`medusa_num_heads`, `medusa_num_layers`) and `medusa_lm_head.safetensors`, in which head i
has `i.j.linear.weight` and `.bias` for each of its blocks and `i.L.weight` for its logits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from tokenmill.errors import ModelError
from tokenmill.model.spec import DecoderSpec

FILE = "medusa_lm_head.safetensors"
MOST_HEADS, MOST_LAYERS = 16, 8
_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True)
class MedusaHeads:
    """Head i tells from a hidden state which token stands i + 2 positions behind it; the next is the model's own."""

    blocks: list[list[tuple[torch.Tensor, torch.Tensor]]]  # of each head: [hidden, hidden] and [hidden]
    heads: list[torch.Tensor]  # [vocab, hidden]

    def logits(self, hidden: torch.Tensor, head: int) -> torch.Tensor:  # [n, hidden] -> [n, vocab]
        for weight, bias in self.blocks[head]:
            hidden = hidden + F.silu(F.linear(hidden, weight, bias))
        return F.linear(hidden, self.heads[head])

    @classmethod
    def load(cls, folder: str | Path, spec: DecoderSpec) -> MedusaHeads:
        """Refused in a sentence where it is none for a model of this shape."""
        folder = Path(folder)
        config = _config(folder)
        asked = [config.get(name) for name in ("medusa_num_heads", "medusa_num_layers")]
        count, layers = (one if type(one) is int else -1 for one in asked)
        if not (1 <= count <= MOST_HEADS and 0 <= layers <= MOST_LAYERS):
            raise ModelError(
                f"{folder}/config.json has medusa_num_heads {asked[0]!r:.20} and medusa_num_layers {asked[1]!r:.20}; "
                f"they must be numbers from 1 to {MOST_HEADS} and from 0 to {MOST_LAYERS}"
            )
        tensors = _read(folder / FILE)

        def take(name: str, *shape: int) -> torch.Tensor:
            found = tensors.get(name, tensors.get(f"medusa_head.{name}"))
            if found is None:
                raise ModelError(f"{folder / FILE} has no {name}; it is not whole, or of another format")
            if tuple(found.shape) != shape:
                raise ModelError(
                    f"{folder / FILE} has {name} of shape {tuple(found.shape)}, and for this model it would be "
                    f"{shape}; take heads that were trained for it"
                )
            if not found.isfinite().all():
                raise ModelError(f"{folder / FILE} has weights in {name} that are NaN or infinite; download it again")
            return found.float()

        width = spec.hidden
        blocks = [
            [(take(f"{i}.{j}.linear.weight", width, width), take(f"{i}.{j}.linear.bias", width)) for j in range(layers)]
            for i in range(count)
        ]
        return cls(blocks, [take(f"{i}.{layers}.weight", spec.vocab_size, width) for i in range(count)])


def is_medusa(path: str | Path) -> bool:
    """Whether there is a folder of such heads."""
    folder = Path(path)
    return (folder / "config.json").is_file() and "medusa_num_heads" in _config(folder)


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        if file.stat().st_size > _CONFIG_BYTES:
            raise ValueError(f"{file.stat().st_size} bytes")
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read ({error}); download it again") from None
    return found if isinstance(found, dict) else {}


def _read(file: Path) -> dict[str, torch.Tensor]:
    if not file.is_file():
        pickled = file.with_suffix(".pt")
        risky = f"only {pickled.name}, which may run code when it is read"
        why = risky if pickled.is_file() else "nothing of that name"
        raise ModelError(f"there is no {file} ({why}); convert the heads to safetensors")
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{file} is truncated, or no safetensors file ({error}); download it again") from None
