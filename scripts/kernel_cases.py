"""Calls of every Triton op with the sizes of real models, on tensors without memory: for compiling, not for running."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tokenmill.ops.device_facts import FLOAT8, HOPPER, INVARIANT, PRODUCTS, Requirement
from tokenmill.ops.kv_forms import KV_FORMS, KVScales
from tokenmill.ops.triton import (
    activation,
    decode_step,
    draft_head,
    draft_loss,
    draft_tree,
    low_rank,
    norm,
    place,
    rope,
    tree_step,
)
from tokenmill.ops.triton.attention import invariant as attention_invariant
from tokenmill.ops.triton.attention.paged import attention
from tokenmill.ops.triton.gemm import quantize as rows_of_eight_bits
from tokenmill.ops.triton.gemm.gated import gated_gemm
from tokenmill.ops.triton.gemm.gated_few import gated_few
from tokenmill.ops.triton.gemm.hopper import SHAPES, hopper_gemm
from tokenmill.ops.triton.gemm.invariant import invariant_gemm
from tokenmill.ops.triton.gemm.one_row import one_row_gemm
from tokenmill.ops.triton.gemm.small import counters_for, small_gemm
from tokenmill.ops.triton.gemm.stream import stream_gemm
from tokenmill.ops.triton.gemm.weight_codes import Codes, parts_of
from tokenmill.ops.triton.gemm.weight_only import weight_only_gemm, widened
from tokenmill.ops.triton.moe import codes as moe_codes
from tokenmill.ops.triton.moe import experts as moe
from tokenmill.ops.triton.moe import invariant as moe_invariant
from tokenmill.ops.triton.moe import route as moe_route
from tokenmill.ops.triton.sample.logprobs import logprobs
from tokenmill.ops.triton.sample.mask import allow_only
from tokenmill.ops.triton.sample.sampler import sample
from tokenmill.ops.triton.sample.shape import shape
from tokenmill.ops.types import (
    CAUSAL,
    LOGPROB_BUCKETS,
    AttentionBatch,
    DecodeTables,
    Mask,
    SampleBatch,
    ShapeBatch,
    TreeNoise,
    TreeTables,
    Unnormed,
)
from tokenmill.quant.forms import parse_form
from tokenmill.quant.schemes.expert_codes import ExpertCodes

BF16, FP16, FP32, INT8, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn
BLOCK_SIZE = 16

Case = tuple[str, Callable[[], Any]]  # what is computed, with its sizes; the call


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    qk_norm: bool
    experts: int = 0
    dim: int = 128


LLAMA = Model("llama3-8b", 4096, 32, 8, 14336, 128256, qk_norm=False)
QWEN = Model("qwen3-0.6b", 1024, 16, 8, 3072, 151936, qk_norm=True)
MIXTURE = Model("qwen3-30b-a3b", 2048, 32, 4, 768, 151936, qk_norm=True, experts=128)
MODELS = (LLAMA, QWEN, MIXTURE)


def all_cases() -> Iterator[tuple[str, Callable[[], Any], Requirement]]:
    """Each with what the engine asks of a GPU before it launches this."""
    for name, call in hopper_cases():
        yield name, call, HOPPER
    for name, call in usual_cases():
        # Weights alone are widened from float8 by hand; all else has instructions for it.
        yield name, call, FLOAT8 if re.search(r"\bfp8|float8", name) and "of 0" not in name else PRODUCTS
    for name, call in invariant_cases():
        yield name, call, INVARIANT


def usual_cases() -> Iterator[Case]:
    for model in MODELS:
        yield from layer_cases(model)
        yield from attention_cases(model)
    yield from attention_variants()
    yield from plain_gemm_cases()
    yield from quantized_gemm_cases()
    yield from moe_cases()
    yield from sample_cases()
    yield from decode_step_cases()


def hopper_cases() -> Iterator[Case]:
    """The families that are written in Gluon, first: they are what a release of Triton is most likely to refuse."""
    for model in MODELS:
        yield f"hopper attention {model.name}", partial(attend, model, [2048] * 2, [4096, 2048])
    for dim in (64, 128):
        small = Model("small", 1024, 9, 3, 1, 1, qk_norm=False, dim=dim)
        yield f"hopper attention 9/3 x {dim} float16", partial(attend, small, [2048], [2048], dtype=FP16)
    for dtype in (BF16, FP16):
        for kind in ("silu", "gelu_tanh"):
            yield f"hopper moe {kind} {dtype}", partial(experts, 1024, kind=kind, dtype=dtype)
    for act, dtype in (("silu", BF16), ("gelu_tanh", FP16)):
        x, weight = new(512, 4096, dtype=dtype), new(2 * 14336, 4096, dtype=dtype)
        yield f"hopper gated gemm {act} {dtype}", partial(gated_gemm, x, weight, act)
        for rows, inner in ((2, 14336), (32, 18944), (64, 14336), (100, 18944), (128, 28672)):
            x, weight = new(rows, 4096, dtype=dtype), new(2 * inner, 4096, dtype=dtype)
            yield f"hopper gated few {rows} x {inner} {act} {dtype}", partial(gated_few, x, weight, act)
    streamed = ((2, 1024, 3072, BF16), (16, 4608, 3584, BF16), (32, 3584, 18944, FP16), (64, 4096, 14336, BF16))
    for rows, columns, inner, dtype in streamed:
        x, weight = new(rows, inner, dtype=dtype), new(columns, inner, dtype=dtype)
        counters = new(256, dtype=torch.int32)
        name = f"hopper stream {rows} {columns} x {inner} {dtype}"
        for bias in (None, new(columns, dtype=dtype)):
            yield name, partial(stream_gemm, x, weight, bias, counters)
        yield f"{name}, in one part", partial(stream_gemm, x, weight, None, None)
    for dtype in (INT8, FP8):
        for tile in (one for one in SHAPES if one.splits <= 2):
            yield f"hopper gemm {dtype} {tile}", partial(eight_bits, hopper_gemm, 128, 4096, 4096, dtype, shape=tile)
    for columns, inner in ((6144, 4096), (4096, 4096), (4096, 14336)):
        yield f"hopper one row {columns} x {inner}", partial(one_row, columns, inner)
    for act in ("", "silu", "gelu_tanh"):
        for dtype in (BF16, FP16):
            yield f"hopper one row gated by {act!r} {dtype}", partial(one_row, 28672, 4096, act=act, dtype=dtype)
    yield "hopper one row with bias, groups of 64", partial(one_row, 6144, 4096, group=64, bias=True, unnormed=False)


def layer_cases(model: Model) -> Iterator[Case]:
    for rows in (1, 64):
        at = f"{model.name} {rows} rows"
        x, residual, weight = new(rows, model.hidden), new(rows, model.hidden), new(model.hidden)
        gate_up = new(rows, 2 * model.inner)
        yield f"rms_norm {at}", partial(norm.rms_norm, x, weight, 1e-6)
        yield f"add_rms_norm {at}", partial(norm.add_rms_norm, x, residual, weight, 1e-6)
        yield f"act_mul {at}", partial(activation.act_mul, gate_up, "silu")
        yield f"rope_kv_write {at}", partial(write_kv, model, rows)
        for dtype in (INT8, FP8):
            for fixed in (None, new(dtype=FP32)):
                of = f"{dtype} {'own scale' if fixed is None else 'fixed scale'} {at}"
                yield f"quantize_rows {of}", partial(rows_of_eight_bits.quantize_rows, x, dtype, fixed)
                yield (
                    f"add_rms_norm_quantized {of}",
                    partial(rows_of_eight_bits.add_rms_norm_quantized, x, residual, weight, 1e-6, dtype, fixed),
                )
                yield (
                    f"act_mul_quantized {of}",
                    partial(rows_of_eight_bits.act_mul_quantized, gate_up, "silu", dtype, fixed),
                )
    for tokens in (64, 2048):
        for rank in (16, 64, 256):
            heads = (model.heads, model.heads + model.kv_heads, model.heads + 2 * model.kv_heads)
            ends = tuple(model.dim * one for one in heads)
            x, out = new(tokens, model.hidden), new(tokens, ends[-1])
            down, up = new(8, 3 * rank, model.hidden), new(8, rank, ends[-1])
            slots, ranks = new(tokens, dtype=torch.int64), new(8, dtype=torch.int64)
            of = f"{model.name}, {tokens} tokens, rank {rank}"
            yield f"add_low_rank {of}", partial(low_rank.add_low_rank, out, x, slots, down, up, ranks, ends)
    for form in KV_FORMS:
        yield f"rope_kv_write {model.name} {form}", partial(write_kv, model, 64, form=form)


def attention_cases(model: Model) -> Iterator[Case]:
    for form in (None, *KV_FORMS):
        at = f"{model.name} {form or 'bfloat16'}"
        yield f"decode 1 row {at}", partial(attend, model, [1], [4096], form=form)
        yield f"decode 64 rows {at}", partial(attend, model, [1] * 64, [1024] * 64, form=form)
        for width in (2, 3, 5):
            rows = [1] * 8 * width, [1024] * 8 * width
            yield f"decode 8 chains of {width} {at}", partial(attend, model, *rows, form=form, queries=width)
        for trees in (1, 8):
            rows = [1] * 17 * trees, [1024] * 17 * trees
            yield f"decode {trees} trees {at}", partial(attend, model, *rows, form=form, queries=17, fanout=4)
        yield f"decode 64 rows that share a prefix {at}", partial(attend, model, [1] * 64, [2048] * 64, form, shared=64)
        yield f"verify 5 tokens {at}", partial(attend, model, [5] * 8, [1024] * 8, form=form)
        yield f"chunk of 40 tokens {at}", partial(attend, model, [40], [300], form=form)
        yield f"gathered chunk {at}", partial(attend, model, [2048], [4096], form=form)


def attention_variants() -> Iterator[Case]:
    masks = {"window": Mask(window=512), "softcap": Mask(softcap=30.0)}
    for name, mask in masks.items():
        yield f"decode {name}", partial(attend, LLAMA, [1] * 8, [1024] * 8, mask=mask)
        yield f"chunk {name}", partial(attend, LLAMA, [40], [300], mask=mask)
        yield f"gathered chunk {name}", partial(attend, LLAMA, [2048], [4096], mask=mask)
    for dim in (64, 96, 256):
        other = Model("other", 1024, 8, 4, 1, 1, qk_norm=False, dim=dim)
        yield f"decode heads of {dim}", partial(attend, other, [1] * 8, [1024] * 8)
        yield f"chunk heads of {dim}", partial(attend, other, [40], [300])
        yield f"gathered chunk heads of {dim}", partial(attend, other, [2048], [4096])
    yield "decode float32", partial(attend, QWEN, [1] * 8, [1024] * 8, dtype=FP32)
    yield "chunk float32", partial(attend, QWEN, [40], [300], dtype=FP32)
    yield "decode latent", partial(attend_latent, [1] * 8, [1024] * 8)
    yield "chunk latent", partial(attend_latent, [40], [300])


def plain_gemm_cases() -> Iterator[Case]:
    for rows in (1, 16, 48):
        for columns, inner in ((6144, 4096), (4096, 14336)):
            x, weight = new(rows, inner), new(columns, inner)
            counters = new(counters_for(columns), dtype=torch.int32)
            yield f"small_gemm {rows} x {columns} x {inner}", partial(small_gemm, x, weight, counters=counters)


def quantized_gemm_cases() -> Iterator[Case]:
    for rows in (1, 8, 64):
        for columns, inner in ((6144, 4096), (4096, 14336)):
            at = f"{rows} x {columns} x {inner}"
            yield f"int8 {at}", partial(eight_bits, small_tiles, rows, columns, inner, INT8)
            yield f"fp8 {at}", partial(eight_bits, small_tiles, rows, columns, inner, FP8)
    x, weight, scale = new(1, 4096), new(6144, 4096, dtype=FP8), new(6144, dtype=FP32)
    yield "fp8 weights, bfloat16 row", partial(small_gemm, x, weight, scale=scale)
    forms = (("int4", 128, False), ("int4", 128, True), ("int4", 32, False), ("int8", 0, False), ("fp8", 0, False))
    for kind, group, zeros in forms:
        for columns, inner in ((6144, 4096), (28672, 4096), (4096, 14336)):
            codes = coded(columns, inner, kind, group, zeros)
            at = f"{kind} groups of {group}{' with zeros' if zeros else ''} {columns} x {inner}"
            counters = new(counters_for(columns), dtype=torch.int32)
            for rows in (1, 16, 128):
                call = partial(weight_only_gemm, new(rows, inner), codes, None, counters=counters)
                yield f"weight only {at}, {rows} rows", call
            yield f"widened {at}", partial(widened, codes, BF16)


def moe_cases() -> Iterator[Case]:
    for tokens in (1, 4, 64, 256, 1024, 8192):
        x, router = new(tokens, MIXTURE.hidden), new(MIXTURE.experts, MIXTURE.hidden, dtype=FP32)
        yield f"route {tokens} tokens", partial(moe_route.route, x, router, 8, True, 1.0)
    for tokens in (1, 4, 64, 256):
        yield f"moe {tokens} tokens", partial(experts, tokens)
    for per_expert in (4, 16, 48, 512):  # what runs where the Hopper kernels do not
        yield f"moe grouped, {per_expert} choices per expert", partial(experts, per_expert * 16, grouped=True)
    yield "moe grouped float32", partial(experts, 64, dtype=FP32)
    for form in ("int8", "int4-g32", "int4-g128-zeros", "w8a8", "fp8"):
        for tokens in (1, 1024):
            yield f"moe codes {form} {tokens} tokens", partial(coded_experts, tokens, form)


def invariant_cases() -> Iterator[Case]:
    yield "invariant decode", partial(attend, LLAMA, [1] * 8, [1024] * 8, op=attention_invariant.attention)
    yield "invariant chunk", partial(attend, LLAMA, [40], [300], op=attention_invariant.attention)
    for rows in (1, 16, 64, 512):
        yield f"invariant_gemm {rows} rows", partial(invariant_gemm, new(rows, 4096), new(6144, 4096))
    for tokens in (4, 64, 1024, 8192):
        yield f"invariant moe {tokens} tokens", partial(experts, tokens, op=moe_invariant.moe)


def sample_cases() -> Iterator[Case]:
    for rows in (1, 64):
        for name, greedy, filters in (("greedy", True, False), ("plain", False, False), ("filtered", False, True)):
            yield f"sample {name} {rows} rows", partial(choose, rows, greedy, filters)
    masks = new(8, 1 + 151936 // 32, dtype=torch.int32)
    for k in LOGPROB_BUCKETS:
        tokens, widths = new(64, dtype=torch.int64), new(64, dtype=torch.int32)
        yield f"logprobs {k}", partial(logprobs, new(64, 151936), tokens, widths, k)
    yield "shape", partial(shape_logits, 64)
    yield "allow_only", partial(allow_only, new(8, 151936, dtype=FP32), masks, new(8, dtype=torch.int64))


# Calls


def new(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def batch_of(counts: list[int], contexts: list[int], shared: int = 0) -> AttentionBatch:
    """`shared`: blocks that all rows begin with."""
    n = len(counts)
    return AttentionBatch(
        rows=new(n, dtype=torch.int32),
        q_start=new(n + 1, dtype=torch.int32),
        context=new(n, dtype=torch.int32),
        block_tables=new(n, -(-max(contexts) // BLOCK_SIZE), dtype=torch.int32),
        num_singles=sum(count == 1 for count in counts),
        max_query=max(counts),
        max_context=max(contexts),
        host_rows=list(range(n)),
        host_counts=counts,
        host_context=contexts,
        shared_members=new(n, dtype=torch.int32) if shared else None,
        shared_tokens=new(n, dtype=torch.int32) if shared else None,
    )


def caches(heads: int, dim: int, form: str | None, dtype: torch.dtype) -> tuple[Any, Any, KVScales | None]:
    blocks = 4096
    if form is None:
        return new(blocks, BLOCK_SIZE, heads, dim, dtype=dtype), new(blocks, BLOCK_SIZE, heads, dim, dtype=dtype), None
    kept = KV_FORMS[form]
    codes = [new(blocks, BLOCK_SIZE, heads, kept.width(dim), dtype=kept.dtype) for _ in range(2)]
    scales = [new(blocks, BLOCK_SIZE, heads, kept.scales(dim)) for _ in range(2)]
    return codes[0], codes[1], KVScales(*scales)


def attend(
    model: Model,
    counts: list[int],
    contexts: list[int],
    form: str | None = None,
    *,
    mask: Mask = CAUSAL,
    shared: int = 0,
    dtype: torch.dtype = BF16,
    op: Callable[..., Any] = attention,
    queries: int = 1,
    fanout: int = 0,  # of the trees that these are, if they are
) -> None:
    fused = new(sum(counts), (model.heads + 2 * model.kv_heads) * model.dim, dtype=dtype)
    q = fused[:, : model.heads * model.dim].view(-1, model.heads, model.dim)
    keys, values, scales = caches(model.kv_heads, model.dim, form, dtype)
    batch = replace(batch_of(counts, contexts, shared), queries=queries)
    if fanout:
        batch = replace(batch, tails=new(len(counts), dtype=torch.int32), fanout=fanout)
    op(q, keys, values, batch, mask, model.dim**-0.5, scales)


def attend_latent(counts: list[int], contexts: list[int]) -> None:
    keys = new(4096, BLOCK_SIZE, 1, 576)
    attention(new(sum(counts), 16, 576), keys, keys[..., 64:], batch_of(counts, contexts), CAUSAL, 576**-0.5)


def write_kv(model: Model, rows: int, form: str | None = None) -> None:
    fused = new(rows, (model.heads + 2 * model.kv_heads) * model.dim)
    q, k, v = (
        part.view(rows, -1, model.dim)
        for part in fused.split([heads * model.dim for heads in (model.heads, model.kv_heads, model.kv_heads)], dim=1)
    )
    keys, values, scales = caches(model.kv_heads, model.dim, form, BF16)
    norms = (new(model.dim), new(model.dim), 1e-6) if model.qk_norm else (None, None, 0.0)
    slots = new(rows, dtype=torch.int64)
    rope.rope_kv_write(
        q, k, v, new(4096, model.dim, dtype=FP32), new(rows, dtype=torch.int64), keys, values, slots, *norms, scales
    )


def eight_bits(op: Callable[..., Any], rows: int, columns: int, inner: int, dtype: torch.dtype, **options: Any) -> None:
    scales = new(rows, dtype=FP32), new(columns, dtype=FP32)
    counters = new(counters_for(columns), dtype=torch.int32)
    values, weight = new(rows, inner, dtype=dtype), new(columns, inner, dtype=dtype)
    op(values, scales[0], weight, scales[1], None, counters, BF16, **options)


def small_tiles(
    values: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: None,
    counters: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    small_gemm(values, weight, bias, scale=scale, x_scale=x_scale, counters=counters, dtype=dtype)


def coded(columns: int, inner: int, kind: str, group: int, zeros: bool = False) -> Codes:
    groups = inner // (group or inner)
    return Codes(
        new(columns // 16, inner // parts_of(kind) // 16, 256, dtype=torch.int16),
        new(columns // 16, groups, 16, dtype=FP32),
        new(columns // 16, groups, 16, dtype=INT8) if zeros else None,
        kind,
    )


def one_row(
    columns: int,
    inner: int,
    *,
    act: str = "",
    group: int = 128,
    bias: bool = False,
    unnormed: bool = True,
    dtype: torch.dtype = BF16,
) -> None:
    rows = [new(1, inner, dtype=dtype) for _ in range(3)]
    x = Unnormed(rows[0], rows[1], new(inner, dtype=dtype), 1e-6, rows[2]) if unnormed else rows[0]
    one_row_gemm(x, coded(columns, inner, "int4", group), new(columns, dtype=dtype) if bias else None, act)


def experts(
    tokens: int,
    *,
    kind: str = "silu",
    dtype: torch.dtype = BF16,
    grouped: bool = False,
    op: Callable[..., Any] = moe.moe,
) -> None:
    model = MIXTURE
    x, weights = new(tokens, model.hidden, dtype=dtype), new(tokens, 8, dtype=FP32)
    chosen = new(tokens, 8, dtype=torch.int32)
    gate_up = new(model.experts, 2 * model.inner, model.hidden, dtype=dtype)
    down = new(model.experts, model.hidden, model.inner, dtype=dtype)
    if grouped:
        shapes = moe.shapes(chosen.numel() / model.experts, dtype)
        moe.grouped(x, weights, chosen, gate_up, down, kind, shapes)
    else:
        op(x, weights, chosen, gate_up, down, kind)


def coded_experts(tokens: int, form: str) -> None:
    model, made = MIXTURE, []
    for rows, columns in ((2 * model.inner, model.hidden), (model.hidden, model.inner)):
        one = ExpertCodes(parse_form(form)).allocate(rows, columns, BF16, torch.device("cpu"))
        made.append({name: new(model.experts, *part.shape, dtype=part.dtype) for name, part in one.items()})
    op = moe_codes.moe_w8a8 if form == "w8a8" else moe_codes.moe_codes
    x, weights = new(tokens, model.hidden), new(tokens, 8, dtype=FP32)
    op(x, weights, new(tokens, 8, dtype=torch.int32), *made, "silu")


def choose(rows: int, greedy: bool, filters: bool) -> None:
    floats = [new(rows, dtype=FP32) for _ in range(3)]
    batch = SampleBatch(
        temperature=floats[0],
        top_k=new(rows, dtype=torch.int32),
        top_p=floats[1],
        min_p=floats[2],
        seed=new(rows, dtype=torch.int64),
        position=new(rows, dtype=torch.int64),
        all_greedy=greedy,
        any_filter=filters,
    )
    sample(new(rows, 151936), batch)


def shape_logits(rows: int) -> None:
    words, wholes = [new(rows, dtype=torch.int64) for _ in range(3)], [new(rows, dtype=torch.int32) for _ in range(2)]
    batch = ShapeBatch(
        rows=words[0],
        positions=words[1],
        tokens=new(rows, 4096, dtype=torch.int32),
        prompt_len=wholes[0],
        repetition=new(rows, dtype=FP32),
        presence=new(rows, dtype=FP32),
        frequency=new(rows, dtype=FP32),
        stops_from=wholes[1],
        edits={},
        edits_at=words[2],
        masks=new(rows, 1 + 151936 // 32, dtype=torch.int32),
        mask_rows=words[0],
        counters=new(rows, 151936, dtype=torch.int32),
    )
    shape(new(rows, 151936, dtype=FP32), batch)


def tree_cases(tables: DecodeTables, rows: torch.Tensor) -> Iterator[Case]:
    """Trees of 4 x 4 nodes: verified, kept, and grown by a depth."""
    trees = TreeTables(new(513, 16, dtype=torch.int64), new(513, 16, dtype=torch.int64), 4)
    for dtype, scales in ((BF16, None), (torch.int8, new(30, 2, 512, BLOCK_SIZE, 3, 1))):
        arena = new(30, 2, 512, BLOCK_SIZE, 3, 64, dtype=dtype)

        def step(arena: torch.Tensor = arena, scales: Any = scales) -> None:
            told, proposed = new(6, 8, dtype=torch.int64), new(80, dtype=torch.int64)
            inputs = tree_step.tree_inputs(tables, trees, told, proposed)
            kept = tree_step.keep_tree(tables, rows, inputs, new(8 * 17, dtype=torch.int64), 4, -2)
            tree_step.move_kv(arena, scales, tables, rows, kept)

        yield f"step that verifies trees {dtype}", step
    noise = TreeNoise(new(8, dtype=FP32), new(8, dtype=torch.int64), rows)
    names = new(8192, dtype=torch.int64)
    for depth, heat in ((0, None), (1, None), (3, None), (0, noise), (3, noise)):
        parents = 8 * (1 if depth == 0 else 4)
        scores = None if depth == 0 else new(parents, dtype=FP32)
        grown = new(parents, 8192), names, new(parents, 576), scores, trees, tables.drafts, rows, depth, heat
        yield f"tree grown by depth {depth}, {'warm' if heat else 'greedy'}", partial(draft_tree.grow_tree, *grown)


def decode_step_cases() -> Iterator[Case]:
    """What stands around a decode step, and around a draft head."""
    tables = DecodeTables(
        new(513, 8208, dtype=torch.int32), new(513, 512, dtype=torch.int32), new(513, dtype=torch.int64),
        new(513, 4, dtype=torch.int64), -1, 512, BLOCK_SIZE,
    )  # fmt: skip
    rows, told = new(64, dtype=torch.int64), (new(4, 64, dtype=torch.int64), new(128, dtype=torch.int64))
    for drafts in (None, told):
        numbers = None if drafts is None else rows

        def both(drafts: Any = drafts, numbers: Any = numbers) -> None:
            inputs = decode_step.decode_inputs(tables, rows, rows, drafts)
            decode_step.keep_sampled(tables, rows, inputs, rows, numbers, -2)

        yield f"decode step {'with' if drafts else 'without'} drafts", both
    yield from tree_cases(tables, rows[:8])
    state, embed, weight = new(8, 576), new(49152, 576), new(1152)
    yield "input of a draft head", partial(draft_head.head_input, state, rows[:8], embed, weight, 1e-5)
    for dim, rotated in ((64, 64), (128, 128), (96, 48)):
        caches, places = new(2, 512, BLOCK_SIZE, 8, dim).unbind(), new(3, 700, dtype=torch.int64).unbind()
        yield f"module copied, heads of {dim}", partial(place.place_kv, *caches, new(8, rotated, dtype=FP32), *places)
    turn = partial(rope.rope, new(8, 9, 64), new(4096, 64, dtype=FP32), new(8, dtype=torch.int32))
    yield "queries of a draft head, turned", turn
    names, drafts = new(8192, dtype=torch.int64), tables.drafts
    sampled, warm, shares = new(8, dtype=torch.int64), new(8, dtype=torch.bool), new(8, dtype=FP32)
    trained = new(8, 8192), new(8, 8192), sampled, warm, shares, 0.3, 1.0, 1e-9
    yield "loss of a draft head", partial(draft_loss.draft_loss_rows, *trained)
    yield "pick of a draft head", partial(draft_head.head_pick, new(8, 8192), names, rows[:8], drafts, 1)
