"""Drives tokenmill for the comparison, through the offline API and with the settings that it solves itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any


def prepare(source: Path, variant: str, folder: Path) -> Path:
    return source


class PeerEngine:
    def __init__(self, model: str, variant: str, threads: int, rows: int, length: int) -> None:
        from tokenmill import LLM, SamplingParams, __version__

        self.version = f"tokenmill {__version__}"
        # Without drafts: the prompts are made up, and the others have none
        self._llm = LLM(model, device="cpu", max_num_seqs=rows, max_model_len=length, speculation="off")
        self._sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False)

    def single(self, prompt: list[int], new: int, clock: Callable[[], Any]) -> tuple[list[int], list[Any]]:
        times: list[Any] = []
        tokens: list[int] = []
        for output in self._llm.stream(prompt, replace(self._sampling, max_tokens=new)):
            tokens = list(output.outputs[0].token_ids)
            times += [clock()] * (len(tokens) - len(times))
        return tokens, times

    def batch(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        several: list[Any] = list(prompts)
        outputs = self._llm.generate(several, replace(self._sampling, max_tokens=new), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]
