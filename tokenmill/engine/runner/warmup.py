"""Warm-up: runs steps of every kind that a runner can be given, so that no request waits for a kernel to be compiled.

First nothing is launched, and which kernels the steps ask for is noted; those are compiled in parallel processes, or
found in the cache of an earlier start, and loaded. Then steps are run, for what libraries set up when they are first
used, and the commonest decode steps are recorded as graphs. Later ones are recorded when their sizes return, which
takes about as long as a step; nothing else is new.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from tokenmill.engine.runner.recordings import TREE_ROWS, WIDTHS, Kind
from tokenmill.engine.step import SharedPrefix, Step
from tokenmill.kv.moves import Placement
from tokenmill.model.layers import layer_kind
from tokenmill.sampling.sampler import Sampler
from tokenmill.sampling.settings import Traits

if TYPE_CHECKING:
    from tokenmill.engine.runner.torch_runner import TorchRunner
    from tokenmill.ops.triton.compiler import KernelCompiler
    from tokenmill.ops.triton.specializations import Collected

log = logging.getLogger("tokenmill.kernels")

# Numbers of prompt tokens between which no kernel changes to another one, nor a library much, whatever the model. Those
# that are no round numbers have a rest that is multiplied by itself.
PROMPTS = (
    *(2, 3, 5, 9, 16, 17, 25, 32, 33, 48, 64, 65, 91, 97, 129, 193, 257, 385, 513, 777),
    *(1024, 1537, 2048, 3073, 4096, 6145, 8192),
)
SHORT_PROMPTS = (2, 4, 7, 16, 33, 64, 129)  # of steps with several: attention goes by the longest of them
LATER_PARTS = (2, 33, 1024)  # tokens of parts of prompts that are not the first
BESIDE = (2, 33, 1537)  # prompt tokens beside decodes
DECODES = (1, 4, 9, 20, 40, 70, 130, 260, 520)  # between these no kernel changes, whatever the number of kv heads
FEW_CHAINS = 32  # rows with drafts up to which every size is recorded
SHARED_TOKENS = 256  # of a beginning that rows share

Progress = Callable[[int, int, str], None]  # done, in all, what


def warm_up(
    runner: TorchRunner, max_rows: int, max_tokens: int, shared: bool, compiler: KernelCompiler, tell: Progress
) -> tuple[int, int]:
    """How many kernels there are, and how many of them were compiled. To be called before the first request; what it
    leaves in rows is for `TorchRunner.end_rehearsal`.
    """
    tell(0, 0, "listing kernels")
    began = time.monotonic()
    collected = compiler.listed(
        _settings_of(runner, max_rows, max_tokens, shared), lambda: kernels_of(runner, max_rows, max_tokens, shared)
    )
    listed = time.monotonic()
    compiled = compiler.compile(collected, tell)
    loaded = time.monotonic()
    tell(0, 0, "trying kernels")
    with runner.one_of_each_kind():
        for step in steps_to_try(runner, max_tokens):
            for one in _all_of(runner):
                one.rehearse(step)
        for rows in runner.decode_sizes:
            for kind in runner.decode_kinds:
                runner.rehearse_decode(rows, kind)
    for traits in sampling_variants():
        runner.rehearse_sampling(1, torch.float32, traits)
    for kind in runner.decode_kinds:
        for rows in sizes_to_record(runner.decode_sizes, kind):
            runner.record_decode(rows, Traits(), kind)
    seconds = listed - began, loaded - listed, time.monotonic() - loaded
    log.info("kernels listed in %.1f s, compiled and loaded in %.1f s, tried in %.1f s", *seconds)
    return len(collected), compiled


def _settings_of(runner: TorchRunner, max_rows: int, max_tokens: int, shared: bool) -> str:
    """Whatever decides which kernels there are, besides the package itself, the releases and the GPU."""
    state, decoder = runner.state, runner.decoder
    kv = state.kv[0].k
    facts = [
        *(max_rows, max_tokens, shared, runner.decode_sizes, runner.piece_sizes, decoder.spec, decoder.kinds),
        *(runner.decode_kinds, runner.drafter),
        *(decoder.weights.dtype, layer_kind(decoder.weights.lm_head)),
        *({op: one.name for op, one in decoder.ops.chosen.items()}, state.max_len, state.block_size),
        # How many blocks there are depends on what memory is free; kernels see whether it is a round number.
        *(kv.dtype, kv.shape[1:], kv.shape[0] % 16 == 0, kv.numel() >> 31 > 0),
    ]
    return repr(facts)


def kernels_of(runner: TorchRunner, max_rows: int, max_tokens: int, shared: bool) -> Collected:
    """Every specialization that steps of this runner may launch. `shared`: rows may share a beginning."""
    from tokenmill.ops.triton.specializations import collect

    dtypes = dict.fromkeys((torch.float32, runner.decoder.weights.dtype))  # logits of prompts, and of decodes
    with collect() as collected, runner.one_of_each_kind():
        for step in steps_of_every_kind(runner, max_rows, max_tokens, shared):
            for one in _all_of(runner):
                one.rehearse(step)
        for rows in runner.decode_sizes:
            for kind in [*runner.decode_kinds, *([Kind.SHARED] if shared else [])]:
                runner.rehearse_decode(rows, kind)
            runner.rehearse_decode(rows, Kind.TREES, Traits(warm=True))  # trees are drafted with noise
        for rows in sorted({*(1 << power for power in range(max_rows.bit_length())), max_rows}):
            for dtype in dtypes:
                for traits in sampling_variants():
                    runner.rehearse_sampling(rows, dtype, traits)
    return collected


def _all_of(runner: TorchRunner) -> list[TorchRunner]:
    """With the one that reads for a draft model: its steps are like parts of prompts."""
    return [runner] if runner.beside is None else [runner, runner.beside]


def sizes_to_record(sizes: list[int], kind: Kind) -> list[int]:
    """Sizes of decode steps that stand in for all others: a recording serves batches down to half its size. Of few rows
    with drafts all are: padding counts for several tokens there.
    """
    if kind is Kind.TREES:
        return [size for size in sizes if size <= TREE_ROWS]
    small = FEW_CHAINS if kind in WIDTHS else 0
    return [size for size in sizes if size <= small or size & (size - 1) == 0 or size == sizes[-1]]


def sampling_variants() -> list[Traits]:
    """Traits that together launch every kernel: what log-probabilities launch is the same for all kinds of noise."""
    return [one for one in Sampler.variants() if one.best is None or not one.warm]


def steps_of_every_kind(runner: TorchRunner, max_rows: int, max_tokens: int, shared: bool) -> Iterator[Step]:
    """Prompts, their later parts, several of them, and all of these beside decodes."""
    longest = runner.state.max_len - 1
    sizes = sorted({size for size in (*PROMPTS, *runner.piece_sizes, max_tokens) if 2 <= size <= max_tokens})
    for size in sizes:
        yield _prompts(size, longest, max_rows)
    for size in LATER_PARTS:
        start = min(longest - size, 4 * runner.state.block_size)
        if size <= max_tokens and start > 0:
            yield _step([(start, size)])
    for count in SHORT_PROMPTS:
        prompts = min(9, max_rows, max_tokens // count)
        if prompts > 1 and count <= longest:
            yield _step([(0, count)] * prompts)
    for decodes in sorted({*(number for number in DECODES if number < max_rows), max_rows - 1} - {0}):
        for size in BESIDE:
            if decodes + size <= max_tokens and size <= longest:
                yield _step([(longest // 2, 1)] * decodes + [(0, size)], singles=decodes)
        if shared and decodes > 3 and decodes + 2 <= max_tokens and longest > 2 * SHARED_TOKENS:
            prefix = SharedPrefix(SHARED_TOKENS, tuple(range(decodes)))
            yield _step([(longest // 2, 1)] * decodes + [(0, 2)], singles=decodes, shared=prefix)
    if runner.decoder.spec.mla is None and longest > 2 * runner.state.block_size:  # a module that is copied
        placed = _step([(runner.state.block_size, 2)])
        placed.placements.append(Placement(0, 0, runner.state.block_size, 1, (0, 1)))
        yield placed


def steps_to_try(runner: TorchRunner, max_tokens: int) -> Iterator[Step]:
    """Sizes at which a library takes another of its kernels; the others differ in nothing that it sees."""
    sizes = {*runner.piece_sizes, *(size for size in PROMPTS if size >= 512), max_tokens}
    for size in sorted(size for size in sizes if 2 <= size <= max_tokens):
        yield _prompts(size, runner.state.max_len - 1, runner.state.scratch_row)


def _prompts(size: int, longest: int, max_rows: int) -> Step:
    """One prompt, or several where none may be as long: as many as there are rows for."""
    rest = size % longest
    return _step(([(0, longest)] * (size // longest) + [(0, rest)] * (rest > 0))[:max_rows])


def _step(work: list[tuple[int, int]], singles: int = 0, shared: SharedPrefix | None = None) -> Step:
    """`work`: the start and the number of tokens of each row."""
    return Step(
        number=0,
        rows=list(range(len(work))),
        starts=[start for start, _ in work],
        counts=[count for _, count in work],
        samples=[1] * len(work),
        num_singles=singles,
        shared=shared,
    )
