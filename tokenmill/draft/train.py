"""Trains a draft head for a model: texts, hidden states, training, judgement, file. Also a plain command."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tokenmill import __version__
from tokenmill.draft.data import ANSWER_TEMPERATURES, Texts, draft_vocabulary, write_texts
from tokenmill.draft.evaluate import evaluate
from tokenmill.draft.optimize import Schedule, Sizes, new_head, optimize
from tokenmill.draft.states import runner_of, states_of
from tokenmill.engine.build import Built
from tokenmill.engine.choices import choose_device
from tokenmill.errors import ConfigError, TokenmillError
from tokenmill.llm import LLM
from tokenmill.model.draft_head import DraftHead, can_attend, default_kv_layer, fingerprint
from tokenmill.model.spec import DecoderSpec

HELD_OUT = 0.02  # of the texts, for the judgement
LEAST_HELD_OUT = 6  # texts: two of each temperature
GPU_ROWS = 512
GPU_KV_BYTES = 16 << 30
CPU_BATCH = 1024  # entries of a training step
CPU_TOKENS = 200_000
STATES_SHARE = 0.6  # of a GPU's free memory, for hidden states, keys and values
NO_LAYER = -1  # for --kv-layer: the head does not attend
ENTRY_BYTES, TOKEN_BYTES = 72, 16  # of all else that is kept of a written token, and of any

Tell = Callable[[str], None]


@dataclass(frozen=True)
class TrainOptions:
    model: str
    out: Path
    tokens: int = 10_000_000
    text_minutes: float | None = None  # after which no more texts are begun, though tokens are missing
    data: Path | None = None  # texts are read from here, or kept here
    vocabulary: int = 8192
    state: int | None = None  # unset: the target's hidden width
    inner: int = 1024
    kv_layer: int | None = None  # of the target, that the head attends to; unset: one that suits; NO_LAYER: none
    schedule: Schedule = field(default_factory=Schedule)
    device: str = "auto"
    cache_dir: str | None = None
    load_format: str = "auto"


def train_draft(options: TrainOptions, tell: Tell) -> DraftHead:
    """The head as it was written to its file. It is kept even if its judgement fails."""
    _check(options)
    on_gpu = choose_device(options.device).type == "cuda"
    clock = _Clock(tell)
    clock.tell(_announcement(options, on_gpu))
    with clock.phase("loading the model"):
        llm = LLM(options.model, seed=options.schedule.seed, **_engine_options(options, on_gpu))
    try:
        return _train(options, llm, clock)
    finally:
        llm.shutdown()


def _train(options: TrainOptions, llm: LLM, clock: _Clock) -> DraftHead:
    built, schedule = llm._built, options.schedule
    decoder = runner_of(built).decoder
    kv_layer = kv_layer_of(built.spec, options.kv_layer)
    clock.tell(f"the head attends to {'nothing' if kv_layer is None else f'what layer {kv_layer} caches'}")
    with clock.phase("writing texts"):
        texts = _texts(options, llm, built, clock.tell)
    texts = _fitting(texts, built, kv_layer is not None, clock.tell)
    held_out = min(len(texts) - 1, max(LEAST_HELD_OUT, int(HELD_OUT * len(texts))))
    if held_out < 1:
        raise ConfigError(f"there are {len(texts)} texts, too few to train and to judge; raise --tokens")
    tokenizer = llm.get_tokenizer()
    ends = tuple(tokenizer.eos_ids if tokenizer is not None else ()) or built.spec.eos_ids
    with clock.phase("computing hidden states"):
        training = states_of(built, texts.part(0, len(texts) - held_out), kv_layer)
        unseen = states_of(built, texts.part(len(texts) - held_out, len(texts)), kv_layer)
    ids = draft_vocabulary(texts.part(0, len(texts) - held_out), built.spec, ends, options.vocabulary)
    counts = texts.answer_counts(built.spec.vocab_size)
    covered = float(counts[ids.long()].sum() / counts.sum())
    clock.tell(f"{len(ids)} tokens can be drafted, {covered:.1%} of what is in the answers")
    sizes = Sizes(options.state or built.spec.hidden, options.inner)
    clock.tell(_prediction(len(training), sizes, built, len(ids), kv_layer is not None, schedule))
    head = new_head(decoder, training, ids, sizes, schedule.seed, kv_layer)
    with clock.phase("judging the untrained head"):
        before = evaluate(head, decoder, unseen, schedule.depths)
    with clock.phase("training"):
        keep = lambda unfinished: unfinished.save(options.out)  # noqa: E731
        head, trained = optimize(head, decoder, training, schedule, clock.tell, keep)
    recipe = {
        "tokenmill": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if training.hidden.is_cuda else "cpu",
        "tokens": texts.num_written,
        "texts": len(texts),
        "temperatures": list(ANSWER_TEMPERATURES),
        "schedule": asdict(schedule),
        "sizes": asdict(sizes),
        "kv_layer": kv_layer,
        "draft_vocabulary": len(ids),
        "covered": round(covered, 4),
        "training": dict(trained),
    }
    head = replace(head, recipe=recipe)
    head.save(options.out)  # whatever comes of its judgement
    clock.tell(f"wrote {options.out} ({options.out.stat().st_size / 1e6:.1f} MB)")
    with clock.phase("judging"):
        trained_as = evaluate(head, decoder, unseen, schedule.depths)
        stored = evaluate(head.rounded(), decoder, unseen, schedule.depths)
    for name, found in (("untrained", before), ("trained", trained_as), ("as stored", stored)):
        for kind, one in found.items():
            clock.tell(f"{name:9} {kind:7} ({one.starts} chains): {one.line()}")
    measured = {kind: asdict(one) for kind, one in stored.items()}
    head = replace(head, recipe={**recipe, "acceptance": measured})
    head.save(options.out)
    return head


def _texts(options: TrainOptions, llm: LLM, built: Built, tell: Tell) -> Texts:
    mark = fingerprint(runner_of(built).decoder.weights.final_norm)
    if options.data is not None and options.data.exists():
        texts = Texts.load(options.data, built.spec, mark)
        tell(f"{len(texts)} texts of {texts.num_written} tokens from {options.data}")
        return texts
    texts = write_texts(
        llm,
        built.spec,
        options.tokens,
        options.schedule.seed,
        built.settings.max_len,
        tell,
        options.text_minutes,
    )
    if options.data is not None:
        texts.save(options.data, mark)
    return texts


def kv_layer_of(spec: DecoderSpec, asked: int | None) -> int | None:
    """The layer that a head attends to, as it was asked for; None: it does not attend."""
    if asked is None:
        return default_kv_layer(spec)
    if asked != NO_LAYER and not can_attend(spec, asked):
        fitting = [one for one in range(spec.num_layers) if can_attend(spec, one)]
        known = f"these do: {', '.join(map(str, fitting))}" if fitting else "this model has none: use off"
        raise ConfigError(f"--kv-layer is {asked}, which caches no keys and values of the whole text; {known}")
    return None if asked == NO_LAYER else asked


def _fitting(texts: Texts, built: Built, attends: bool, tell: Tell) -> Texts:
    """As many of the texts as a GPU can keep states of, beside what training takes."""
    device = runner_of(built).device
    if device.type != "cuda":
        return texts
    free, _ = torch.cuda.mem_get_info(device)
    needed = texts.num_written * (2 * built.spec.hidden + ENTRY_BYTES)
    needed += len(texts.tokens) * (TOKEN_BYTES + (4 * built.spec.kv_size if attends else 0))
    share = STATES_SHARE * free / needed
    if share >= 1:
        return texts
    tell(f"there is memory for the states of {share:.0%} of {texts.num_written} tokens: the rest is left out")
    return texts.part(0, max(1, int(len(texts) * share)))


def _announcement(options: TrainOptions, on_gpu: bool) -> str:
    known = options.data is not None and options.data.exists()
    texts = f"its texts are in {options.data}" if known else f"it writes {options.tokens:,} tokens itself"
    length = f"{options.schedule.steps} steps" if options.schedule.steps else f"{options.schedule.minutes:g} minutes"
    advice = "" if on_gpu else "; a CPU is slow at both: take a GPU where a good head is wanted"
    return f"a draft head for {options.model}: {texts}, then training takes {length}{advice}"


def _prediction(entries: int, sizes: Sizes, built: Built, vocabulary: int, attends: bool, schedule: Schedule) -> str:
    """What a pass over the data takes, so that nobody waits for what cannot end in time."""
    block = sizes.inner * (3 * (sizes.state + built.spec.hidden) + 3 * sizes.state)
    attention = 2 * sizes.state * built.spec.heads * built.spec.head_dim if attends else 0
    flops = 6.0 * schedule.depths * (block + vocabulary * sizes.state) + 2.0 * vocabulary * built.spec.hidden
    flops += 6.0 * attention
    weights = block + attention + vocabulary * sizes.state + sizes.state * built.spec.hidden
    limit = f"{schedule.steps} steps" if schedule.steps else f"{schedule.minutes:g} minutes"
    return (
        f"training on {entries} tokens: {flops * entries / 1e12:.3g} TFLOP per pass over them, for {limit}; "
        f"{weights:,} weights"
    )


def _engine_options(options: TrainOptions, on_gpu: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "load_format": options.load_format,
        "device": options.device,
        "speculation": "off",  # all rows are busy
    }
    if options.cache_dir is not None:
        found["cache_dir"] = options.cache_dir
    if on_gpu:  # what is left is for hidden states
        _, memory = torch.cuda.mem_get_info(choose_device(options.device))
        found |= {"max_num_seqs": GPU_ROWS, "kv_cache_memory": min(GPU_KV_BYTES, memory // 4)}
    return found


def _check(options: TrainOptions) -> None:
    schedule = options.schedule
    numbers = {
        "tokens": options.tokens,
        "vocabulary": options.vocabulary,
        "inner": options.inner,
        "depths": schedule.depths,
        "batch": schedule.batch,
        "minutes": schedule.minutes,
        "learning-rate": schedule.learning_rate,
    }
    for name, value in numbers.items():
        if value <= 0:
            raise ConfigError(f"--{name} is {value}; it must be more than 0")
    if min(schedule.soft_weight, schedule.match_weight) < 0 or not schedule.soft_weight + schedule.match_weight:
        given = f"{schedule.soft_weight:g} and {schedule.match_weight:g}"
        raise ConfigError(f"--soft-weight and --match-weight are {given}; one must be more than 0, and none less")
    if not options.out.resolve().parent.is_dir():
        raise ConfigError(f"--out is {options.out}, and there is no such folder; make it, or name another file")


class _Clock:
    """Says what is under way and how long it took."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self._began = tell, time.monotonic()

    def tell(self, text: str) -> None:
        self._tell(f"[{time.monotonic() - self._began:6.1f} s] {text}")

    @contextmanager
    def phase(self, what: str) -> Iterator[None]:
        self.tell(f"{what} ...")
        began = time.monotonic()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.tell(f"{what}: {time.monotonic() - began:.1f} s")


def count(text: str) -> int:
    """20k -> 20000, 10M -> 10000000."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMbB]?)", text)
    if found is None:
        raise ConfigError(f"{text!r} is no number of tokens; write 20000, 20k or 10M")
    return int(float(found[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}[found[2].lower()])


def layer(text: str) -> int:
    """20 -> 20, off -> NO_LAYER."""
    if text in ("off", str(NO_LAYER)):
        return NO_LAYER
    if not text.isdecimal():
        raise ConfigError(f"--kv-layer is {text!r}; write the number of a layer, or off")
    return int(text)


def default_batch(device: str) -> int:
    return Schedule.batch if choose_device(device).type == "cuda" else CPU_BATCH


def default_tokens(device: str) -> int:
    return TrainOptions.tokens if choose_device(device).type == "cuda" else CPU_TOKENS


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tokenmill.draft.train", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--tokens", help="that the model writes to be trained on: 20k, 10M")
    parser.add_argument("--text-minutes", type=float, help="begin no more texts after so many minutes")
    parser.add_argument("--minutes", type=float, default=Schedule.minutes, help="of training")
    parser.add_argument("--steps", type=int, help="of training, instead of minutes")
    parser.add_argument("--data", type=Path, help="a file of texts: read if it is there, written if not")
    parser.add_argument("--vocabulary", type=int, default=TrainOptions.vocabulary, help="tokens that can be drafted")
    parser.add_argument("--state", type=int, help="width of the head's state")
    parser.add_argument("--inner", type=int, default=TrainOptions.inner, help="width of its MLPs")
    parser.add_argument("--kv-layer", help="of the model, whose keys and values the head attends to; off: none")
    parser.add_argument("--depths", type=int, default=Schedule.depths, help="drafts in a row that are trained")
    parser.add_argument("--batch", type=int, help="tokens of a training step")
    parser.add_argument("--learning-rate", type=float, default=Schedule.learning_rate)
    parser.add_argument("--soft-weight", type=float, default=Schedule.soft_weight, help="of distributions in the loss")
    parser.add_argument("--match-weight", type=float, default=Schedule.match_weight, help="of drafts that hold in it")
    parser.add_argument("--seed", type=int, default=Schedule.seed)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-format", default="auto")
    given = parser.parse_args(words)
    try:
        schedule = Schedule(
            minutes=given.minutes,
            steps=given.steps,
            depths=given.depths,
            batch=given.batch or default_batch(given.device),
            learning_rate=given.learning_rate,
            soft_weight=given.soft_weight,
            match_weight=given.match_weight,
            seed=given.seed,
        )
        options = TrainOptions(
            given.model,
            given.out,
            tokens=count(given.tokens) if given.tokens else default_tokens(given.device),
            text_minutes=given.text_minutes,
            data=given.data,
            vocabulary=given.vocabulary,
            state=given.state,
            inner=given.inner,
            kv_layer=None if given.kv_layer is None else layer(given.kv_layer),
            schedule=schedule,
            device=given.device,
            load_format=given.load_format,
        )
        train_draft(options, lambda text: print(text, flush=True))
    except TokenmillError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
