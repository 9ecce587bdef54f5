"""Measures what quantization does to a model's predictions, computing in floats what the small numbers stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenmill.model.decoder import Decoder, LayerKV
from tokenmill.model.layers import ResidentWeights, Weight, WeightStore
from tokenmill.model.spec import DecoderSpec
from tokenmill.ops.kv_forms import KV_FORMS, KVForm, KVScales
from tokenmill.ops.registry import Need
from tokenmill.quant.tool.calibrate import batch_of, cache_for, plain_ops, widened, widened_experts
from tokenmill.quant.tool.layer_source import LayerSource
from tokenmill.quant.tool.quantize import Quantized

CPU = torch.device("cpu")


class StoreBuilder:
    """Weights for a decoder: the checkpoint's own, but for the layers that are added."""

    def __init__(self, source: LayerSource) -> None:
        self._source = source
        self._weights: dict[str, Weight] = {}

    def add(self, layer: Quantized) -> None:
        kinds = {name: param.kind for name, param in self._source.spec.parameters().items()}
        for short, param in layer.params.items():
            name, groups = layer.prefix + short, layer.groups.get(short)
            self._weights[name] = widened(param, groups) if kinds[name] == "linear" else widened_experts(param, groups)

    def build(self) -> WeightStore:
        for name, param in self._source.spec.parameters().items():
            if name not in self._weights:
                tensor = self._source.read(name)
                self._weights[name] = widened(tensor, None) if param.kind == "linear" else tensor
        return ResidentWeights(self._source.spec, self._weights)


def hidden_of(
    spec: DecoderSpec,
    weights: WeightStore,
    ids: torch.Tensor,  # [rows, length]
    kv_form: str | None = None,
    progress: Callable[[], None] | None = None,  # called after each row
) -> torch.Tensor:  # [rows, length, hidden], normed
    length = ids.shape[1]
    need = Need("cpu", torch.float32, spec.attention_head_dim, block_size=length, kv_form=kv_form)
    decoder = Decoder(spec, weights, plain_ops(need), max_len=length)
    cache = cache_for(spec, 1, length, CPU) if kv_form is None else _quantized_cache(spec, length, KV_FORMS[kv_form])
    found = []
    with torch.inference_mode():
        for row in ids:
            found.append(decoder.forward(batch_of(row[None]), [cache] * spec.num_layers))
            if progress is not None:
                progress()
    return torch.stack(found)


@dataclass(frozen=True)
class Quality:
    """Of a candidate against the baseline, over every predicted token of a text."""

    perplexity: float
    change: float  # of the perplexity against the baseline's; 0.01 is one percent
    error: float  # standard error of the change, from the differences token by token
    divergence: float  # KL of the candidate's distribution from the baseline's, nats per token
    agreement: float  # how often both have the same likeliest token


class Judge:
    """Holds the baseline's hidden states, which are a hundredth of its logits."""

    def __init__(self, spec: DecoderSpec, weights: WeightStore, ids: torch.Tensor) -> None:  # [rows, length]
        self.spec, self.ids = spec, ids
        self._decoder = _head(spec, weights)
        self._hidden = hidden_of(spec, weights, ids)

    def judge(
        self, weights: WeightStore, kv_form: str | None = None, progress: Callable[[], None] | None = None
    ) -> Quality:
        hidden = hidden_of(self.spec, weights, self.ids, kv_form, progress)
        candidate = _head(self.spec, weights)
        before, after, divergence, same = [], [], 0.0, 0
        with torch.inference_mode():
            for row, old, new in zip(self.ids, self._hidden, hidden):
                base = self._decoder.logits(old[:-1]).log_softmax(-1)  # [length - 1, vocab]
                other = candidate.logits(new[:-1]).log_softmax(-1)
                at = (torch.arange(len(row) - 1), row[1:])
                before.append(-base[at].double())
                after.append(-other[at].double())
                divergence += float((base.exp() * (base - other)).sum())
                same += int((base.argmax(-1) == other.argmax(-1)).sum())
        old_loss, new_loss = torch.cat(before), torch.cat(after)
        moved = new_loss - old_loss
        count = len(moved)
        return Quality(
            perplexity=float(new_loss.mean().exp()),
            change=float(moved.mean().expm1()),
            error=float(moved.std() / count**0.5),
            divergence=divergence / count,
            agreement=same / count,
        )


def _head(spec: DecoderSpec, weights: WeightStore) -> Decoder:
    """A decoder that is only asked for logits."""
    return Decoder(spec, weights, plain_ops(Need("cpu", torch.float32, spec.attention_head_dim)), max_len=1)


def _quantized_cache(spec: DecoderSpec, length: int, form: KVForm) -> LayerKV:
    shape = spec.kv_shapes[0]
    form.check(shape.k_dim)

    def room(width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(1, length, shape.kv_heads, width, dtype=dtype)

    k, k_scales = room(form.width(shape.k_dim), form.dtype), room(form.scales(shape.k_dim), torch.bfloat16)
    v, v_scales = room(form.width(shape.v_dim), form.dtype), room(form.scales(shape.v_dim), torch.bfloat16)
    return LayerKV(k, v, KVScales(k_scales, v_scales))
