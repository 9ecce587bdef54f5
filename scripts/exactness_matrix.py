"""Runs every technique together with every way of scheduling, compares the answers, and writes docs/exactness.md.

    python scripts/exactness_matrix.py                      # the page, in about two minutes on two cores
    python scripts/exactness_matrix.py --mixes 20 --only int8 "kv fp8" --no-change --no-drafts --page ""
    python scripts/exactness_matrix.py --only --no-change   # the matrix of drafts alone, the rest stays

Mixes and ways are those of tests/engine/test_exactness_quant.py. Exits with 1 where answers differ that must not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import tempfile
import time
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "speculation"), str(ROOT / "tests" / "engine")]

from drafts_matrix import COLUMNS, Cell, Matrix, applies, drafts_nothing  # noqa: E402
from drafts_matrix import ROWS as PROPOSERS  # noqa: E402
from exactness_ways import QUANTIZED, WAYS, Engines, Outcome, Subject, write_model  # noqa: E402

from tokenmill import LLM, SamplingParams  # noqa: E402
from tokenmill.errors import TokenmillError  # noqa: E402
from tokenmill.outputs import LogprobTable  # noqa: E402

QUALITY = ROOT / "docs" / "quantization.md"
PROMPTS = (
    "The water wheel turns because", "A prime number is a number that", "To bake bread, you first",
    "The moon is far away, and", "Bees make honey from", "The capital of France is",
)  # fmt: skip
ANSWER = 40  # tokens
# What stands on the default model for forms per layer of a small one.
PER_LAYER = {"quantization": "int4-g32-zeros,layers.0-9.qkv=int8,layers.0-9.o=w8a8,layers.10-29.gate_up=fp8"}
HALVES = {"quantization": "layers.0-14=bf16", "ops": "reference"}


@dataclass(frozen=True)
class Row:
    """A technique: how it is switched on, and what it claims."""

    subject: Subject
    claim: str = "identical"
    plain: bool = False  # compared with the plain path of floats, not with its own
    change: dict[str, Any] = field(default_factory=dict)  # on the default model, for what is bounded
    perplexity: str = ""  # its row in docs/quantization.md


def bounded(name: str, subject: Subject) -> Row:
    packed = name.startswith("packed")
    change = {} if subject.fixture else dict(subject.options)
    if change and not packed:
        change["ops"] = "reference"
    if "quantization" in change and "lm_head" in change["quantization"]:
        change |= PER_LAYER
    return Row(subject, "bounded", False, change, {"int4-g32": "int4-g32 rtn"}.get(name, name))


FILE_ONLY = "packed as the default model's file"  # has no cells: random weights come in no file
ROWS: dict[str, Row] = {
    "plain path, greedy and seeded": Row(Subject()),
    "plain torch (`ops=\"reference\"`)": Row(Subject({"ops": "reference"}), plain=True),
    "batches that nobody enters (`batching=\"dynamic\"`)": Row(Subject({"batching": "dynamic"}), plain=True),
    "batches that nobody leaves (`batching=\"static\"`)": Row(Subject({"batching": "static"}), plain=True),
    "no KV cache (`kv_cache=False`)": Row(Subject({"kv_cache": False}), plain=True),
    "memory reserved (`kv_reservation`)": Row(Subject({"kv_reservation": "max_model_len"}), plain=True),
    "shortest answer first (`policy=\"sjf\"`)": Row(Subject({"policy": "sjf"}), plain=True),
    "same bits (`batch_invariant`), float32": Row(Subject({"batch_invariant": True}, dtype="float32", bits=True)),
    "same bits (`batch_invariant`), int4": Row(
        Subject({"batch_invariant": True, "quantization": "int4"}, dtype="float32", bits=True), "bounded"
    ),
    "a layer in bf16": Row(Subject({"quantization": "layers.0=bf16"}), "bounded", change=HALVES),
    FILE_ONLY: Row(Subject(), "bounded", change={"quantization": None}),
    **{name: bounded(name, subject) for name, subject in QUANTIZED.items()},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mixes", type=int, default=3, help="random mixes for each cell")
    parser.add_argument("--only", nargs="*", default=list(ROWS), choices=ROWS, metavar="ROW")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-drafts", action="store_true", help="leave out the matrix of proposers of drafts")
    parser.add_argument("--no-change", action="store_true", help="leave out what needs the default model")
    parser.add_argument("--page", default=str(ROOT / "docs" / "exactness.md"), help="where to write; '' for nowhere")
    arguments = parser.parse_args()
    start = time.monotonic()
    cells: dict[str, dict[str, str]] = {}
    changes: dict[str, tuple[int, int, float]] = {}
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(arguments.workers, spawn, one_thread) as pool:
        model = write_model(Path(folder))
        jobs: dict[Future[Any], str] = {}
        drafts = {name: pool.submit(draft_cells, name) for name in PROPOSERS} if not arguments.no_drafts else {}
        said = None if arguments.no_change else pool.submit(plain_answers)
        for name in arguments.only:
            if name != FILE_ONLY:
                jobs[pool.submit(row_cells, name, model, arguments.mixes)] = name
        for job in as_completed(jobs):
            cells[jobs[job]] = job.result()
            show(start, jobs[job], ", ".join(f"{way}: {cell}" for way, cell in job.result().items()))
        plain = said.result() if said else None
        if plain is None:
            print("what is bounded was not measured: --no-change, or the default model is not to be had", flush=True)
        else:
            wanted = {name: ROWS[name].change for name in arguments.only if ROWS[name].change}
            jobs = {pool.submit(change_of, options, *plain): name for name, options in wanted.items()}
            for job in as_completed(jobs):
                changes[jobs[job]] = job.result()
                show(start, jobs[job], "{} of {} tokens, log-probability {:.3g}".format(*job.result()))
        proposers = {name: job.result() for name, job in drafts.items()}
    if arguments.page and arguments.only:
        Path(arguments.page).write_text(page(cells, changes, proposers))
    elif arguments.page:  # the rest of the page stays as it is
        known = Path(arguments.page).read_text()
        before, _, after = known.partition(CHANGES_TITLE)
        text = before.partition(DRAFTS_TITLE)[0] + drafts_table(proposers) + "\n" + CHANGES_TITLE + after
        Path(arguments.page).write_text(text)
    every = [*cells.items(), *proposers.items()]
    broken = [f"{name}: {way}" for name, row in every for way, cell in row.items() if cell.startswith("**")]
    if broken:
        sys.exit("answers differ: " + "; ".join(broken))


def show(start: float, name: str, text: str) -> None:
    print(f"{time.monotonic() - start:5.0f} s  {name}: {text}", flush=True)


def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


# -- cells --------------------------------------------------------------------------------------------------------


def row_cells(name: str, model: str, mixes: int) -> dict[str, str]:
    row = ROWS[name]
    engines = Engines(row.subject, model, Subject() if row.plain else None)
    found = {way: cell(engines, way, mixes) for way in WAYS}
    engines.close()
    return found


def cell(engines: Engines, way: str, mixes: int) -> str:
    try:
        outcomes = [engines.compare(way, seed) for seed in range(mixes)]
    except TokenmillError as error:
        print(f"{way} with {engines.subject.options}: {error}", flush=True)
        return "does not run"
    happened = sum(outcome.happened > 0 for outcome in outcomes)
    if not happened:
        return "-"
    if not any(outcome.differ for outcome in outcomes):
        if not engines.subject.bits:
            return f"identical ({happened})"
        if not any(outcome.other_bits for outcome in outcomes):
            return f"same bits ({happened})"
    return differences(engines.subject, outcomes)


def differences(subject: Subject, outcomes: list[Outcome]) -> str:
    answers = sum(outcome.answers for outcome in outcomes)
    equal = answers - sum(len(outcome.differ) for outcome in outcomes)
    text = f"{equal} of {answers}, {max(outcome.largest for outcome in outcomes):.0e}"
    rounds = "=bf16" in str(subject.options.get("quantization"))  # sums of its products depend on the batch
    return text if rounds else f"**{text}**"


# -- drafts --------------------------------------------------------------------------------------------------------


def draft_cells(name: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        found = dict(Matrix(Path(folder)).row(name))
    return {column: drafts_cell(name, column, found.get(column)) for column in COLUMNS}


def drafts_cell(row: str, column: str, cell: Cell | None) -> str:
    if cell is None:
        return "-" if not applies(row, column) else "does not run"
    if not cell.equal:
        return "**differs**"
    if drafts_nothing(row, column):
        return "identical, no drafts"
    return f"identical ({cell.drafts}{f', {cell.trees} trees' if cell.trees else ''})"


def drafts_table(cells: dict[str, dict[str, str]]) -> str:
    """A line for each way: there are more of them than proposers fit beside each other."""
    lines = [DRAFTS_TITLE + DRAFTS + "| | " + " | ".join(cells) + " |", "|---" * (len(cells) + 1) + "|"]
    for column in COLUMNS:
        lines.append(f"| {column} | " + " | ".join(row[column] for row in cells.values()) + " |")
    return "\n".join(lines) + "\n"


# -- changes ------------------------------------------------------------------------------------------------------


def plain_answers() -> tuple[list[list[int]], list[int], list[list[LogprobTable]]] | None:
    """The default model's answers from the plain path: all ids, lengths of prompts, and what was likely where."""
    try:
        llm = LLM("default", ops="reference", dtype="float32", max_model_len=128, device="cpu")
    except TokenmillError:
        return None
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
    ids = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
    return ids, [len(output.prompt_token_ids) for output in outputs], tables_of(llm, ids)


def change_of(
    options: dict[str, Any], ids: list[list[int]], lengths: list[int], expected: list[list[LogprobTable]]
) -> tuple[int, int, float]:
    """Over the plain path's answers: how often the likeliest token is the same, of how many, and how far it is off."""
    llm = LLM("default", dtype="float32", max_model_len=128, device="cpu", **options)
    equal = total = 0
    largest = 0.0
    for tokens, length, mine, theirs in zip(ids, lengths, tables_of(llm, ids), expected, strict=True):
        for at in range(length, len(tokens)):
            total += 1
            equal += likeliest(mine[at]) == likeliest(theirs[at])
            largest = max(largest, abs(mine[at][tokens[at]].logprob - theirs[at][tokens[at]].logprob))
    llm.shutdown()
    return equal, total, largest


def tables_of(llm: LLM, ids: list[list[int]]) -> list[list[LogprobTable]]:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    outputs = llm.generate(ids, params, use_tqdm=False)
    return [[table or {} for table in output.prompt_logprobs or []] for output in outputs]


def likeliest(table: LogprobTable) -> int:
    return max(table, key=lambda token: table[token].logprob)


# -- the page -----------------------------------------------------------------------------------------------------

INTRO = """\
# Exactness

What each technique does to the answer, alone and together with every way of scheduling. Written by

```console
$ python scripts/exactness_matrix.py
```

Each row is an engine with that technique, each column a way to run requests that could disturb it. A mix is a handful
of random requests (shared beginnings, greedy and seeded, filters, penalties, biases, end tokens). Its answers are
compared, tokens and finish reasons, with those of one request at a time, whole prompts, nothing cached.

- **identical (n)**: all answers of n mixes are equal. A model with random weights is computed in float64, where
  rounding is far below any gap between logits, so equal means equal. In rows that are *bounded*, and in that of
  `batch_invariant`, the comparison is with the plain way under the same form; in the others it is with the plain path.
- **same bits (n)**: in float32, and log-probabilities are equal to the last bit.
- **x of y, d**: so many answers are equal, and log-probabilities differ by at most d as far as the tokens are.
- **-**: it never happened in these mixes, so nothing is proven. Without a cache or in static batches nothing is shared,
  and nothing is preempted where memory is reserved.
- **does not run**: the engine stops with an error.

A mix counts only if what the column is named for happened in it: blocks were hit or copied, requests preempted, drafts
verified, masks used, steps failed. *drafts* are those of an oracle that is wrong every other time; the engine's own
proposers have [a matrix of their own](#drafts-by-who-proposes-them). *structured
output* has the masks of a grammar that stands in for a real one (`tests/sampling/` has those). What is drawn without a
seed has a claim on its distribution only, which `tests/sampling/` proves, and with drafts `tests/speculation/`.
`tests/engine/test_exactness_quant.py` runs one mix per cell for the quantized rows (with weights and cache both
quantized, for half of the cells), and `test_exactness.py` beside it more of the first row.

"""

PACKED = """
Packed weights are the native CPU path, in its own float32. Inputs of integer weights, which all these rows have, are
rounded to 8 bits; those of packed floats are not. A product gives a row the same bits whatever else is computed, and
attention sums a query's keys in an order that follows from its position alone. So batches, cached and cut prompts,
forks, beams, preemption, drafts and failures change nothing, with `batch_invariant` or without.

None of this is computed on a GPU. There, in 16 bits, only `batch_invariant` promises equal bits; `tests/gpu/` has the
bounds.
"""

DRAFTS_TITLE = "## Drafts, by who proposes them\n"
DRAFTS = """
Answers with drafts against those of the same engine without, from a random model of two layers: tokens, finish reasons
and log-probabilities, twice, the second time with a warm prefix cache. Its hits are the same, too, but where preempted
requests come back at other times. Proposers are bad on purpose (random heads, a stranger as draft model) or good (the
model itself), and how many of their drafts are verified is not left to the budget. In brackets: drafts that were
verified, and steps that verified trees. *as on a GPU* has the device's drafts: at the end of recorded steps, one step
ahead of the host, up to four for each row, in all but each fifth step; here on stand-ins for the recordings, with every
op computed by torch. Trees run nowhere else: CPUs verify chains, and so does a GPU where a row has penalties, a bias or
a grammar. *grammar* has forced tokens, too. Beams have no drafts. **-**: our heads and Medusa's draft in recorded steps
alone, and a GPU's steps are recorded and overlap anyway.

`tests/speculation/test_drafts_matrix.py` holds every cell. Engines that are killed while they draft are in
`tests/serve/test_serve_drafts_resume.py`, sampling without a seed in `tests/speculation/test_draft_distribution.py`,
steps that fail in `tests/speculation/test_device_drafters.py`, what a real GPU does in `tests/gpu/`: in 16 bits sums of
steps with drafts round otherwise there, and tokens are equal up to near ties only.

"""

CHANGES_TITLE = "## What the bounded ones change\n"
CHANGES = """
On the default model in float32, along {count} tokens that the plain path says to {prompts} prompts: how often the same
token is likeliest, and by how much the log-probability of the plain path's token differs at most. Weights are rounded
to nearest as they are loaded. So few tokens tell forms apart that are far from each other, and no more: a difference of
ten tokens between two rows says nothing. Perplexity is [quantization.md](quantization.md)'s, of the same kind of form
on a longer text, with its standard error. Packed rows round inputs as well as weights; `fp8` rounds inputs on GPUs
only.
*a form per layer* and *a layer in bf16* mean, of 30 layers, `{mixed}` and
`{halves}`.

| technique | same token | log-probability | perplexity |
|---|---|---|---|
"""


def page(
    cells: dict[str, dict[str, str]],
    changes: dict[str, tuple[int, int, float]],
    proposers: dict[str, dict[str, str]],
) -> str:
    lines = [INTRO + "| technique | claim | " + " | ".join(WAYS) + " |", "|---" * (len(WAYS) + 2) + "|"]
    for name in ROWS:
        if name in cells:
            lines.append(f"| {name} | {ROWS[name].claim} | " + " | ".join(cells[name][way] for way in WAYS) + " |")
    text = "\n".join(lines) + "\n" + PACKED
    if proposers:
        text += "\n" + drafts_table(proposers)
    if not changes:
        return text
    text += "\n" + CHANGES_TITLE
    forms = {"mixed": PER_LAYER["quantization"], "halves": HALVES["quantization"]}
    text += CHANGES.format(count=len(PROMPTS) * ANSWER, prompts=len(PROMPTS), **forms)
    quality = perplexities(QUALITY.read_text())
    for name in ROWS:
        if name in changes:
            equal, total, largest = changes[name]
            known = quality.get(ROWS[name].perplexity, "")
            text += f"| {name} | {equal} of {total} | {largest:.2f} | {known} |\n"
    return text


def perplexities(text: str) -> dict[str, str]:
    """The changes in the table of docs/quantization.md, by form."""
    rows = re.findall(r"^\| ([^|]+?) \| [\d.]+ \| ([-+][^|]+?) \|", text, re.MULTILINE)
    return dict(rows)


if __name__ == "__main__":
    main()
