"""`tokenmill bench ops`: every op of a model's decode and prefill steps against the machine's measured ceilings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from tokenmill.bench.timing import Ceilings, Work, ceilings_of, seconds
from tokenmill.model.spec import DecoderSpec, MoESpec
from tokenmill.ops.native.library import Library
from tokenmill.ops.native.library import load as load_native
from tokenmill.ops.registry import Need, Ops, select
from tokenmill.ops.types import CAUSAL, AttentionBatch, SampleBatch
from tokenmill.quant.forms import WeightForm
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.packed import Packed
from tokenmill.quant.schemes.row_scaled import W8A8, Fp8
from tokenmill.quant.schemes.scheme import Linear, QuantScheme

BLOCK_SIZE = 16
COLD_BYTES = 256 << 20  # inputs are used in turn until this much lies between two uses, more than any cache holds
MAX_COPIES = 64
CACHED_BYTES = 64 << 20  # what is smaller, all copies together, may stay in a cache: its line says so
NEAR = 0.9  # from this share of a ceiling on, it is measured again beside the op
AGAIN = 0.1  # seconds, for each part of the ceilings
PACKED = (WeightForm("int4", 32, zeros=True), WeightForm("int8", 32))  # as GGUF's Q4_1 and Q8_0


@dataclass(frozen=True)
class Case:
    """One op at one size: what it must move and compute at least, and how to run it on fresh memory."""

    name: str
    bytes: float
    flops: float
    variants: list[Work]


@dataclass(frozen=True)
class OpTiming:
    name: str
    seconds: float
    bytes_share: float  # of the measured bytes per second
    flops_share: float
    held: float = COLD_BYTES  # bytes of all its inputs together

    @property
    def share(self) -> float:
        return max(self.bytes_share, self.flops_share)

    def text(self) -> str:
        bound = "memory" if self.bytes_share >= self.flops_share else "compute"
        told = f"{self.name:52s} {self.seconds * 1e6:10.1f} us   {self.share:6.1%} of the {bound} ceiling"
        return f"{told} ({why})" if (why := self.doubt(bound)) else told

    def doubt(self, bound: str) -> str:
        """What a share leaves open, and where it is more than all, why."""
        if bound == "memory" and self.held < (COLD_BYTES if self.share > 1 else CACHED_BYTES):
            return f"a cache may hold its {self.held / 1e6:.0f} MB"
        if self.share > 1:
            return "other work was in the way whenever the ceiling was measured"
        return ""


def bench_ops(
    spec: DecoderSpec, device: torch.device, dtype: torch.dtype, tell: Callable[[str], None]
) -> list[OpTiming]:
    ops = select(Need(device.type, dtype, spec.attention_head_dim, BLOCK_SIZE))
    measure = ceilings_of(device, dtype, packed(device, dtype))
    best = measure(0.3)
    tell(
        f"{device}: memory {best.bytes_per_s / 1e9:,.0f} GB/s, matrix products {best.flops_per_s / 1e12:.3g} TFLOP/s "
        "(measured now)"
    )
    for choice in ops.report():
        tell(f"  {choice}")
    lines = []
    with torch.inference_mode():
        for case in cases(spec, ops, device, dtype):
            line = line_of(case, seconds(case.variants, device), best)
            if line.share > NEAR:  # a machine is not the same all the time
                best = best.or_better(measure(AGAIN))
                line = line_of(case, line.seconds, best)
            lines.append(line)
            tell(line.text())
    return lines


def line_of(case: Case, took: float, best: Ceilings) -> OpTiming:
    shares = case.bytes / took / best.bytes_per_s, case.flops / took / best.flops_per_s
    return OpTiming(case.name, took, *shares, held=case.bytes * len(case.variants))


def cases(spec: DecoderSpec, ops: Ops, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Sizes that fill the device: fewer tokens on a CPU."""
    big = device.type == "cuda"
    make = _Maker(spec, ops, device, dtype)
    for rows in (1, 64, 1024) if big else (1, 64):
        yield from make.linears(rows, Dense())
        for scheme in packed(device, dtype):  # what a step calls where weights are packed
            yield from make.linears(rows, scheme)
    for rows in (1, 64) if big else ():
        yield from make.linears(rows, Fp8())
        yield from make.linears(rows, W8A8())
    tokens = 8192 if big else 256
    yield make.norm(tokens)
    yield make.act(tokens)
    yield make.rope(tokens)
    for rows, context in ((64, 1024), (16, 8192), (256, 650)) if big else ((1, 512), (16, 512)):
        yield make.attention(rows, 1, context)
    for rows, length in ((4, 4096), (1, 8192)) if big else ((1, 256),):
        yield make.attention(rows, length, length)
    if spec.moe is not None:
        for rows in (1, 64, 8192) if big else (1, 16):
            yield make.mixture(rows, spec.moe)
    for filtered in (False, True):
        yield make.sample(64 if big else 8, filtered)


def packed(device: torch.device, dtype: torch.dtype) -> list[QuantScheme]:
    """The native library's ways to multiply, where a model in this dtype would use it."""
    native = load_native() if device.type == "cpu" and dtype == torch.float32 else None
    if not isinstance(native, Library):
        return []
    native.threads = torch.get_num_threads()
    return [Packed(form) for form in PACKED]


def copies(moved: int) -> range:
    """How many sets of inputs an op that moves this many bytes is timed on."""
    return range(max(2, min(MAX_COPIES, COLD_BYTES // moved)))


class _Maker:
    def __init__(self, spec: DecoderSpec, ops: Ops, device: torch.device, dtype: torch.dtype) -> None:
        self.spec, self.ops, self.device, self.dtype = spec, ops, device, dtype
        self.item = dtype.itemsize

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype) * 0.1

    def linears(self, rows: int, scheme: QuantScheme) -> Iterator[Case]:
        """A layer's products, by whatever kernel the scheme chooses for so many rows."""
        spec = self.spec
        shapes = {"qkv": (spec.qkv_size, spec.hidden), "o": (spec.hidden, spec.attention_size)}
        if spec.moe is None or not all(spec.moe.layers):
            shapes |= {
                "gate_up": (2 * spec.intermediate, spec.hidden),
                "down": (spec.hidden, spec.intermediate),
            }
        for name, (out, inner) in shapes.items():
            moved = scheme.nbytes(out, inner, self.dtype) + rows * (out + inner) * self.item
            work: list[Work] = []
            for _ in copies(moved):
                storage = scheme.allocate(out, inner, self.dtype, self.device)
                scheme.write(storage, 0, self.random(out, inner))
                work.append(partial(Linear(scheme, storage), self.random(rows, inner)))
            yield Case(f"{scheme.name} {name} {inner}x{out}, {rows} tokens", moved, 2 * rows * out * inner, work)

    def mixture(self, tokens: int, moe: MoESpec) -> Case:
        """Routed experts, each token's drawn at random; only those that a token chose are read."""
        chosen = [torch.rand(tokens, moe.experts).topk(moe.top_k).indices for _ in range(2)]
        read = min(len(set(one.flatten().tolist())) for one in chosen)
        weights = 3 * moe.intermediate * self.spec.hidden
        moved = (read * weights + 2 * tokens * self.spec.hidden) * self.item
        share = torch.full((tokens, moe.top_k), 1 / moe.top_k, device=self.device)
        work: list[Work] = []
        for experts in chosen:
            gate_up = self.random(moe.experts, 2 * moe.intermediate, self.spec.hidden)
            down = self.random(moe.experts, self.spec.hidden, moe.intermediate)
            x, on_device = self.random(tokens, self.spec.hidden), experts.to(self.device)
            work.append(partial(self.ops.moe, x, share, on_device, gate_up, down, self.spec.activation))
        return Case(f"moe, {tokens} tokens to {moe.top_k} experts", moved, 2 * tokens * moe.top_k * weights, work)

    def norm(self, tokens: int) -> Case:
        weight = self.random(self.spec.hidden)
        moved, hidden = 4 * tokens * self.spec.hidden * self.item, self.spec.hidden
        pairs = [(self.random(tokens, hidden), self.random(tokens, hidden)) for _ in copies(moved)]
        work: list[Work] = [partial(self.ops.add_rms_norm, x, residual, weight, 1e-6) for x, residual in pairs]
        return Case(f"add_rms_norm, {tokens} tokens", moved, 0, work)

    def act(self, tokens: int) -> Case:
        inner = self.spec.intermediate
        moved = 3 * tokens * inner * self.item
        inputs = [self.random(tokens, 2 * inner) for _ in copies(moved)]
        work: list[Work] = [partial(self.ops.act_mul, x, self.spec.activation) for x in inputs]
        return Case(f"act_mul, {tokens} tokens", moved, 0, work)

    def rope(self, tokens: int) -> Case:
        spec, shape = self.spec, self.spec.kv_shapes[0]
        heads, dim = spec.heads, spec.attention_head_dim
        blocks = -(-tokens // BLOCK_SIZE)
        cache = self.random(2, blocks, BLOCK_SIZE, shape.kv_heads, shape.k_dim)
        table = torch.randn(tokens, spec.ropes[0].dim, device=self.device)
        where = torch.arange(tokens, device=self.device)
        moved = 2 * tokens * (heads * dim + shape.kv_heads * (shape.k_dim + shape.v_dim)) * self.item
        work: list[Work] = []
        for _ in copies(moved):
            q, k = self.random(tokens, heads, dim), self.random(tokens, shape.kv_heads, shape.k_dim)
            v, v_cache = (k, cache[1]) if shape.v_dim else (None, None)
            work.append(partial(self.ops.rope_kv_write, q, k, v, table, where, cache[0], v_cache, where))
        return Case(f"rope_kv_write, {tokens} tokens", moved, 0, work)

    def attention(self, rows: int, queries: int, context: int) -> Case:
        spec, shape = self.spec, self.spec.kv_shapes[0]
        per_row = -(-context // BLOCK_SIZE)
        moved = rows * context * shape.kv_heads * (shape.k_dim + shape.v_dim) * self.item
        work: list[Work] = []
        for _ in copies(moved):
            cache = self.random(2 if shape.v_dim else 1, rows * per_row, BLOCK_SIZE, shape.kv_heads, shape.k_dim)
            values = cache[1] if shape.v_dim else cache[0][..., spec.ropes[0].dim :]
            q = self.random(rows * queries, spec.heads, spec.attention_head_dim)
            batch = self._batch(rows, queries, context, per_row)
            work.append(partial(self.ops.attention, q, cache[0], values, batch, CAUSAL, spec.attn_scale))
        value_dim = shape.v_dim or shape.k_dim - spec.ropes[0].dim
        seen = queries * context - queries * (queries - 1) // 2  # causal
        flops = 2 * rows * seen * spec.heads * (shape.k_dim + value_dim)
        kind = "decode" if queries == 1 else "prefill"
        return Case(f"attention {kind}, {rows} x {context}", moved, flops, work)

    def _batch(self, rows: int, queries: int, context: int, per_row: int) -> AttentionBatch:
        def ints(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        table = torch.randperm(rows * per_row).to(self.device, torch.int32).view(rows, per_row)
        return AttentionBatch(
            rows=ints(*range(rows)),
            q_start=ints(*range(0, rows * queries + 1, queries)),
            context=ints(*[context] * rows),
            block_tables=table,
            num_singles=rows if queries == 1 else 0,
            max_query=queries,
            max_context=context,
            host_rows=list(range(rows)),
            host_counts=[queries] * rows,
            host_context=[context] * rows,
        )

    def sample(self, rows: int, filtered: bool) -> Case:
        vocab = self.spec.vocab_size
        logits = [torch.randn(rows, vocab, device=self.device) for _ in copies(4 * rows * vocab)]
        ones = torch.ones(rows, device=self.device)
        count = torch.arange(rows, device=self.device)
        heat = ones if filtered else 0 * ones
        batch = SampleBatch(heat, count.int() * 0 + 40, ones * 0.9, ones * 0, count, count, not filtered, filtered)
        work: list[Work] = [partial(self.ops.sample, x, batch) for x in logits]
        kind = "top_k 40 top_p 0.9" if filtered else "greedy"
        return Case(f"sample {kind}, {rows} x {vocab}", 4.0 * rows * vocab, 0, work)
