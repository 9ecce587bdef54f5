"""Presents a GGUF file as a checkpoint: Hugging Face names, floats, and a config made from metadata."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.errors import ModelError
from tokenmill.model.weights.gguf_blocks import Order, unpacked
from tokenmill.model.weights.gguf_config import build_config
from tokenmill.model.weights.gguf_file import GGUFFile, TensorInfo
from tokenmill.ops.native.formats import OF_GGUF
from tokenmill.quant.schemes.packed import Blocks

Floats = npt.NDArray[np.float32]
Transform = Callable[[Floats], Floats]

_BLOCK_TENSOR = re.compile(r"blk\.(?P<layer>\d{1,5})\.(?P<kind>[a-z_]+)(?:\.(?P<expert>\d+))?\.(?P<part>weight|bias)")


class GGUFCheckpoint:
    """One model in GGUF form, possibly split over several files. Tensors are decoded one at a time, when asked for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        files = _open_all(self.path)
        self.metadata: dict[str, Any] = files[0].metadata
        stored = {name: (file, info) for file in files for name, info in file.tensors.items()}
        small = {name: _decode(*stored[name]).numpy() for name in _ROPE_TENSORS if name in stored}
        self.config: dict[str, Any] = build_config(
            self.metadata, {name: info for name, (_, info) in stored.items()}, small, str(self.path)
        )
        self._sources: dict[str, _Source] = {}
        for file, info in stored.values():
            if info.name not in small:
                self._sources.update(self._hf_tensors(file, info))

    def names(self) -> list[str]:
        return list(self._sources)

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The tensor of that Hugging Face name: on the CPU, owned by the caller."""
        try:
            source = self._sources[name]
        except KeyError:
            raise ModelError(f"{self.path} has no tensor for {name!r}; the file is incomplete") from None
        if source.transform is None:
            return _decode(source.file, source.info, source.expert, dtype=dtype)
        order = _row_order(source)
        if order is not None:
            return _decode(source.file, source.info, source.expert, order, dtype)
        return torch.from_numpy(source.transform(_decode(source.file, source.info, source.expert).numpy())).to(dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        source = self._sources[name]
        return source.info.shape if source.expert is None else source.info.shape[1:]

    def part(self, name: str, box: tuple[range, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A box of a matrix: rows that are not wanted are not decoded, nor are columns of whole blocks."""
        source, shape, wanted = self._sources[name], self.shape(name), dtype or torch.float32
        order = _row_order(source)
        plain = source.transform is None or order is not None
        if len(shape) != 2 or not plain or source.info.type_id not in OF_GGUF:
            return self.tensor(name, wanted)[tuple(slice(span.start, span.stop) for span in box)].clone()
        whole = Blocks(source.file.raw(source.info, source.expert), source.info.type_id, (shape[0], shape[1]), order)
        rows, columns = box
        for some in (columns, range(shape[1])):
            cut = whole.cut(rows, some)
            if cut is not None:
                found = unpacked(cut.raw, cut.type_id, cut.shape, cut.order, wanted)
                return found if some == columns else found[:, columns.start : columns.stop].clone()
        raise AssertionError("rows consist of whole blocks")

    def blocks(self, name: str) -> Blocks | None:
        """The matrix of that name as it is stored; None where `tensor` changes more than the order of its rows."""
        source = self._sources.get(name)
        if source is None or source.transform is _unshift or len(shape := self.shape(name)) != 2:
            return None
        raw = source.file.raw(source.info, source.expert)
        return Blocks(raw, source.info.type_id, (shape[0], shape[1]), _row_order(source))

    def prefetch(self, name: str) -> None:
        source = self._sources[name]
        source.file.prefetch(source.info, source.expert)

    def release(self, name: str) -> None:
        source = self._sources[name]
        source.file.release(source.info, source.expert)

    def _hf_tensors(self, file: GGUFFile, info: TensorInfo) -> dict[str, _Source]:
        """What one stored tensor is called on the other side; a stack of experts becomes one name per expert."""
        family = _FAMILIES[self.config["model_type"]]
        if info.name in _OUTER:
            return {_OUTER[info.name]: _Source(file, info, None, self._transform(info.name, family))}
        match = _BLOCK_TENSOR.fullmatch(info.name)
        if match is None or int(match["layer"]) >= self.config["num_hidden_layers"]:
            raise self._unexpected(info.name)
        # Files from before experts were stacked name each one: blk.0.ffn_gate.3.weight.
        kind = match["kind"] if match["expert"] is None else f"{match['kind']}_exps"
        stem = family.names.get(kind) or _INNER.get(kind)
        if stem is None:
            raise self._unexpected(info.name)
        hf_name = f"model.layers.{match['layer']}.{stem}.{match['part']}"
        if match["expert"] is None and kind.endswith("_exps"):
            return {hf_name.format(expert=e): _Source(file, info, e, None) for e in range(info.shape[0])}
        return {hf_name.format(expert=match["expert"]): _Source(file, info, None, self._transform(kind, family))}

    def _unexpected(self, name: str) -> ModelError:
        return ModelError(
            f"{self.path} holds tensor {name!r}, which the {self.config['model_type']} architecture "
            "does not have; use another conversion of the model"
        )

    def _transform(self, name: str, family: _Family) -> Transform | None:
        if family.norms_shifted and name.removesuffix(".weight").endswith("norm"):
            return _unshift
        if family.interleaved_rope and name in ("attn_q", "attn_k"):
            heads = self.config["num_attention_heads" if name == "attn_q" else "num_key_value_heads"]
            return lambda rows: self._half_split(rows, heads)
        return None

    def _half_split(self, rows: Floats, heads: int) -> Floats:  # [heads * dim, hidden], or a bias
        """Undoes the row order for interleaved rotation: (0, 1), (2, 3) ... back to (0, dim/2), (1, dim/2 + 1) ..."""
        if rows.shape[0] % (heads * 2):
            raise ModelError(f"{self.path} has {rows.shape[0]} query or key rows for {heads} heads; it is damaged")
        pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
        return pairs.swapaxes(1, 2).reshape(rows.shape)


@dataclass(frozen=True)
class _Source:
    """Where a named tensor comes from, and what is done to it after decoding."""

    file: GGUFFile
    info: TensorInfo
    expert: int | None
    transform: Transform | None


@dataclass(frozen=True)
class _Family:
    """How the tensors of one architecture differ from the common case."""

    names: dict[str, str] = field(default_factory=dict)
    interleaved_rope: bool = False  # query and key rows are stored in the order of the original Llama code
    norms_shifted: bool = False  # norms are stored as 1 + w


_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _expert_names(block: str, gate: str, up: str, down: str) -> dict[str, str]:
    names = {"gate": gate, "up": up, "down": down}
    stacked = {f"ffn_{part}_exps": f"{block}.experts.{{expert}}.{name}" for part, name in names.items()}
    return {"ffn_gate_inp": f"{block}.gate", **stacked}


_EXTRA_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA = _Family(names={**_EXTRA_NORMS, "ffn_norm": "pre_feedforward_layernorm"}, norms_shifted=True)

_FAMILIES = {
    "llama": _Family(interleaved_rope=True),
    "mistral": _Family(interleaved_rope=True),
    "mixtral": _Family(_expert_names("block_sparse_moe", "w1", "w3", "w2"), interleaved_rope=True),
    "qwen2": _Family(),
    "qwen3": _Family(),
    "qwen3_moe": _Family(_expert_names("mlp", "gate_proj", "up_proj", "down_proj")),
    "phi3": _Family(names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "olmo2": _Family(names=_EXTRA_NORMS),
}


def _open_all(path: Path) -> list[GGUFFile]:
    """The file, or every part of a split one, first part first."""
    file = GGUFFile(path)
    count = file.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return [file]
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if not match or int(match[2]) != count:
        raise ModelError(f"{path} is one of {count} parts; name them NAME-00001-of-{count:05}.gguf and so on")
    return [GGUFFile(path.with_name(f"{match[1]}-{part:05}-of-{match[2]}.gguf")) for part in range(1, count + 1)]


def _row_order(source: _Source) -> Order | None:
    """How the rows of a matrix are moved; None: they are not, or it is no matrix, or more is done to it."""
    if source.transform is None or source.transform is _unshift or len(source.info.shape) != 2:
        return None
    return source.transform(np.arange(source.info.shape[0], dtype=np.float32)).astype(np.int32)


def _decode(
    file: GGUFFile,
    info: TensorInfo,
    expert: int | None = None,
    order: Order | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    shape = info.shape if expert is None else info.shape[1:]
    return unpacked(file.raw(info, expert), info.type_id, shape, order, dtype)


def _unshift(values: Floats) -> Floats:
    return values - np.float32(1)
