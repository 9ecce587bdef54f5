"""Writes a quantized model as others read it: compressed-tensors in safetensors, config.json and the tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tokenmill.errors import ConfigError
from tokenmill.model.gguf_tokenizer import build_backend
from tokenmill.model.weights.gguf import GGUFCheckpoint
from tokenmill.model.weights.source import ModelFiles
from tokenmill.quant.forms import FLOATS, WeightForm
from tokenmill.quant.groups import Groups
from tokenmill.quant.tool.layer_source import LayerSource
from tokenmill.quant.tool.quantize import Quantized

SHARD_BYTES = 2 << 30
UNFINISHED = ".unfinished"  # the folder in which a model lies until all of it is there
FORMATS = {"int4": "pack-quantized", "int8": "pack-quantized", "w8a8": "int-quantized", "fp8": "float-quantized"}
_BESIDE = (  # files that belong to a tokenizer or to how a model is used
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def write_model(
    source: LayerSource,
    forms: dict[str, WeightForm],  # by canonical name
    layers: Iterable[Quantized],
    folder: Path,
    dtype: torch.dtype,  # of what stays floats
    static_inputs: bool = False,
) -> None:
    """Memory: a layer, and a shard of what was written."""
    writer = _Shards(folder)
    kinds = {name: param.kind for name, param in source.spec.parameters().items()}
    done: set[str] = set()
    modules: dict[str, WeightForm] = {}  # quantized ones, by their name in the checkpoint
    for layer in layers:
        for short, param in layer.params.items():
            name, groups = layer.prefix + short, layer.groups.get(short)
            form = forms.get(name)
            if kinds[name] not in ("linear", "bias", "norm", "experts") or (kinds[name] == "experts" and form is None):
                continue  # routers, what is absorbed into attention, and experts as they are: copied below
            done |= source.tensors(name)
            param = param.flatten(0, -2) if kinds[name] == "experts" else param
            own = getattr(torch, FLOATS[form.kind]) if form is not None and form.kind in FLOATS else dtype
            for tensor, part in source.parts(name):
                if groups is None or form is None:
                    writer.add(tensor, part.of(param).to(own))
                    continue
                module = tensor.removesuffix(".weight")
                modules[module] = form
                for suffix, value in compressed(groups, part.of).items():
                    writer.add(f"{module}.{suffix}", value)
    for name in source.checkpoint.names():
        if name not in done:
            value = source.checkpoint.tensor(name)
            writer.add(name, value.to(dtype) if value.is_floating_point() else value)
    writer.close()
    others = [name.removesuffix(".weight") for name in source.checkpoint.names() if name.endswith(".weight")]
    config = dict(source.checkpoint.config) | {"dtype": str(dtype).removeprefix("torch.")}
    config.pop("torch_dtype", None)
    if modules:
        config["quantization_config"] = quantization_config(modules, others, static_inputs)
    _write_json(folder / "config.json", config)


def compressed(groups: Groups, rows: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of one module, by suffix. `rows` takes the module's own rows from what has all."""
    codes, scale = rows(groups.codes), rows(groups.scale)
    found = {"weight_scale": scale}
    if groups.inputs is not None:
        found["weight"] = codes
        if groups.input_scale is not None:
            found["input_scale"] = groups.input_scale.to(scale.dtype, copy=True).reshape(1)
        return found
    found["weight_packed"] = pack_int32(codes, groups.bits)
    found["weight_shape"] = torch.tensor(codes.shape)
    if groups.zeros is not None:
        found["weight_zero_point"] = pack_int32(rows(groups.zeros).T, groups.bits).T
    return found


def pack_int32(codes: torch.Tensor, bits: int) -> torch.Tensor:  # [rows, columns] int8 -> [rows, columns * bits / 32]
    """Codes, counted from the smallest, side by side in 32-bit words, the first in the lowest bits."""
    each = 32 // bits
    missing = -codes.shape[1] % each
    lifted = torch.nn.functional.pad(codes.long() + (1 << (bits - 1)), (0, missing))
    shifts = torch.arange(each) * bits
    words = (lifted.view(codes.shape[0], -1, each) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def quantization_config(
    modules: dict[str, WeightForm],
    others: list[str],  # every module of the checkpoint
    static_inputs: bool = False,
) -> dict[str, Any]:
    """What config.json says of it. Modules are named by their last word where it is enough to tell them apart."""
    forms = list(dict.fromkeys(modules.values()))
    by_word: dict[str, set[WeightForm | None]] = {}
    for module in [*modules, *others]:
        by_word.setdefault(module.rpartition(".")[2], set()).add(modules.get(module))
    groups = {}
    for number, form in enumerate(forms):
        own = [module for module, other in modules.items() if other == form]
        words = list(dict.fromkeys(module.rpartition(".")[2] for module in own))
        clear = [word for word in words if len(by_word[word]) == 1]
        targets = [f"re:.*{word}$" for word in clear]
        targets += [module for module in own if module.rpartition(".")[2] not in clear]
        groups[f"group_{number}"] = {
            "targets": targets,
            "weights": _weights(form),
            "input_activations": _inputs(form, static_inputs),
            "output_activations": None,
            "format": FORMATS[form.kind],
        }
    formats = list(dict.fromkeys(FORMATS[form.kind] for form in forms))
    return {
        "quant_method": "compressed-tensors",
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [] if "lm_head" in modules else ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def write_tokenizer(files: ModelFiles, checkpoint: object, folder: Path) -> None:
    """Copies the files of a directory; a GGUF file's vocabulary is written as the files it stands for."""
    if not isinstance(checkpoint, GGUFCheckpoint):
        for name in _BESIDE:
            if (Path(files.path) / name).is_file():
                shutil.copyfile(Path(files.path) / name, folder / name)
        return
    build_backend(checkpoint.metadata, str(checkpoint.path)).save(str(folder / "tokenizer.json"))
    tokens = checkpoint.metadata["tokenizer.ggml.tokens"]
    config = checkpoint.config
    ends = {"bos_token": config["bos_token_id"], "eos_token": next(iter(config["eos_token_id"]), None)}
    settings: dict[str, Any] = {name: tokens[id] for name, id in ends.items() if id is not None}
    template = checkpoint.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings["model_max_length"] = config["max_position_embeddings"]
    _write_json(folder / "tokenizer_config.json", settings)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Where to write what is to be in a new or empty folder: it has the files when all are written, or nothing.

    They are written to a folder inside of it, since only there is it sure that moving them costs nothing. What was
    there before (it, or folders that it is in) stays whatever happens; a folder that was made here goes with a failure.
    """
    made: list[Path] = []  # the outermost first
    if (folder / UNFINISHED).exists():
        raise ConfigError(
            f"{folder} has an unfinished model in {UNFINISHED}: a killed run left it, or one is writing it now; "
            "remove it, or name another folder with -o"
        )
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name a new folder with -o")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is there already and not empty; name another folder with -o")
    try:
        try:
            for one in reversed([folder, *folder.parents]):
                if not one.exists():
                    one.mkdir()
                    made.append(one)
            inside = folder / UNFINISHED
            inside.mkdir()
        except OSError as error:
            raise ConfigError(f"the folder {folder} cannot be made: {error.strerror}; name another with -o") from None
        try:
            yield inside
            # The config last: a folder without one is no model yet.
            for file in sorted(inside.iterdir(), key=lambda file: file.name == "config.json"):
                file.rename(folder / file.name)
        finally:
            shutil.rmtree(inside, ignore_errors=True)
    except BaseException:
        for one in reversed(made):
            with suppress(OSError):  # not empty: somebody else has put something there
                one.rmdir()
        raise


class _Shards:
    """Tensors in files of bounded size; one file gets the plain name, several get an index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, torch.Tensor] = {}
        self._size = self._total = 0
        self._names: list[list[str]] = []  # tensors of each file that is written

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._open and self._size + size > SHARD_BYTES:
            self._flush()
        self._open[name] = tensor.contiguous()
        self._size += size
        self._total += size

    def close(self) -> None:
        self._flush()
        count = len(self._names)
        if count == 1:
            self._part(0).rename(self._folder / "model.safetensors")
            return
        where: dict[str, str] = {}
        for number, names in enumerate(self._names):
            final = f"model-{number + 1:05}-of-{count:05}.safetensors"
            self._part(number).rename(self._folder / final)
            where |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self._total}, "weight_map": where}
        _write_json(self._folder / "model.safetensors.index.json", index)

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number:05}.safetensors"

    def _flush(self) -> None:
        path = self._part(len(self._names))
        save_file(self._open, path, metadata={"format": "pt"})
        path.chmod(0o644)  # the library makes files that only their owner can read
        self._names.append(list(self._open))
        self._open, self._size = {}, 0


def _weights(form: WeightForm) -> dict[str, Any]:
    return {
        "num_bits": 4 if form.kind == "int4" else 8,
        "type": "float" if form.kind == "fp8" else "int",
        "symmetric": not form.zeros,
        "strategy": "group" if form.group else "channel",
        "group_size": form.group,
        "dynamic": False,
        "observer": "minmax",
    }


def _inputs(form: WeightForm, static: bool) -> dict[str, Any] | None:
    if form.kind not in ("w8a8", "fp8"):
        return None
    return {
        "num_bits": 8,
        "type": "float" if form.kind == "fp8" else "int",
        "symmetric": True,
        "strategy": "tensor" if static else "token",
        "dynamic": not static,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
