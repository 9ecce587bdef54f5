"""Drives transformers for the comparison: generate() with its default settings, a static batch for many requests."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def prepare(source: Path, variant: str, folder: Path) -> Path:
    """The GGUF file as a directory of safetensors in float32, which loads faster and is what everybody else reads."""
    beside, target = source.with_suffix(""), folder / "transformers"
    if (beside / "config.json").exists():  # as scripts/random_model.py writes it
        return beside
    if (target / "config.json").exists():
        return target
    torch, transformers = import_module("torch"), import_module("transformers")
    names: dict[str, Any] = {"gguf_file": source.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **names)
    model.hf_quantizer = None  # it is dequantized by now, but would refuse to be saved as long as it says otherwise
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    transformers.AutoTokenizer.from_pretrained(source.parent, **names).save_pretrained(target)
    model.save_pretrained(target)
    return target


class PeerEngine:
    def __init__(self, model: str, variant: str, threads: int, rows: int, length: int) -> None:
        self._torch, transformers = import_module("torch"), import_module("transformers")
        self._torch.set_num_threads(threads)
        dtype = getattr(self._torch, variant)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        self.version = f"transformers {transformers.__version__}, torch {self._torch.__version__}"

    def single(self, prompt: list[int], new: int, clock: Callable[[], Any]) -> tuple[list[int], list[Any]]:
        times = _TokenTimes(clock)
        return self._generate([prompt], new, streamer=times)[0], times.times[1:]  # the first put is the prompt

    def batch(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        return self._generate(prompts, new)

    def _generate(self, prompts: list[list[int]], new: int, **options: Any) -> list[list[int]]:
        ids = self._torch.tensor(prompts)  # [requests, tokens]: the prompts are equally long
        out = self._model.generate(
            ids,
            attention_mask=self._torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new,
            eos_token_id=None,
            pad_token_id=0,
            **options,
        )
        tokens: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return tokens


class _TokenTimes:
    """A streamer that notes when each token came."""

    def __init__(self, clock: Callable[[], Any]) -> None:
        self._clock = clock
        self.times: list[Any] = []

    def put(self, value: Any) -> None:
        self.times.append(self._clock())

    def end(self) -> None:
        pass
