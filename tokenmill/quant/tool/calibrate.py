"""Runs a decoder over calibration text layer by layer, and measures what each linear layer is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch

from tokenmill.model.decoder import Decoder, LayerKV, TokenBatch
from tokenmill.model.layers import LayerWeights, Weight, WeightStore, layer_weights
from tokenmill.model.spec import DecoderSpec
from tokenmill.ops.matmul import Matmul, MatmulKernel, MatmulNeed, dense_need, only
from tokenmill.ops.matmul_torch import FLOAT8, multiply_dense, quantize_rows
from tokenmill.ops.registry import Need, Ops, select
from tokenmill.ops.types import AttentionBatch, Storage
from tokenmill.quant.groups import Groups
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.experts import Experts
from tokenmill.quant.schemes.scheme import Linear
from tokenmill.quant.tool.joints import Params
from tokenmill.quant.tool.layer_source import LayerSource

STEP_TOKENS = 2048  # tokens that go through a layer together


@dataclass(frozen=True)
class Moments:
    """What is known of the inputs of a linear layer."""

    gram: torch.Tensor  # [in, in]: X^T X
    mean: torch.Tensor  # [in]: of the magnitudes
    largest: torch.Tensor  # [in]: magnitude

    @classmethod
    def summed(cls, x: torch.Tensor, known: Moments | None) -> Moments:  # [..., in]
        """With these inputs, too; until all are seen, the mean is a sum."""
        x = x.flatten(0, -2)
        size = x.abs()
        gram, total, largest = x.T @ x, size.sum(0), size.amax(0)
        if known is None:
            return cls(gram, total, largest)
        return cls(known.gram + gram, known.mean + total, torch.maximum(known.largest, largest))

    def divided(self, scale: torch.Tensor) -> Moments:  # [in]
        """Of the same inputs, each channel divided by its scale."""
        return Moments(self.gram / scale / scale[:, None], self.mean / scale, self.largest / scale)


class Changed(Dense):
    """A dense layer whose inputs somebody sees, or changes, before they are multiplied."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._kernel = MatmulKernel("changed inputs", ("dense",), self._multiply)
        self._change = change

    def matmul(self, storage: Storage, dtype: torch.dtype) -> Matmul:
        return only(self._kernel, dense_need(storage["weight"], dtype))

    def _multiply(self, need: MatmulNeed, x: torch.Tensor, storage: Storage, bias: torch.Tensor | None) -> torch.Tensor:
        return multiply_dense(need, self._change(x), storage, bias)


def round_inputs(x: torch.Tensor, kind: str, scale: torch.Tensor | None = None) -> torch.Tensor:  # [..., in]
    """To the nearest int8 or float8, with one scale for each token, or with the one given."""
    return quantize_rows(x, {"int8": torch.int8, "fp8": FLOAT8}[kind], scale).widen()


def widened(weight: torch.Tensor, groups: Groups | None) -> Linear:
    """A linear layer that computes in floats what these groups stand for; without any, with the weight itself."""
    if groups is None:
        return Linear(Dense(), {"weight": weight})
    scheme = Dense()
    if groups.inputs is not None:  # 8-bit inputs, too: each is rounded
        scheme = Changed(partial(round_inputs, kind=groups.inputs, scale=groups.input_scale))
    return Linear(scheme, {"weight": groups.widen(torch.float32)})


def widened_experts(weight: torch.Tensor, groups: Groups | None) -> torch.Tensor | Experts:  # [experts, rows, columns]
    """The same of a layer's experts, whose groups are those of all rows."""
    if groups is None:
        return weight
    wide = groups.widen(torch.float32).view_as(weight)
    if groups.inputs is None:
        return wide
    scheme = Changed(partial(round_inputs, kind=groups.inputs, scale=groups.input_scale))
    return Experts(scheme, tuple({"weight": one} for one in wide))


class LayerCalibration:
    """The hidden states of the calibration text, on their way through the layers: memory for them and one layer."""

    def __init__(self, source: LayerSource, ids: torch.Tensor, device: torch.device) -> None:  # ids [samples, length]
        self.spec, self.device = source.spec, device
        need = Need(device.type, torch.float32, source.spec.attention_head_dim, block_size=ids.shape[1])
        self._decoder = _OneLayer(source.spec, plain_ops(need), ids.shape[1], device)
        self.hidden = source.read("embed")[ids] * source.spec.embed_scale  # [samples, length, hidden]
        self._rows = max(1, STEP_TOKENS // ids.shape[1])
        self._kv = cache_for(source.spec, self._rows, ids.shape[1], device)

    def moments(self, index: int, params: Params) -> dict[str, Moments]:
        """Of every linear layer of a layer with these parameters; the hidden states stay where they are."""
        sums: dict[str, Moments] = {}

        def seen(name: str, x: torch.Tensor) -> torch.Tensor:
            sums[name] = Moments.summed(x, sums.get(name))
            return x

        names = self._names(index, "linear")
        linears = {name: Linear(Changed(partial(seen, name)), {"weight": params[name]}) for name in names}
        self._pass(index, params, linears, keep=False)
        tokens = self.hidden.shape[0] * self.hidden.shape[1]
        return {name: replace(found, mean=found.mean / tokens) for name, found in sums.items()}

    def advance(self, index: int, params: Params, groups: dict[str, Groups]) -> None:
        """Hidden states go through the layer as it is after quantization."""
        linears = {name: widened(params[name], groups.get(name)) for name in self._names(index, "linear")}
        experts = {name: widened_experts(params[name], groups.get(name)) for name in self._names(index, "experts")}
        self._pass(index, params, linears, keep=True, experts=experts)

    def head_moments(self, final_norm: torch.Tensor) -> Moments:
        """Of what the head reads, once the hidden states have come through all layers."""
        found: Moments | None = None
        for part in self.hidden:
            x = self._decoder.ops.rms_norm(part.to(self.device), final_norm.to(self.device), self.spec.norm_eps)
            found = Moments.summed(x, found)
        assert found is not None
        return replace(found, mean=found.mean / (self.hidden.shape[0] * self.hidden.shape[1]))

    def _names(self, index: int, kind: str) -> list[str]:
        return [name for name, param in self.spec.layer_parameters(index).items() if param.kind == kind]

    def _pass(
        self,
        index: int,
        params: Params,
        linears: dict[str, Linear],
        keep: bool,
        experts: Mapping[str, torch.Tensor | Experts] | None = None,  # instead of those of the parameters
    ) -> None:
        weights: dict[str, Weight] = {f"layers.{index}.{name}": one.to(self.device) for name, one in params.items()}
        weights |= {f"layers.{index}.{name}": one for name, one in (experts or {}).items()}
        for name, linear in linears.items():
            weights[f"layers.{index}.{name}"] = replace(
                linear, storage={key: one.to(self.device) for key, one in linear.storage.items()}
            )
        layer = layer_weights(self.spec, weights, index)
        length = self.hidden.shape[1]
        with torch.inference_mode():
            for first in range(0, self.hidden.shape[0], self._rows):
                part = self.hidden[first : first + self._rows].to(self.device)
                batch = batch_of(torch.zeros(part.shape[:2], dtype=torch.long, device=self.device))
                out = self._decoder.through(index, layer, part.flatten(0, 1), batch, self._kv)
                if keep:
                    self.hidden[first : first + self._rows] = out.view(-1, length, out.shape[-1]).cpu()


class _Device:
    """All that a decoder asks of its weights before it computes, when it is given each layer by hand."""

    def __init__(self, device: torch.device) -> None:
        self.dtype, self.device = torch.float32, device
        self.experts = None  # all of them are in their layer


class _OneLayer(Decoder):
    """The decoder, but one layer at a time, from hidden states to hidden states."""

    def __init__(self, spec: DecoderSpec, ops: Ops, length: int, device: torch.device) -> None:
        super().__init__(spec, cast(WeightStore, _Device(device)), ops, max_len=length)

    def through(
        self, index: int, layer: LayerWeights, hidden: torch.Tensor, tokens: TokenBatch, kv: LayerKV
    ) -> torch.Tensor:  # [tokens, hidden] -> [tokens, hidden]
        x, residual = self._add_norm(None, hidden, layer.before_attention, layer.attention.qkv)
        update = self._join(self._mix(index, x, layer.attention, tokens, kv), layer)
        # What adds and norms may overwrite its inputs, and these are the caller's.
        x, residual = self._add_norm(update, residual.clone(), layer.before_mlp, None)
        return residual + self._norm(self._mlp(index, x, layer.mlp), layer.after_mlp)


def plain_ops(need: Need) -> Ops:
    """In torch on CPUs: what is measured is the weights' form, whatever kernels there are for it."""
    return select(need, {"rope_kv_write": "reference", "attention": "cpu"} if need.device == "cpu" else None)


def batch_of(ids: torch.Tensor) -> TokenBatch:  # [rows, length]
    """Texts of equal length, each from its own beginning, in a block of its own."""
    rows, length = ids.shape
    device = ids.device
    place = torch.arange(rows * length, device=device)
    attention = AttentionBatch(
        rows=torch.arange(rows, dtype=torch.int32, device=device),
        q_start=torch.arange(rows + 1, dtype=torch.int32, device=device) * length,
        context=torch.full((rows,), length, dtype=torch.int32, device=device),
        block_tables=torch.arange(rows, dtype=torch.int32, device=device)[:, None],
        num_singles=0,
        max_query=length,
        max_context=length,
        host_rows=list(range(rows)),
        host_counts=[length] * rows,
        host_context=[length] * rows,
    )
    return TokenBatch(ids.flatten(), place % length, place, attention)


def cache_for(spec: DecoderSpec, rows: int, length: int, device: torch.device) -> LayerKV:
    """The cache of one layer for `batch_of`; layers may share it, since each writes all that it reads."""
    shape = spec.kv_shapes[0]
    k = torch.zeros(rows, length, shape.kv_heads, shape.k_dim, device=device)
    if spec.mla is not None:
        return LayerKV(k, k[..., spec.mla.rope_dim :])
    return LayerKV(k, torch.zeros(rows, length, shape.kv_heads, shape.v_dim, device=device))
