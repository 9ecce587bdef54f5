"""Joints: where a layer's inputs can be scaled channel by channel without changing what the layer computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenmill.model.spec import DecoderSpec

Params = dict[str, torch.Tensor]  # of one layer, float32, by name: "qkv", "qkv.bias", "before_mlp", ...


@dataclass(frozen=True)
class Joint:
    """A linear layer and what makes its inputs: to divide there and multiply here, by channel, changes nothing."""

    reader: str  # its columns are multiplied
    maker: str  # a norm [columns], or a linear layer whose rows are divided, with its bias
    first: int = 0  # rows of a linear maker begin here ...
    rows: int = 0  # ... and are so many; 0: the maker is a norm
    repeat: int = 1  # so many heads of the reader share one of the maker's, and so their scales ...
    width: int = 1  # ... in runs of this many channels

    def shared(self, values: torch.Tensor) -> torch.Tensor:  # [columns] -> [columns]
        """The values with what has to be equal made so: the largest counts."""
        if self.repeat == 1:
            return values
        return self._heads(values).amax(1, keepdim=True).expand(-1, self.repeat, -1).reshape(-1)

    def fold(self, params: Params, scale: torch.Tensor) -> None:  # scale [columns], as `shared` made it
        params[self.reader] = params[self.reader] * scale
        if not self.rows:
            params[self.maker] = params[self.maker] / scale
            return
        rows = slice(self.first, self.first + self.rows)
        own = scale if self.repeat == 1 else self._heads(scale)[:, 0].reshape(-1)  # [rows]
        for name in (self.maker, f"{self.maker}.bias"):
            if name in params:
                changed = params[name].clone()
                changed[rows] /= own if changed.dim() == 1 else own[:, None]
                params[name] = changed

    def _heads(self, values: torch.Tensor) -> torch.Tensor:  # [columns] -> [shared heads, repeat, width]
        return values.view(-1, self.repeat, self.width)


def joints(spec: DecoderSpec, params: Params, *, norms_only: bool = False) -> list[Joint]:
    """Those of a layer with these parameters. A mixture's router reads its norm, too: there is none before it."""
    found = []
    if "before_attention" in params:
        found.append(Joint("qkv", "before_attention"))
    if "before_mlp" in params and "gate_up" in params:
        found.append(Joint("gate_up", "before_mlp"))
    if norms_only:
        return found
    if spec.mla is None:
        first = spec.q_size + spec.kv_size
        found.append(Joint("o", "qkv", first, spec.kv_size, spec.heads // spec.kv_heads, spec.head_dim))
    for prefix in ("", "shared_"):
        if f"{prefix}down" in params:
            inner = params[f"{prefix}down"].shape[1]
            found.append(Joint(f"{prefix}down", f"{prefix}gate_up", inner, inner))
    return found
