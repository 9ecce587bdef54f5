"""`tokenmill quantize`: make a smaller model, or tell what each way to do so would cost."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli import options
from tokenmill.cli.options import option
from tokenmill.cli.quantize_inputs import OpenedModel, open_model, spread_pieces, token_ids
from tokenmill.cli.quantize_report import Wanted, print_report
from tokenmill.cli.terminal import EVERY, note, progress, size
from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from tokenmill.quant.forms import Layout

_REPORT = "With --report"
_HOW = "How it is rounded"


def quantize(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = options.DEFAULT_MODEL,
    scheme: Annotated[
        str | None,
        option(
            "int4 (-g32, -g64, -g128, -zeros), int8, w8a8, fp8; per layer: int4,layers.0-3=int8. "
            "Unset: int4 (report: all of them)."
        ),
    ] = None,
    method: Annotated[
        str | None, option("rtn, gptq, awq or smoothquant; unset: what suits scheme and text (report: all that do).")
    ] = None,
    calibrate: Annotated[Path | None, option("A text like those the model will read.")] = None,
    out: Annotated[Path | None, option("A new or empty folder to write.", "--out", "-o")] = None,
    samples: Annotated[int | None, option("Pieces of the text; unset: 128 (report: 32).", min=1)] = None,
    length: Annotated[int, option("Tokens of each piece.", min=8)] = 512,
    lm_head: Annotated[str | None, option("The head's form; unset: it stays as it is.")] = None,
    dtype: Annotated[
        str | None, option("Of what stays floats, and of scales; unset: as in the checkpoint, or bfloat16.")
    ] = None,
    device: options.Device = None,
    clip: Annotated[bool, option("Search for scales with the least error.", panel=_HOW)] = True,
    act_order: Annotated[bool, option("gptq: columns with the largest inputs first.", panel=_HOW)] = True,
    alpha: Annotated[float, option("smoothquant: what the weights take over.", panel=_HOW, min=0, max=1)] = 0.5,
    static_inputs: Annotated[
        bool, option("w8a8, fp8: one input scale, from the text.", "--static-inputs", panel=_HOW)
    ] = False,
    report: Annotated[
        bool, option("Write no model: measure all forms, or --scheme.", "--report", panel=_REPORT)
    ] = False,
    text: Annotated[Path | None, option("The text that is predicted.", panel=_REPORT)] = None,
    tokens: Annotated[int, option("How much of it.", panel=_REPORT, min=64)] = 4096,
    only: Annotated[str, option("Forms with one of these words in them.", panel=_REPORT)] = "",
    speed: Annotated[bool, option("Measure tokens/s, too.", panel=_REPORT)] = True,
    gsm8k: Annotated[Path | None, option("GSM8K questions (JSONL).", panel=_REPORT)] = None,
    questions: Annotated[int, option("How many of them.", panel=_REPORT, min=1)] = 16,
    as_json: Annotated[bool, option("Print JSON.", "--json", panel=_REPORT)] = False,
    cache_dir: options.CacheDir = None,
) -> None:
    """Quantize a MODEL and write it as compressed-tensors, or --report what that would cost.

    tokenmill quantize default --scheme int4-g32 --method gptq --calibrate text.txt -o small/
    """
    from tokenmill.quant.forms import parse_form, parse_layout

    layout = parse_layout("int4" if scheme is None and not report else scheme)
    if lm_head is not None:
        layout = replace(layout, overrides=(*layout.overrides, ("lm_head", parse_form(lm_head))))
    how = {"clip": clip, "act_order": act_order, "alpha": alpha, "static_inputs": static_inputs}
    if report:
        for option, value in (("-o", out), ("--dtype", dtype), ("--device", device)):
            if value is not None:
                raise ConfigError(f"{option} is for writing a model, which --report does not; leave one of them out")
        shape = samples or 32, length
        print_report(
            Wanted(model, layout, method, how, text, calibrate, *shape, tokens, only, speed, gsm8k, questions, as_json)
        )
        return
    if out is None:
        raise ConfigError("where to? name a new folder with -o, or ask for --report")
    _refuse_what_reports_use(context)
    _write(model, layout, method, how, calibrate, (samples or 128, length), out, dtype, device)


def _write(
    model: str,
    layout: Layout,
    name: str | None,
    how: dict[str, Any],
    calibrate: Path | None,
    shape: tuple[int, int],
    out: Path,
    dtype: str | None,
    device: str | None,
) -> None:
    import torch

    from tokenmill.engine.choices import choose_device
    from tokenmill.quant.rounding import INPUTS
    from tokenmill.quant.tool.quantize import METHODS, Method, plan_forms, quantize_model
    from tokenmill.quant.tool.write import new_folder, write_model, write_tokenizer

    if name is not None and name not in METHODS:
        raise ConfigError(f"--method is {name!r}; there are {', '.join(METHODS)}")
    place = choose_device(device or "auto")
    opened = open_model(model)
    source, kept = opened.source, _dtype(dtype, opened)
    method = Method(name or _suiting(layout, calibrate), scale_dtype=kept, **how)
    forms, notes = plan_forms(source.spec, layout)
    if method.needs_text and calibrate is None:
        raise ConfigError(f"{method.name} needs to see what layers are given: name a text with --calibrate")
    if (name == "smoothquant" or method.static_inputs) and not any(form.kind in INPUTS for form in forms.values()):
        what = "smoothquant" if name == "smoothquant" else "--static-inputs"
        raise ConfigError(f"{what} is for forms with 8-bit inputs: --scheme w8a8 or fp8")
    ids = None
    if method.needs_text and calibrate is not None:
        samples, length = shape
        words = token_ids(opened.tokenizer, calibrate)
        ids = spread_pieces(words, samples, min(length, source.spec.max_positions), calibrate)
    elif calibrate is not None:
        note(f"({method.name} needs no text, and did not look at {calibrate})")
    with _sigterm_cleans_up(), new_folder(out) as folder:
        for line in notes:
            note(f"({line})")
        with progress(every=EVERY) as tell, torch.inference_mode():

            def layers_done(done: int, total: int) -> None:
                tell(done, total, f"quantizing with {method.name}, layers done")

            layers_done(0, source.spec.num_layers)
            layers = quantize_model(source, forms, method, ids, place, layers_done)
            write_model(source, forms, layers, folder, kept, method.static_inputs)
        write_tokenizer(opened.files, opened.checkpoint, folder)
    written = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    typer.echo(f"{opened.files.name} as {layout.name} ({method.name}) is in {out}: {size(written)}")


def _refuse_what_reports_use(context: typer.Context) -> None:
    for one in context.command.params:
        own = getattr(one, "rich_help_panel", None) == _REPORT and one.name is not None
        if own and context.params[one.name] != one.default:
            hint = "name a text to calibrate with as --calibrate" if one.name == "text" else "leave it out"
            raise ConfigError(f"{one.opts[0]} is for --report, which writes no model; {hint}")


@contextmanager
def _sigterm_cleans_up() -> Iterator[None]:
    """As Ctrl-C does: who is told to leave leaves nothing half done behind."""

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # some tell twice, and the second time would break off cleaning
        sys.exit(128 + signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _suiting(layout: Layout, calibrate: Path | None) -> str:
    kind = layout.default.kind if layout.default else None
    if calibrate is None or kind not in ("int4", "w8a8"):
        return "rtn"
    return "gptq" if kind == "int4" else "smoothquant"


def _dtype(wanted: str | None, opened: OpenedModel) -> torch.dtype:
    import torch

    name = wanted or opened.source.spec.dtype or "bfloat16"
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"--dtype is {name!r}; it must be float32, bfloat16 or float16")
    found: torch.dtype = getattr(torch, name)
    return found
