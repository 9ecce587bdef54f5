"""Writes a GGUF file of a known shape with random weights: `python scripts/random_model.py qwen2.5-1.5b q4_k_m FOLDER`.

For measuring speed where the real files cannot be had. Tensors have the formats that llama.cpp's quantizer gives them,
and blocks are drawn directly, so that no floats are ever quantized: weights have a mean of zero and a deviation of 0.02
or so. The vocabulary is the default model's, filled up with unused tokens. `--folder` also writes the same weights as a
folder of bfloat16 safetensors beside the file, for engines that do not read GGUF: `tokenmill bench cpu` finds it there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from tokenmill.model.weights.gguf_blocks import unpacked

DEVIATION = 0.02
CONTEXT = 32768
Kind = gguf.GGMLQuantizationType


@dataclass(frozen=True)
class Shape:
    arch: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    tied: bool
    theta: float
    head_dim: int = 128

    @property
    def biased(self) -> bool:
        return self.arch == "qwen2"


SHAPES = {
    "qwen2.5-1.5b": Shape("qwen2", 1536, 28, 12, 2, 8960, 151936, True, 1e6),
    "llama-3.2-3b": Shape("llama", 3072, 28, 24, 8, 8192, 128256, True, 5e5),
    "qwen2.5-7b": Shape("qwen2", 3584, 28, 28, 4, 18944, 152064, False, 1e6),
    "llama-3.1-8b": Shape("llama", 4096, 32, 32, 8, 14336, 128256, False, 5e5),
}
PLAIN = {"q4_0": Kind.Q4_0, "q4_k_m": Kind.Q4_K, "q8_0": Kind.Q8_0}
FILE_TYPES = {"q4_0": 2, "q8_0": 7, "q4_k_m": 15}


def format_of(name: str, layer: int, shape: Shape, form: str) -> Kind:
    """What the quantizer chooses: more bits for the head, and in q4_k_m for two matrices of some layers."""
    plain = PLAIN[form]
    if plain == Kind.Q8_0:
        return plain
    if name == "output" or (name == "token_embd" and shape.tied):
        return Kind.Q6_K
    eighth = shape.layers // 8
    more = layer < eighth or layer >= 7 * shape.layers // 8 or (layer - eighth) % 3 == 2
    return Kind.Q6_K if form == "q4_k_m" and name in ("attn_v", "ffn_down") and more else plain


def tensors(shape: Shape) -> Iterator[tuple[int, str, tuple[int, ...]]]:
    """Layer (-1: none), name in GGUF and shape of each; biases are named by the matrix they belong to."""
    yield -1, "token_embd", (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        yield layer, "attn_norm", (shape.hidden,)
        for name, rows in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
            yield layer, name, (rows, shape.hidden)
            if shape.biased:
                yield layer, name, (rows,)
        yield layer, "attn_output", (shape.hidden, q)
        yield layer, "ffn_norm", (shape.hidden,)
        for name in ("ffn_gate", "ffn_up"):
            yield layer, name, (shape.inner, shape.hidden)
        yield layer, "ffn_down", (shape.hidden, shape.inner)
    yield -1, "output_norm", (shape.hidden,)
    if not shape.tied:
        yield -1, "output", (shape.vocab, shape.hidden)


def random_blocks(kind: Kind, rows: int, columns: int, draw: np.random.Generator) -> np.ndarray:  # [rows, bytes]
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = draw.integers(0, 256, (rows * columns // values, size), dtype=np.uint8)

    def put(at: int, value: float) -> None:
        blocks[:, at : at + 2] = np.array([value], np.float16).view(np.uint8)

    if kind == Kind.Q4_0:
        put(0, DEVIATION / 4.6)
    elif kind == Kind.Q8_0:
        put(0, DEVIATION / 73.9)
    elif kind == Kind.Q6_K:
        put(size - 2, DEVIATION / 73.9 / 18.5)
    else:  # Q4_K: sum of 15 steps of the scale, minus the minimum; both have up to 63 steps themselves
        put(0, DEVIATION / 230)
        put(2, 7.5 * DEVIATION / 230)
    return blocks.reshape(rows, -1)


def vocabulary(writer: gguf.GGUFWriter, source: Path, size: int) -> None:
    fields = gguf.GGUFReader(source).fields
    known = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges")}
    more = size - len(known["tokens"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(known["tokens"] + [f"<|unused {number}|>" for number in range(more)])
    writer.add_token_types(known["token_type"] + [gguf.TokenType.UNUSED] * more)
    writer.add_token_merges(known["merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write_file(target: Path, shape: Shape, form: str, words: Path) -> None:
    writer = gguf.GGUFWriter(target, shape.arch)
    writer.add_block_count(shape.layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(shape.theta)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(FILE_TYPES[form])
    writer.add_quantization_version(2)
    vocabulary(writer, words, shape.vocab)
    made = list(tensors(shape))
    for layer, name, size in made:
        full = f"blk.{layer}.{name}" if layer >= 0 else name
        if len(size) == 1:
            kind = "weight" if name.endswith("norm") else "bias"
            writer.add_tensor_info(f"{full}.{kind}", size, np.dtype(np.float32), 4 * size[0])
        else:
            format = format_of(name, layer, shape, form)
            values, block = gguf.GGML_QUANT_SIZES[format]
            row = size[1] // values * block
            writer.add_tensor_info(
                f"{full}.weight", (size[0], row), np.dtype(np.uint8), size[0] * row, raw_dtype=format
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    draw = np.random.default_rng(0)
    for layer, name, size in made:
        if len(size) == 1:
            writer.write_tensor_data(np.full(size, float(name.endswith("norm")), np.float32))
        else:
            writer.write_tensor_data(random_blocks(format_of(name, layer, shape, form), *size, draw))
    writer.close()


NAMES = {
    **{"token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm"},
    **{"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"},
    **{"attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm"},
    **{"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
}


def write_folder(source: Path, shape: Shape, words: Path) -> None:
    """The file's weights in the transformers layout: GGUF has the rows of a llama's q and k in another order."""
    from transformers import AutoTokenizer

    folder, reader = source.with_suffix(""), gguf.GGUFReader(source)
    folder.mkdir(exist_ok=True)
    AutoTokenizer.from_pretrained(words.parent, gguf_file=words.name).save_pretrained(folder)
    parts: dict[str, dict[str, torch.Tensor]] = {}
    index: dict[str, str] = {}
    for tensor in reader.tensors:
        stem, kind = tensor.name.rsplit(".", 1)
        layer, name = stem.split(".")[1:] if stem.startswith("blk.") else ("", stem)
        size = tuple(int(one) for one in reversed(tensor.shape))
        raw = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1)
        values = unpacked(raw, int(tensor.tensor_type), size, dtype=torch.bfloat16)
        if shape.arch == "llama" and name in ("attn_q", "attn_k"):
            values = values.view(-1, shape.head_dim // 2, 2, size[1]).transpose(1, 2).reshape(size).contiguous()
        full = "lm_head" if name == "output" else "model." + (f"layers.{layer}." if layer else "") + NAMES[name]
        file = f"layer-{layer}.safetensors" if layer else f"{name}.safetensors"
        parts.setdefault(file, {})[f"{full}.{kind}"] = values
        index[f"{full}.{kind}"] = file
        for done in [one for one in parts if one != file]:
            save_file(parts.pop(done), folder / done, {"format": "pt"})
    for file, last in parts.items():
        save_file(last, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=1))


def config_of(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["Qwen2ForCausalLM" if shape.biased else "LlamaForCausalLM"],
        "model_type": shape.arch,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.inner,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "rope_theta": shape.theta,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": CONTEXT,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def main() -> None:
    from tokenmill.cache import models_dir
    from tokenmill.model.weights.default_model import location

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("form", choices=PLAIN)
    parser.add_argument("to", type=Path, help="folder for the file")
    parser.add_argument("--folder", action="store_true", help="also as a folder of bfloat16 safetensors")
    parser.add_argument(
        "--words", type=Path, default=location(models_dir()), help="the GGUF file whose vocabulary is taken"
    )
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    target = args.to / f"{args.shape}-{args.form}.gguf"
    if not target.exists():
        part = target.with_suffix(".part")
        write_file(part, SHAPES[args.shape], args.form, args.words)
        part.rename(target)
    print(f"{target}: {target.stat().st_size / 1e9:.2f} GB")
    if args.folder:
        write_folder(target, SHAPES[args.shape], args.words)
        print(f"{target.with_suffix('')}")


if __name__ == "__main__":
    main()
