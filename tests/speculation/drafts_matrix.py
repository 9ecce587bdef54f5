"""Every proposer of drafts in every way of sampling and running: which answers differ from those without drafts.

A row is a proposer: on a CPU, or as a GPU has it, at the end of recorded steps, one step ahead of the host (here with
stand-ins for the recordings). A column is a way of sampling or running, a cell the answers of a few requests, twice,
the second time with a warm prefix cache. tests/speculation/test_drafts_matrix.py holds every cell,
scripts/exactness_matrix.py writes them down.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("", "engine", "sampling")]
from fake_graphs import FakeRecorder
from grammar_models import CONFIG, closers, write_model
from test_drafts_on_device import FakeStaging, Unrecorded, behind_the_host, runner_of
from tiny_drafts import drafted, made_eagle, made_head, made_medusa, make_drafts_free

from tokenmill import LLM, SamplingParams
from tokenmill.engine.runner import cuda_graphs
from tokenmill.engine.runner.recordings import Kind
from tokenmill.engine.speculation import choose, eagle
from tokenmill.engine.speculation import speculation as speculation_module
from tokenmill.engine.speculation.choose import draft_model_for, eagle_head_for, speculation_for
from tokenmill.engine.speculation.device_budget import DeviceBudget
from tokenmill.engine.step import NODES
from tokenmill.model.decoder import Decoder
from tokenmill.ops.registry import select
from tokenmill.quant.schemes.choose import ComputeTarget

OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "device": "cpu", "max_num_seqs": 16, "max_model_len": 256, "kv_cache_memory": 4 << 20,
}  # fmt: skip
# As a GPU computes: in torch's own ops, op by op, a step ahead of the host
AS_ON_A_GPU: dict[str, Any] = {"ops": "reference", "cuda_graphs": False, "overlap": True, "max_num_seqs": 8}
SHAPE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
BLOCK = 8192  # bytes of the model's keys and values in a block
TREE_TOKENS = 8 * (1 + NODES)  # of a step with eight rows
# What is repeated is drafted; what is sampled at random is not
PROMPTS = [[4 + (7 * i + j) % (5 + i) for j in range(12 + 9 * i)] for i in range(6)]
WORDS = {"regex": "(item [0-9]{2}: a[bc]-[xyz]{3}; ){2,4}done"}


@dataclass(frozen=True)
class Column:
    sampling: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


GREEDY, SEEDED = {"temperature": 0.0}, {"temperature": 0.4, "seed": 7}
COLUMNS: dict[str, Column] = {
    "greedy": Column(GREEDY),
    "seeded": Column(SEEDED),
    "filters": Column({"temperature": 0.5, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 3}),
    "penalties": Column(GREEDY | {"repetition_penalty": 1.02, "frequency_penalty": 0.01}),
    "bias, fewest tokens": Column(GREEDY | {"logit_bias": {5: 1.0}, "min_tokens": 20}),
    "log-probabilities": Column(GREEDY | {"logprobs": 8}),
    "n > 1": Column(SEEDED | {"n": 2}),
    "grammar": Column(SEEDED | {"structured": WORDS}),
    "beams": Column(GREEDY | {"beam_width": 3, "n": 3}),
    "one row": Column(SEEDED, {"max_num_seqs": 1}),
    "chunked prefill": Column(SEEDED, {"max_num_batched_tokens": 20}),
    "preemption": Column(SEEDED | {"n": 2}, {"kv_cache_memory": 24 * BLOCK}),
    "no prefix cache": Column(SEEDED, {"enable_prefix_caching": False}),
    "int8 keys and values": Column(SEEDED, {"kv_cache_dtype": "int8"}),
    "int8 weights": Column(SEEDED, {"quantization": "int8"}),
    "steps op by op": Column(SEEDED, {"cuda_graphs": False}),
    "steps overlap": Column(SEEDED, {"overlap": True}),
}
# Proposers: the setting, with names of files; and whether a GPU would verify trees of theirs, or None: a CPU drafts
ROWS: dict[str, tuple[str, bool | None]] = {
    "suffix index": ("suffix", None),
    "trained head": ("head:HEAD", None),
    "Medusa heads": ("head:MEDUSA", None),
    "EAGLE-3 head": ("head:EAGLE", None),
    "draft model": ("draft:STRANGER", None),
    "the model itself": ("draft:MODEL", None),
    "first layers": ("layers:1", None),
    "several": ("suffix,head:HEAD,draft:STRANGER,layers:1", None),
    "trained head, as on a GPU": ("head:HEAD", False),
    "its trees": ("head:HEAD", True),
    "Medusa heads' trees": ("head:MEDUSA", True),
    "EAGLE-3 head, as on a GPU": ("head:EAGLE", False),
    "draft model, as on a GPU": ("draft:STRANGER", False),
    "first layers, as on a GPU": ("layers:1", False),
}
NO_TREES = ("penalties", "bias, fewest tokens", "grammar", "beams")  # siblings have one history and one mask for all


def applies(row: str, column: str) -> bool:
    """Our heads and Medusa's draft in recorded steps alone; as on a GPU steps are as the last two columns have them."""
    setting, trees = ROWS[row]
    if column == "steps op by op":
        return trees is None and "HEAD" not in setting and "MEDUSA" not in setting
    return column != "steps overlap" or trees is None


def drafts_nothing(row: str, column: str) -> bool:
    """Beams are chosen by the host; and on a CPU others than the suffix index wait for the newest token, which is on
    its way while steps overlap.
    """
    return column == "beams" or (column == "steps overlap" and "suffix" not in ROWS[row][0])


@dataclass(frozen=True)
class Cell:
    equal: bool
    drafts: int  # that were verified
    trees: int = 0  # steps that verified some
    preempted: int = 0
    hits: int = 0  # tokens found in the prefix cache
    other_hits: int = 0  # than without drafts


class Matrix:
    """Files of heads and models, and the answers without drafts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_model(folder / "model", **SHAPE)
        small = {"hidden_size": 32, "head_dim": 8, "num_hidden_layers": 1}
        shape = CONFIG | SHAPE
        self._files = {
            "MODEL": self.model,
            "STRANGER": write_model(folder / "stranger", **small),
            "HEAD": made_head(self.model, folder / "head.safetensors", OPTIONS),
            "MEDUSA": made_medusa(folder / "medusa", shape["hidden_size"], shape["vocab_size"]),
            "EAGLE": made_eagle(folder / "eagle", shape, [0, 1]),
        }
        self._plain: dict[tuple[str, bool], tuple[list[Any], int]] = {}  # and tokens found in the prefix cache

    def row(self, name: str, columns: list[str] | None = None) -> Iterator[tuple[str, Cell]]:
        """The cells of a proposer. One engine serves all columns that ask for the same options."""
        setting, trees = ROWS[name]
        for key, file in self._files.items():
            setting = setting.replace(f":{key}", f":{file}")
        on_device = trees is not None
        wanted = [one for one in COLUMNS if (columns is None or one in columns) and applies(name, one)]
        for column in wanted:
            if (column, on_device) not in self._plain:
                self._plain_answers(on_device)
        while wanted:
            options = COLUMNS[wanted[0]].options
            same = [column for column in wanted if COLUMNS[column].options == options]
            wanted = [column for column in wanted if column not in same]
            with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
                make_drafts_free(patch)
                patch.setattr(speculation_module, "admit", some_drafts())
                llm = stack.enter_context(self._drafting(setting, trees, options, patch))
                for column in same:
                    yield column, self._cell(llm, column, on_device)

    def _plain_answers(self, on_device: bool) -> None:
        opened: dict[str, LLM] = {}
        with ExitStack() as stack:
            for name, column in COLUMNS.items():
                key = str(column.options)
                if key not in opened:
                    opened[key] = stack.enter_context(LLM(self.model, **_options(column.options, on_device)))
                stats = opened[key]._built.engine.scheduler.kv.stats
                before = stats.hit
                found = answers(opened[key], column, on_device)
                self._plain[name, on_device] = found, stats.hit - before

    def _drafting(self, setting: str, trees: bool | None, options: dict[str, Any], patch: pytest.MonkeyPatch) -> LLM:
        wanted = _options(options, trees is not None)
        if "kv_cache_memory" in options and trees is None:  # blocks hold the keys and values of drafting models, too
            each = BLOCK + BLOCK * (self.model in setting) + BLOCK // 4 * ("stranger" in setting)
            each += BLOCK // 2 * ("eagle" in setting)
            wanted["kv_cache_memory"] = options["kv_cache_memory"] // BLOCK * each
        if trees is None:
            return LLM(self.model, **(wanted | {"speculation": setting}))
        llm = LLM(self.model, **wanted)
        as_on_a_gpu(llm, setting, trees, patch)
        return llm

    def _cell(self, llm: LLM, name: str, on_device: bool) -> Cell:
        scheduler = llm._built.engine.scheduler
        graphs = runner_of(llm)._graphs
        before = drafted(llm), scheduler.stats.preemptions, scheduler.kv.stats.hit, _trees(graphs)
        found = answers(llm, COLUMNS[name], on_device)
        scheduler.check_integrity()
        after = drafted(llm), scheduler.stats.preemptions, scheduler.kv.stats.hit, _trees(graphs)
        drafts, preempted, hits, trees = (new - old for new, old in zip(after, before, strict=True))
        plain, plain_hits = self._plain[name, on_device]
        return Cell(found == plain, drafts, trees, preempted, hits, hits - plain_hits)


def some_drafts() -> Callable[..., list[int]]:
    """In place of the budget: now more of a draft is verified, now less, whatever it promises."""
    turns = count()

    def admit(chances: list[Any], rows: int, most: int, *_: Any) -> list[int]:
        counts = []
        for one in chances:
            counts.append(min(len(one), (7, 1, 3)[next(turns) % 3], most - sum(counts)))
        return counts

    return admit


def _trees(graphs: Any) -> int:
    return 0 if graphs is None else graphs.steps_of[Kind.TREES]


def _options(options: dict[str, Any], on_device: bool) -> dict[str, Any]:
    wanted = OPTIONS | {"speculation": "off"} | options | (AS_ON_A_GPU if on_device else {})
    if on_device and "kv_cache_memory" in options:
        wanted |= {"kv_cache_memory": options["kv_cache_memory"] // 2, "max_model_len": 128}  # fewer, shorter answers
    return wanted | {one: options[one] for one in options if one == "max_num_seqs"}


def answers(llm: LLM, column: Column, on_device: bool) -> list[Any]:
    """Tokens, finish reasons, and log-probabilities; of fewer and shorter answers where every op is a call of torch."""
    prompts, tokens = (PROMPTS[:3], 24) if on_device else (PROMPTS, 50)
    more: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
    if "structured" in column.sampling:
        more = {"max_tokens": 2 * tokens, "logit_bias": closers(llm)}
    params = SamplingParams(**column.sampling, **more)
    found = []
    for _ in range(2):  # the second time with a warm prefix cache
        outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
        assert all(one.error is None for one in outputs)
        found += [
            (list(one.token_ids), one.finish_reason, _logprobs(one, exactly=not on_device))
            for output in outputs
            for one in output.outputs
        ]
    return found


def _logprobs(one: Any, exactly: bool) -> list[Any]:
    """What torch computes of several rows differs in the last bits from what it computes of one."""
    tables = one.logprobs or []
    return [
        [(token, entry.logprob if exactly else round(entry.logprob, 3)) for token, entry in table.items()]
        for table in tables
    ]


def as_on_a_gpu(llm: LLM, setting: str, trees: bool, patch: pytest.MonkeyPatch) -> None:
    """Have an engine on a CPU draft as on a GPU, in all but each fifth step."""
    patch.setattr(cuda_graphs, "_Staging", FakeStaging)
    patch.setattr(cuda_graphs, "Capture", lambda device: FakeRecorder())
    patch.setattr(choose, "ASYNC_DEVICES", {"cpu"})
    patch.setattr(eagle, "select", lambda need: select(need, "reference"))
    patch.setattr(Decoder, "recordable", True)
    turns = 0

    def turn(self: DeviceBudget, rows: int, most: int, branches: bool = False) -> int:
        nonlocal turns
        turns += 1
        self.tree = trees and branches
        return 0 if turns % 5 == 0 else min(self._length, most // rows - 1)

    patch.setattr(DeviceBudget, "turn", turn)
    patch.setattr(DeviceBudget, "rests", lambda *_: False)
    runner, config = runner_of(llm), replace(llm.config, speculation=setting)
    spec = llm._built.spec
    behind_the_host(patch, runner)
    runner.decoder.ops.chosen["attention"] = replace(runner.decoder.ops.chosen["attention"], tails=True)
    runner._graphs = Unrecorded(runner.decoder, runner.state, runner.sampler, TREE_TOKENS)
    runner.decode_paths = [runner._graphs]
    target = ComputeTarget(runner.device, torch.float32)
    tokenizer = llm.get_tokenizer()
    draft = draft_model_for(config, spec, tokenizer, target, torch.float32, lambda *_: None)
    made, _ = speculation_for(config, runner, True, TREE_TOKENS, draft, eagle_head_for(config, spec))
    assert made is not None
    engine = llm._built.engine
    engine.speculation = made
    engine.scheduler.limits = replace(engine.scheduler.limits, max_verified=TREE_TOKENS)
    if engine.grammars is not None:
        engine.grammars.looks_ahead = True
