"""`tokenmill train-draft`: train a draft head for a model, on text that the model writes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import options
from tokenmill.cli.options import option
from tokenmill.cli.terminal import check_writable, note

_HEAD = "The head"
_HOW = "The training"


def train_draft(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = options.DEFAULT_MODEL,
    out: Annotated[Path, option("The file to write.", "--out", "-o")] = Path("draft-head.safetensors"),
    tokens: Annotated[
        str | None, option("What the model writes to be trained on: 20k, 10M. Unset: 10M, on a CPU 200k.")
    ] = None,
    minutes: Annotated[float, option("Of training.", panel=_HOW)] = 8.0,
    steps: Annotated[int | None, option("Instead of minutes.", panel=_HOW, min=1)] = None,
    text_minutes: Annotated[float | None, option("Begin no more texts after so many.", panel=_HOW)] = None,
    data: Annotated[Path | None, option("A file of texts: read if it is there, written if not.", panel=_HOW)] = None,
    batch: Annotated[int | None, option("Tokens of a step; unset: 16384, on a CPU 1024.", panel=_HOW, min=1)] = None,
    learning_rate: Annotated[float, option("At its highest.", panel=_HOW)] = 2e-3,
    seed: Annotated[int, option("Of texts and training.", panel=_HOW)] = 0,
    vocabulary: Annotated[int, option("Tokens that can be drafted.", panel=_HEAD, min=1)] = 8192,
    state: Annotated[int | None, option("Width of its state; unset: as the model's.", panel=_HEAD, min=1)] = None,
    inner: Annotated[int, option("Width of its MLPs.", panel=_HEAD, min=1)] = 1024,
    kv_layer: Annotated[
        str | None,
        option("The model's layer whose keys and values it attends to; unset: one that suits; off: none.", panel=_HEAD),
    ] = None,
    depths: Annotated[int, option("Drafts in a row that it is trained for.", panel=_HEAD, min=1)] = 5,
    device: options.Device = None,
    load_format: options.LoadFormat = None,
    cache_dir: options.CacheDir = None,
) -> None:
    """Train a draft head for a MODEL: it guesses the next tokens, and the engine verifies several at once.

    tokenmill train-draft default -o head.safetensors
    """
    check_writable(out, data)
    from tokenmill.draft.optimize import Schedule
    from tokenmill.draft.train import TrainOptions, count, default_batch, default_tokens, layer
    from tokenmill.draft.train import train_draft as train

    place = device or "auto"
    schedule = Schedule(
        minutes=minutes,
        steps=steps,
        depths=depths,
        batch=batch or default_batch(place),
        learning_rate=learning_rate,
        seed=seed,
    )
    train(
        TrainOptions(
            model,
            out,
            tokens=default_tokens(place) if tokens is None else count(tokens),
            text_minutes=text_minutes,
            data=data,
            vocabulary=vocabulary,
            state=state,
            inner=inner,
            kv_layer=None if kv_layer is None else layer(kv_layer),
            schedule=schedule,
            device=place,
            load_format=load_format or "auto",
            cache_dir=cache_dir,
        ),
        note,
    )
    typer.echo(f"a draft head for {model} is in {out}")
