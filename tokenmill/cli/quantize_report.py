"""`tokenmill quantize --report`: runs the measurements, and prints the table."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tokenmill.cli.quantize_inputs import first_pieces, gsm8k_questions, open_model, spread_pieces, token_ids
from tokenmill.cli.terminal import EVERY, note, progress
from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from tokenmill.cli.quantize_inputs import OpenedModel
    from tokenmill.quant.forms import Layout
    from tokenmill.quant.tool.quantize import Method
    from tokenmill.quant.tool.report import Candidate, Line

WINDOW = 512  # tokens that are predicted together


@dataclass(frozen=True)
class Wanted:
    model: str
    layout: Layout  # nothing in it: every form
    method: str | None
    how: dict[str, Any]  # of the fields of Method
    text: Path | None
    calibrate: Path | None
    samples: int
    length: int
    tokens: int
    only: str
    speed: bool
    gsm8k: Path | None
    questions: int
    as_json: bool


def print_report(wanted: Wanted) -> None:
    import torch

    from tokenmill.quant.forms import parse_layout
    from tokenmill.quant.tool.quantize import plan_forms
    from tokenmill.quant.tool.report import as_json, cells, measure, table

    if wanted.text is None:
        raise ConfigError("a report needs a text to predict: name one with --text")
    # What a model cannot have and what cannot be asked is told before anything is measured.
    chosen = _chosen(wanted)
    asked = [] if wanted.gsm8k is None else gsm8k_questions(wanted.gsm8k, wanted.questions)
    opened = _with_a_head(open_model(wanted.model), wanted)
    for scheme in dict.fromkeys(one.scheme for one in chosen if one.scheme is not None):
        for line in plan_forms(opened.source.spec, parse_layout(scheme))[1]:
            note(f"({scheme}: {line})")
    ids, calibration = _texts(wanted, opened)
    lines: list[Line] = []
    with progress(every=EVERY) as tell, torch.inference_mode():
        for measured in measure(opened.source, chosen, ids, calibration, tell):
            lines.append(measured)
            note(", ".join(cell for cell in cells(measured) if cell))
    if wanted.speed:
        lines = _with_speed(wanted.model, opened, lines)
    if asked:
        lines = _with_questions(wanted.model, opened, lines, calibration, asked)
    count = len(asked) if any(line.solved is not None for line in lines) else 0
    typer.echo(json.dumps(as_json(lines), indent=1) if wanted.as_json else "\n".join(table(lines, count)))


def _with_a_head(opened: OpenedModel, wanted: Wanted) -> OpenedModel:
    """A head that is the embedding cannot be rounded in a model that is written; here it can, on its own."""
    from tokenmill.quant.tool.layer_source import untied

    if not opened.source.spec.tie_embeddings or all(name != "lm_head" for name, _ in wanted.layout.overrides):
        return opened
    if wanted.gsm8k is not None:
        raise ConfigError(
            "this model's head is its embedding: rounded alone it answers no questions; leave out --gsm8k"
        )
    note("(this model's head is its embedding: it is measured as a matrix of its own, and the embedding stays)")
    return replace(opened, source=untied(opened.source))


def _chosen(wanted: Wanted) -> list[Candidate]:
    """The baseline, and the forms that --scheme, --method and --only leave."""
    from tokenmill.quant.forms import Layout
    from tokenmill.quant.tool.quantize import METHODS
    from tokenmill.quant.tool.report import BASELINE, candidates, ways_of

    if wanted.method is not None and wanted.method not in METHODS:
        raise ConfigError(f"--method is {wanted.method!r}; there are {', '.join(METHODS)}")
    known = candidates() if wanted.layout == Layout() else ways_of(wanted.layout)
    words = [word.strip() for word in wanted.only.split(",") if word.strip()]
    found = [one for one in known if not words or any(word in one.name for word in words)]
    if wanted.method is not None:
        found = [one for one in found if one.scheme is not None and one.method.name == wanted.method]
    if not found:
        given = [f"--only is {wanted.only!r}"] if words else []
        given += [f"--method is {wanted.method!r}"] if wanted.method else []
        raise ConfigError(f"{' and '.join(given)}; there are {', '.join(one.name for one in (BASELINE, *known))}")
    return [BASELINE, *(replace(one, method=_method(one, wanted.how)) for one in found)]


def _method(one: Candidate, how: dict[str, Any]) -> Method:
    """As asked for, where it means something: plain rounding is not clipped, and few forms have inputs of 8 bits."""
    from tokenmill.quant.tool.report import has_small_inputs

    fits = {"clip": one.method.clip and how["clip"], "static_inputs": how["static_inputs"] and has_small_inputs(one)}
    return replace(one.method, **how | fits)


def _texts(wanted: Wanted, opened: OpenedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """What is predicted, and what is calibrated with: another text, or the part of the same one that is not judged."""
    assert wanted.text is not None
    window = min(WINDOW, wanted.tokens, opened.source.spec.max_positions)
    judged = token_ids(opened.tokenizer, wanted.text)
    ids = first_pieces(judged, wanted.tokens // window, window, wanted.text)
    path = wanted.calibrate or wanted.text
    other = token_ids(opened.tokenizer, path) if wanted.calibrate else judged[ids.numel() :]
    return ids, spread_pieces(other, wanted.samples, min(wanted.length, opened.source.spec.max_positions), path)


def _with_speed(model: str, opened: OpenedModel, lines: list[Line]) -> list[Line]:
    """Methods differ in codes, not in form: each form is measured once."""
    from tokenmill.quant.tool.report import speed

    known: dict[tuple[str | None, str | None], float | None] = {}
    for line in lines:
        key = line.candidate.scheme, line.candidate.kv
        if key not in known:
            known[key], why = speed(model, opened.source.spec, line.candidate)
            if why:
                note(f"({line.candidate.name} has no speed here: {why})")
    return [replace(line, speed=known[line.candidate.scheme, line.candidate.kv]) for line in lines]


def _with_questions(
    model: str, opened: OpenedModel, lines: list[Line], calibration: torch.Tensor, asked: list[dict[str, str]]
) -> list[Line]:
    """The answers of every form, if the model as it is can answer any."""
    from tokenmill.quant.tool.questions import solved, solved_by

    base = solved(model, opened.source.spec, asked, quantization="fp32")
    if base == 0:
        note(f"(GSM8K: the model as it is solves none of {len(asked)} questions: nothing can be compared)")
        return lines
    done = []
    for line in lines:
        plain = line.candidate.scheme is None and line.candidate.kv is None
        found = base if plain else solved_by(model, opened, line.candidate, calibration, asked)
        note(f"{line.candidate.name}: {found} of {len(asked)} questions")
        done.append(replace(line, solved=found))
    return done
