"""What each way to quantize a model costs in quality, and what it saves: the table of `tokenmill quantize --report`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from tokenmill.errors import TokenmillError
from tokenmill.model.spec import DecoderSpec
from tokenmill.ops.kv_forms import KV_FORMS
from tokenmill.quant.forms import FLOATS, Layout, WeightForm, parse_layout
from tokenmill.quant.rounding import INPUTS
from tokenmill.quant.tool.evaluate import CPU, Judge, Quality, StoreBuilder
from tokenmill.quant.tool.layer_source import LayerSource
from tokenmill.quant.tool.quantize import Method, plan_forms, quantize_model

SPEED_TOKENS = 64  # tokens of the answer whose speed is measured
SLOW = 4.0  # tokens per second
SCALE_DTYPE = torch.bfloat16  # of scales in the files that are written, and so of those that are judged
AS_LOADED = Method(clip=False)  # what the engine does itself when it loads floats


@dataclass(frozen=True)
class Candidate:
    """One line of the report."""

    name: str
    scheme: str | None = None  # as in `quantization=`; None: float32
    method: Method = AS_LOADED
    kv: str | None = None  # form of the KV cache


@dataclass(frozen=True)
class Line:
    candidate: Candidate
    quality: Quality
    bytes: int  # of the weights; for a quantized KV cache: of one token in it
    seconds: float  # that quantizing took
    speed: float | None = None  # tokens per second of one request here
    solved: int | None = None  # GSM8K questions


BASELINE = Candidate("fp32")
SCHEMES = ("int8", "fp8", "w8a8", "int4-g128", "int4-g32")  # that are measured where none is asked for


def candidates() -> list[Candidate]:
    """All but the baseline."""
    found = [one for scheme in SCHEMES for one in ways_of(parse_layout(scheme))]
    return found + [Candidate(f"kv {name}", kv=name) for name in KV_FORMS]


def ways_of(layout: Layout) -> list[Candidate]:
    """A scheme with each method that may suit it."""
    scheme, kinds = layout.name, layout.kinds
    if "int4" in kinds:
        return [
            Candidate(f"{scheme} rtn", scheme),
            Candidate(f"{scheme} rtn, clipped", scheme, Method()),
            Candidate(f"{scheme} awq", scheme, Method("awq")),
            Candidate(f"{scheme} gptq", scheme, Method("gptq")),
        ]
    found = [Candidate(scheme, scheme)]
    if "w8a8" in kinds:
        found.append(Candidate(f"{scheme} smoothquant", scheme, Method("smoothquant", clip=False)))
    return found


def has_small_inputs(candidate: Candidate) -> bool:
    """Whether any layer's inputs are rounded, too."""
    return not parse_layout(candidate.scheme).kinds.isdisjoint(INPUTS)


def measure(
    source: LayerSource,
    chosen: Iterable[Candidate],
    ids: torch.Tensor,  # [rows, length]: what is predicted
    calibration: torch.Tensor,  # [samples, length]: other text
    tell: Callable[[int, int, str], None],
) -> Iterator[Line]:
    """Quality and bytes, candidate by candidate; the baseline is always computed, for the others to be held against."""
    spec = source.spec
    baseline = StoreBuilder(source).build()
    judge = Judge(spec, baseline, ids)
    for candidate in chosen:
        began, store = time.monotonic(), baseline
        forms: dict[str, WeightForm] = {}
        if candidate.scheme is not None:
            forms, _ = plan_forms(spec, parse_layout(candidate.scheme))
            builder = StoreBuilder(source)
            method = replace(candidate.method, scale_dtype=SCALE_DTYPE)
            layers = quantize_model(source, forms, method, calibration, CPU)
            for number, layer in enumerate(layers, 1):
                builder.add(layer)
                tell(number, spec.num_layers, f"{candidate.name}: quantizing")
            store = builder.build()
        took, rows = time.monotonic() - began, 0

        def judged(name: str = candidate.name) -> None:
            nonlocal rows
            rows += 1
            tell(rows, len(ids), f"{name}: reading the text")

        quality = judge.judge(store, candidate.kv, judged)
        size = kv_bytes(spec, candidate.kv) if candidate.kv else weight_bytes(spec, forms)
        yield Line(candidate, quality, size, took)


def weight_bytes(spec: DecoderSpec, forms: dict[str, WeightForm]) -> int:
    """Of all weights; with any form, the floats beside are 16 bits wide."""
    wide, total = (2 if forms else 4), 0
    for name, param in spec.parameters().items():
        form = forms.get(name)
        if form is None:
            total += param.numel * wide
            continue
        rows, columns = math.prod(param.shape[:-1]), param.shape[-1]
        if form.kind in FLOATS:
            total += rows * columns * getattr(torch, FLOATS[form.kind]).itemsize
            continue
        groups = rows * columns // (form.group or columns)
        bits = 4 if form.kind == "int4" else 8
        total += rows * columns * bits // 8 + groups * SCALE_DTYPE.itemsize + (groups * bits // 8 if form.zeros else 0)
    return total


def kv_bytes(spec: DecoderSpec, form: str) -> int:
    return spec.kv_bytes_per_token(4, KV_FORMS[form])


def table(lines: list[Line], questions: int) -> list[str]:
    """Markdown."""
    head = ["form", "perplexity", "change", "KL", "top-1", "bytes", "tokens/s", *(["GSM8K"] if questions else [])]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    for line in lines:
        speed = "-" if line.speed is None else f"{line.speed:.1f}"
        score = "-" if line.solved is None else f"{line.solved}/{questions}"
        rows.append([*cells(line), speed, *([score] if questions else [])])
    return [f"| {' | '.join(row)} |" for row in rows]


def cells(line: Line) -> list[str]:
    """What is known of every line: name, perplexity, change, KL, agreement and bytes."""
    quality = line.quality
    size = f"{line.bytes:,} per token" if line.candidate.kv else f"{line.bytes / 1e6:.1f} MB"
    if line.candidate.scheme is None and line.candidate.kv is None:  # the baseline itself
        return [line.candidate.name, f"{quality.perplexity:.3f}", "", "", "", size]
    change = f"{quality.change:+.2%} ± {quality.error:.2%}"
    return [
        line.candidate.name,
        f"{quality.perplexity:.3f}",
        change,
        f"{quality.divergence:.4f}",
        f"{quality.agreement:.1%}",
        size,
    ]


def as_json(lines: list[Line]) -> list[dict[str, Any]]:
    return [
        {
            "name": line.candidate.name,
            "scheme": line.candidate.scheme,
            "method": line.candidate.method.name if line.candidate.scheme else None,
            "kv": line.candidate.kv,
            **asdict(line.quality),
            "bytes": line.bytes,
            "seconds": line.seconds,
            "tokens_per_second": line.speed,
            "solved": line.solved,
        }
        for line in lines
    ]


def speed(model: str, spec: DecoderSpec, candidate: Candidate) -> tuple[float | None, str]:
    """Tokens per second of one request in the engine, its weights rounded while loading; or why there are none."""
    from tokenmill import LLM, SamplingParams

    options: dict[str, Any] = {"quantization": "fp32"} | ({"kv_cache_dtype": candidate.kv} if candidate.kv else {})
    if candidate.scheme is not None:  # layer by layer, since some may have a smaller group than was asked for
        forms, _ = plan_forms(spec, parse_layout(candidate.scheme))
        options["quantization"] = {name: form.name for name, form in forms.items()}
    try:
        with LLM(model, max_num_seqs=1, max_model_len=512, **options) as llm:

            def once(count: int) -> float:
                params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
                began = time.perf_counter()
                llm.generate("The mill stood where the river bends, and", params, use_tqdm=False)
                return count / (time.perf_counter() - began)

            first = once(SPEED_TOKENS // 8)
            if first < SLOW:  # a form without kernels here: nobody waits for more of it
                return first, ""
            return max(once(SPEED_TOKENS) for _ in range(3)), ""
    except TokenmillError as error:
        return None, str(error)
