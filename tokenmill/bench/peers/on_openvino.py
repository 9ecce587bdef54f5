"""Drives OpenVINO GenAI for the comparison: its continuous batching pipeline on weights that NNCF compressed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

# How weights are compressed; 4 bits in the groups of 64 that optimum takes for small models.
FORMS: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8},
    "int4": {"bits": 4, "sym": True, "group_size": 64, "ratio": 1.0},
}


def prepare(source: Path, variant: str, folder: Path) -> Path:
    target = folder / f"openvino-{variant}"
    if (target / "openvino_model.xml").exists():
        return target
    # Not the directory that another environment made: an older transformers misreads a newer one's config.
    plain = import_module("on_transformers").prepare(source, variant, folder / "openvino")
    intel = import_module("optimum.intel")
    form = intel.OVWeightQuantizationConfig(**FORMS[variant])
    intel.OVModelForCausalLM.from_pretrained(plain, export=True, quantization_config=form).save_pretrained(target)
    return target


class PeerEngine:
    def __init__(self, model: str, variant: str, threads: int, rows: int, length: int) -> None:
        self._openvino, self._numpy = import_module("openvino"), import_module("numpy")
        self._genai = import_module("openvino_genai")
        schedule = self._genai.SchedulerConfig()
        schedule.max_num_seqs = rows
        properties = {"INFERENCE_NUM_THREADS": threads}
        self._pipeline = self._genai.ContinuousBatchingPipeline(model, schedule, "CPU", properties)
        self._ids = count()
        self.version = f"openvino-genai {self._genai.__version__}"

    def single(self, prompt: list[int], new: int, clock: Callable[[], Any]) -> tuple[list[int], list[Any]]:
        handle = self._add(prompt, new)
        tokens: list[int] = []
        times: list[Any] = []
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            while handle.can_read():
                tokens += next(iter(handle.read().values())).generated_ids
                times += [clock()] * (len(tokens) - len(times))
        return tokens, times

    def batch(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        handles = [self._add(prompt, new) for prompt in prompts]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]

    def _add(self, prompt: list[int], new: int) -> Any:
        config = self._genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        ids = self._openvino.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64))
        return self._pipeline.add_request(next(self._ids), ids, config)
