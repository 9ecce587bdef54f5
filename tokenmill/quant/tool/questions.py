"""Questions with a number for an answer: how many a model solves, as it is and after quantization."""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from tokenmill.model.spec import DecoderSpec
from tokenmill.model.weights.checkpoint import Checkpoint
from tokenmill.model.weights.source import ModelFiles
from tokenmill.quant.forms import parse_layout
from tokenmill.quant.tool.layer_source import LayerSource
from tokenmill.quant.tool.quantize import plan_forms, quantize_model
from tokenmill.quant.tool.report import SCALE_DTYPE, Candidate
from tokenmill.quant.tool.write import write_model, write_tokenizer

ANSWER_TOKENS = 256  # room for the working
ROOM = 1024  # tokens of a question and its answer
ASK = "Solve the problem step by step. End with a line that says: The answer is NUMBER.\n\n"


class Opened(Protocol):
    """A model's files, opened."""

    @property
    def files(self) -> ModelFiles: ...
    @property
    def checkpoint(self) -> Checkpoint: ...
    @property
    def source(self) -> LayerSource: ...


def solved(model: str, spec: DecoderSpec, questions: list[dict[str, str]], **options: Any) -> int:
    """How many answers end in the number that the data set gives."""
    from tokenmill import LLM, SamplingParams

    with LLM(model, max_model_len=min(ROOM, spec.max_positions), **options) as llm:
        chats = [[{"role": "user", "content": ASK + question["question"]}] for question in questions]
        answers = llm.chat(chats, SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0), use_tqdm=False)
    texts = [answer.outputs[0].text for answer in answers]
    return sum(last_number(text) == last_number(one["answer"]) for text, one in zip(texts, questions))


def solved_by(
    model: str,
    opened: Opened,
    candidate: Candidate,
    calibration: torch.Tensor,  # [samples, length]
    questions: list[dict[str, str]],
) -> int:
    """By a form of the model: written to a folder of its own, and loaded from there as anybody would."""
    source = opened.source
    if candidate.scheme is None:
        return solved(model, source.spec, questions, quantization="fp32", kv_cache_dtype=candidate.kv)
    forms, _ = plan_forms(source.spec, parse_layout(candidate.scheme))
    method = replace(candidate.method, scale_dtype=SCALE_DTYPE)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        layers = quantize_model(source, forms, method, calibration, torch.device("cpu"))
        write_model(source, forms, layers, folder, SCALE_DTYPE, method.static_inputs)
        write_tokenizer(opened.files, opened.checkpoint, folder)
        return solved(name, source.spec, questions)


def last_number(text: str) -> float | None:
    found = re.findall(r"-?\d[\d,]*\.?\d*", text)
    return float(found[-1].replace(",", "").rstrip(".")) if found else None
